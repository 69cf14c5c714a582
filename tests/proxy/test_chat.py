"""Chat and completions over real sockets: bodies, streams, routes in headers, failures, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from magnitude_engine import api
from magnitude_proxy import answer as answer_module
from magnitude_proxy.config import DeadlineConfig, ProxyConfig, StoreConfig, UpstreamConfig, WorkerConfig
from testkit import store, wire
from testkit.proxy import ASK, Proxy, Reply, proxy_config, proxying, routing
from testkit.routes import (
    FOREVER,
    Action,
    Pause,
    ScriptedRoute,
    answer,
    completed,
    delta,
    failed,
    finished,
    progress,
    started,
)
from testkit.scripted_worker import ScriptedWorker
from testkit.upstream import OpenAIStub

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
LOCAL_ASK = {**ASK, "model": "magnitude"}


def two_routes(folder: Path, **changes: Any) -> ProxyConfig:
    """Returns settings of a proxy with a worker and one upstream, for scripted routes in their place."""
    upstreams = (UpstreamConfig(name="u0", url="http://127.0.0.1:9/v1"),)
    return proxy_config(folder, worker=WorkerConfig(mode="attach", socket="unused"), upstreams=upstreams, **changes)


def text_of(events: list[Any]) -> str:
    return "".join(c["delta"].get("content") or "" for e in events if e != "[DONE]" for c in e.get("choices", ()))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.005)


def checked_chat(reply: Reply) -> dict[str, Any]:
    assert reply.status == 200, reply.body
    body: dict[str, Any] = reply.json
    wire.check("CreateChatCompletionResponse", body)
    return body


def checked_chunks(reply: Reply) -> list[Any]:
    assert reply.status == 200, reply.body
    events = reply.events
    assert events[-1] == "[DONE]"
    for chunk in events[:-1]:
        wire.check_chat_chunk(chunk)
    assert len({(e["id"], e["created"], e["model"]) for e in events[:-1]}) == 1
    return events[:-1]


async def test_plain_chat_through_an_upstream(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        reply = await proxy.post("/chat/completions", {**ASK, "n": 2, "logprobs": True, "top_logprobs": 2, "wish": 1})
        body = checked_chat(reply)
        assert [choice["message"]["content"] for choice in body["choices"]] == [stub.text] * 2
        assert len(body["choices"][0]["logprobs"]["content"]) == 3
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        assert body["usage"]["magnitude"]["cached_tokens"] == 2
        assert "accepted_prediction_tokens" not in body["usage"]["completion_tokens_details"]
        assert reply.header("x-magnitude-route") == "upstream:u0"
        assert len(str(reply.header("x-magnitude-session"))) == 32
        assert reply.header("x-magnitude-ignored") is None
        assert stub.requests[0].body["wish"] == 1


async def test_streamed_chat(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        plain = checked_chunks(await proxy.post("/chat/completions", {**ASK, "stream": True}))
        assert plain[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert text_of(plain) == stub.text
        assert [c["choices"][0]["finish_reason"] for c in plain] == [None] * (len(plain) - 1) + ["stop"]
        assert all("usage" not in chunk for chunk in plain)
        counted = checked_chunks(
            await proxy.post("/chat/completions", {**ASK, "stream": True, "stream_options": {"include_usage": True}})
        )
        assert all(chunk["usage"] is None for chunk in counted[:-1])
        assert counted[-1]["choices"] == []
        assert counted[-1]["usage"]["total_tokens"] == 8


async def test_tool_calls_in_both_forms(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        whole = checked_chat(await proxy.post("/chat/completions", {**ASK, "tools": [TOOL]}))
        message = whole["choices"][0]["message"]
        assert message["content"] is None
        assert whole["choices"][0]["finish_reason"] == "tool_calls"
        chunks = checked_chunks(await proxy.post("/chat/completions", {**ASK, "tools": [TOOL], "stream": True}))
        pieces = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert (pieces[0]["id"], pieces[0]["type"], pieces[0]["function"]["name"]) == ("call_1", "function", "weather")
        streamed = "".join(piece["function"]["arguments"] for piece in pieces)
        assert streamed == message["tool_calls"][0]["function"]["arguments"] == stub.arguments


async def test_choices_interleave_with_a_role_each(tmp_path: Path) -> None:
    events: list[Action] = [delta("a", 1), delta("b", 2, choice=1), finished(1, "length"), finished(0), completed()]
    async with routing(two_routes(tmp_path), ScriptedRoute("local", [events])) as proxy:
        chunks = checked_chunks(await proxy.post("/chat/completions", {**LOCAL_ASK, "stream": True, "n": 2}))
    roles = [c["choices"][0]["index"] for c in chunks if "role" in c["choices"][0]["delta"]]
    assert roles == [0, 1]
    ends = {c["choices"][0]["index"]: c["choices"][0]["finish_reason"] for c in chunks}
    assert ends == {0: "stop", 1: "length"}


@pytest.mark.parametrize("prompt", ["Hi", ["Hi", "Ho"], [1, 2], [[1], [2]]])
@pytest.mark.parametrize("n", [1, 2])
async def test_completions_of_every_prompt_form(tmp_path: Path, prompt: Any, n: int) -> None:
    count = n * (2 if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1)
    ask = {"model": "stub-model", "prompt": prompt, "n": n, "logprobs": 1}
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        reply = await proxy.post("/completions", ask)
        assert reply.status == 200
        wire.check("CreateCompletionResponse", reply.json)
        assert [choice["index"] for choice in reply.json["choices"]] == list(range(count))
        assert {choice["text"] for choice in reply.json["choices"]} == {stub.text}
        assert reply.json["usage"]["completion_tokens"] == 3 * count
        stream = await proxy.post("/completions", {**ask, "stream": True, "stream_options": {"include_usage": True}})
        assert stream.events[-1] == "[DONE]"
        texts = [""] * count
        for chunk in stream.events[:-1]:
            wire.check_completion_chunk(chunk)
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == [stub.text] * count
        assert stream.events[-2]["usage"]["completion_tokens"] == 3 * count
        sent = [request.body["prompt"] for request in stub.requests]
        assert sent.count(prompt) == (2 if count == n else 0)


async def test_one_failed_prompt_fails_the_whole_answer(tmp_path: Path) -> None:
    async with OpenAIStub(failures=[400]) as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        reply = await proxy.post("/completions", {"prompt": ["a", "b", "c"]})
        assert reply.status == 400
        assert "scripted 400" in reply.error["message"]


async def test_an_upstream_refusal_is_passed_on_with_its_status(tmp_path: Path) -> None:
    for stream in (False, True):
        async with OpenAIStub(failures=[404]) as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
            reply = await proxy.post("/chat/completions", {**ASK, "stream": stream})
            assert reply.status == 404
            assert "scripted 404" in reply.error["message"]
            assert reply.header("x-magnitude-session")


async def test_the_route_and_the_reason_of_a_fallback_are_told(tmp_path: Path) -> None:
    for stream in (False, True):
        local = ScriptedRoute("local", [[started(), failed("worker_lost")]])
        async with routing(two_routes(tmp_path), local, ScriptedRoute("u0", [answer("hi")])) as proxy:
            reply = await proxy.post("/chat/completions", {**LOCAL_ASK, "stream": stream})
        assert reply.status == 200
        assert reply.header("x-magnitude-route") == "fallback:u0"
        assert reply.header("x-magnitude-fallback-reason") == "worker_lost"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (failed("invalid_value", retryable=False, param="n"), 400),
        (failed("context_length_exceeded", retryable=False), 400),
        (failed("overloaded", retry_after_s=7.0), 429),
        (failed("numeric_failure"), 503),
    ],
)
async def test_failures_before_content_are_http_errors(
    tmp_path: Path, failure: api.Failed, status: int, stream: bool
) -> None:
    config = proxy_config(tmp_path, worker=WorkerConfig(mode="attach", socket="unused"))
    async with routing(config, ScriptedRoute("local", [[started(), failure]])) as proxy:
        reply = await proxy.post("/chat/completions", {**LOCAL_ASK, "stream": stream})
    assert reply.status == status
    assert reply.error["code"] == failure.code
    assert reply.error["param"] == failure.param
    assert reply.header("retry-after") == ("7" if status == 429 else None)


@pytest.mark.thorough
async def test_a_failure_after_content_is_one_error_event_and_no_done(tmp_path: Path) -> None:
    events: list[Action] = [started(), delta("Hel", 1), Pause(0.05), failed("numeric_failure", retryable=False)]
    async with routing(two_routes(tmp_path), ScriptedRoute("local", [events])) as proxy:
        stream = await proxy.post("/chat/completions", {**LOCAL_ASK, "stream": True})
        whole = await proxy.post("/chat/completions", LOCAL_ASK)
    assert stream.status == 200
    assert wire.check_error(stream.events[-1])["code"] == "numeric_failure"
    assert text_of(stream.events[:-1]) == "Hel"
    assert b"[DONE]" not in stream.body
    assert (whole.status, whole.error["code"]) == (503, "numeric_failure")


@pytest.mark.thorough
async def test_headers_wait_for_content_and_name_the_route_that_answers(tmp_path: Path) -> None:
    local = ScriptedRoute("local", [[started(), progress(1), Pause(0.1), failed("worker_lost")]])
    async with routing(two_routes(tmp_path), local, ScriptedRoute("u0", [[Pause(0.05), *answer("hi")]])) as proxy:
        reply = await proxy.post("/chat/completions", {**LOCAL_ASK, "stream": True})
    assert reply.header("x-magnitude-route") == "fallback:u0"
    assert all("magnitude" not in chunk for chunk in checked_chunks(reply))


@pytest.mark.thorough
async def test_a_route_that_changes_after_the_headers_is_told_in_the_last_chunk(tmp_path: Path) -> None:
    deadlines = DeadlineConfig(hold_headers_s=0.02)
    local = ScriptedRoute("local", [[started(), Pause(0.2), failed("worker_lost")]])
    for options in ({}, {"stream_options": {"include_usage": True}}):
        async with routing(
            two_routes(tmp_path, deadlines=deadlines), local, ScriptedRoute("u0", [answer("hi")])
        ) as proxy:
            reply = await proxy.post("/chat/completions", {**LOCAL_ASK, "stream": True, **options})
        assert reply.header("x-magnitude-route") == "local"
        assert checked_chunks(reply)[-1]["magnitude"] == {"route": "fallback:u0", "fallback_reason": "worker_lost"}


@pytest.mark.thorough
async def test_a_failure_after_held_headers_is_an_event(tmp_path: Path) -> None:
    deadlines = DeadlineConfig(hold_headers_s=0.02)
    local = ScriptedRoute("local", [[started(), Pause(0.1), failed("numeric_failure", retryable=False)]])
    config = proxy_config(tmp_path, worker=WorkerConfig(mode="attach", socket="unused"), deadlines=deadlines)
    async with routing(config, local) as proxy:
        reply = await proxy.post("/chat/completions", {**LOCAL_ASK, "stream": True})
    assert reply.status == 200
    assert [wire.check_error(event)["code"] for event in reply.events] == ["numeric_failure"]


@pytest.mark.thorough
async def test_silence_is_filled_with_comments_by_the_clock(tmp_path: Path) -> None:
    deadlines = DeadlineConfig(hold_headers_s=0.02, keepalive_s=0.03, progress_s=60)
    steps = [progress(i) for i in range(1, 12)]
    quiet: list[Action] = [event for step in steps for event in (step, Pause(0.02))]
    local = ScriptedRoute(
        "local", [[started(), *quiet, delta("a", 1), Pause(0.1), delta("b", 2), finished(), completed()]]
    )
    async with routing(two_routes(tmp_path, deadlines=deadlines), local) as proxy:
        reply = await proxy.post("/chat/completions", {**LOCAL_ASK, "stream": True})
    before, _, after = reply.body.partition(b'"a"')
    assert before.count(b": keep-alive\n\n") >= 3
    assert after.count(b": keep-alive\n\n") >= 2
    assert text_of(checked_chunks(reply)) == "ab"


async def test_model_names_decide_who_may_answer(tmp_path: Path) -> None:
    worker = WorkerConfig(mode="attach", socket="unused", model="/models/tiny.gguf", aliases=("gpt-4o",))
    mapped = UpstreamConfig(name="u0", url="http://127.0.0.1:9/v1", models={"big": "big-1"})
    local, remote = ScriptedRoute("local", [answer("local")]), ScriptedRoute("u0", [answer("remote")])
    async with routing(proxy_config(tmp_path, worker=worker, upstreams=(mapped,)), local, remote) as proxy:
        for name in ("tiny.gguf", "gpt-4o", "magnitude", "default", ""):
            reply = await proxy.post("/chat/completions", {**ASK, "model": name})
            assert reply.header("x-magnitude-route") == "local", name
            assert checked_chat(reply)["model"] == "tiny.gguf"
        body = {name: value for name, value in ASK.items() if name != "model"}
        assert (await proxy.post("/chat/completions", body)).header("x-magnitude-route") == "local"
        big = await proxy.post("/chat/completions", {**ASK, "model": "big"})
        assert big.header("x-magnitude-route") == "upstream:u0"
        assert checked_chat(big)["model"] == "big"
        unknown = await proxy.post("/chat/completions", {**ASK, "model": "other"})
        assert (unknown.status, unknown.error["code"], unknown.error["param"]) == (404, "model_not_found", "model")
        assert "tiny.gguf, big" in unknown.error["message"]


async def test_what_the_worker_cannot_do_goes_upstream_or_is_a_400(tmp_path: Path) -> None:
    wish = {**LOCAL_ASK, "modalities": ["text", "audio"]}
    local, remote = ScriptedRoute("local", [answer("local")]), ScriptedRoute("u0", [answer("remote")])
    async with routing(two_routes(tmp_path), local, remote) as proxy:
        assert (await proxy.post("/chat/completions", wish)).header("x-magnitude-route") == "upstream:u0"
    alone = proxy_config(tmp_path, worker=WorkerConfig(mode="attach", socket="unused"))
    async with routing(alone, local) as proxy:
        reply = await proxy.post("/chat/completions", wish)
        assert (reply.status, reply.error["param"]) == (400, "modalities")
        assert reply.error["code"] == "unsupported_feature"
    assert local.seen == []


async def test_fields_that_the_worker_ignores_are_named(tmp_path: Path) -> None:
    async with routing(two_routes(tmp_path), ScriptedRoute("local", [answer()])) as proxy:
        reply = await proxy.post(
            "/chat/completions", {**LOCAL_ASK, "wish": 1, "evil\r\nx: y": 1, "magnitude": {"a": 1}}
        )
    assert reply.header("x-magnitude-ignored") == "wish, magnitude.a"


@pytest.mark.thorough
async def test_sessions_count_their_steps_in_a_real_store(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as valkey, OpenAIStub() as stub:
        config = proxy_config(tmp_path, stub.url, store=StoreConfig(url=valkey.url, timeout_s=2))
        async with proxying(config) as proxy:
            ids = []
            for stream in (False, True, False):
                reply = await proxy.post("/chat/completions", {**ASK, "stream": stream}, x_magnitude_session="one")
                ids.append(str(reply.header("x-magnitude-session")))
                assert reply.header("x-magnitude-degraded") is None
            assert len(set(ids)) == 1
            record = await proxy.running.surface.sessions.get(ids[0])
            assert record is not None
            assert record.steps == 3
            await valkey.kill()
            reply = await proxy.post("/chat/completions", ASK, x_magnitude_session="one")
            assert reply.status == 200
            assert reply.header("x-magnitude-degraded") == "store"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_the_worker(tmp_path: Path, stream: bool) -> None:
    worker = ScriptedWorker(tmp_path / "w.sock")
    await worker.start()
    config = proxy_config(tmp_path, worker=WorkerConfig(mode="attach", socket=str(worker.socket)))
    async with proxying(config) as proxy:
        await until(lambda: proxy.running.surface.dispatcher.ready())
        ask = {"prompt": "2 pause", "stream": stream}
        async with aiohttp.ClientSession() as client:
            task = asyncio.create_task(_first_bytes(client, f"{proxy.url}/completions", ask))
            await until(lambda: len(worker.generated) == 1)
            if stream:
                assert await task
            else:
                task.cancel()
                await asyncio.wait({task})
        await until(lambda: len(worker.cancelled) == 1)
        assert worker.cancelled[0].request == worker.generated[0].request
        record = await proxy.running.surface.sessions.get(worker.generated[0].session)
        assert record is not None
        # The step is over, and the session does not wait for it.
        assert (record.steps, record.failures, record.state) == (1, 1, "failed")
        text = (await proxy.get(f"{proxy.admin}/metrics")).body.decode()
        assert "magnitude_client_disconnects_total 1.0" in text
        again = await proxy.post("/completions", {"prompt": "3"})
        assert again.json["choices"][0]["text"] == "w0 w1 w2 "
    await worker.close()


async def _first_bytes(client: aiohttp.ClientSession, url: str, ask: Any) -> bytes:
    async with client.post(url, json=ask) as response:
        data = await response.content.readany()
        response.close()
        return data


@pytest.mark.thorough
async def test_a_client_that_does_not_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "STALL_S", 0.2)
    flood = [delta("x" * 60_000, 1) for _ in range(400)]
    local = ScriptedRoute("local", [[started(), *flood, FOREVER]])
    async with routing(two_routes(tmp_path), local) as proxy:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", proxy.running.bound.port))
            body = json.dumps({**LOCAL_ASK, "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            await until(lambda: local.log == ["open local", "close local"])


@pytest.mark.thorough
async def test_many_streams_at_once_keep_apart(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:

        async def one(i: int) -> None:
            ask = {**ASK, "stream": True, "messages": [{"role": "user", "content": str(i)}]}
            reply = await proxy.post("/chat/completions", ask, x_magnitude_session=str(i), x_request_id=f"same-{i % 3}")
            assert text_of(checked_chunks(reply)) == stub.text

        await asyncio.gather(*(one(i) for i in range(12)))


async def test_the_published_example_of_curl(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        await _curl(proxy)


async def _curl(proxy: Proxy) -> None:
    from magnitude_proxy.app import example

    text = example(proxy.running.surface.config, proxy.running.bound)
    command = next(line.strip() for line in text.splitlines() if line.strip().startswith("curl"))
    process = await asyncio.create_subprocess_shell(f"{command} -s", stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert b"data: [DONE]" in output


async def test_a_stream_of_events_without_an_outcome_gets_one() -> None:
    got: list[object] = []

    async def put(item: object) -> None:
        got.append(item)

    async def cut() -> AsyncGenerator[answer_module.Item, None]:
        yield delta("a", 1)

    async def broken() -> AsyncGenerator[answer_module.Item, None]:
        yield delta("a", 1)
        raise RuntimeError("a bug")

    for events in (cut(), broken()):
        got.clear()
        await answer_module.pump(events, put)
        assert isinstance(got[-1], api.Failed)
        assert got[-1].code == "internal_error"
        assert len(got) == 2


async def test_prompts_of_one_request_draw_independent_noise(tmp_path: Path) -> None:
    local = ScriptedRoute("local", [answer("x")])
    async with routing(two_routes(tmp_path), local) as proxy:
        ask = {"model": LOCAL_ASK["model"], "prompt": ["a", "b", "c"], "seed": 7}
        assert (await proxy.post("/completions", ask)).status == 200
    seeds = sorted(s.request.sampling.seed for s in local.seen)
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert seeds[-1] < 1 << 63
