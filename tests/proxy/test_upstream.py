"""The upstream route over real sockets: a well-behaved server, and one that plays exact bytes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnitude_engine import api
from magnitude_engine.errors import ConfigError
from magnitude_proxy import errors
from magnitude_proxy.config import DeadlineConfig, RetryConfig, TelemetryConfig, UpstreamConfig
from magnitude_proxy.routing.fallback import Dispatcher
from magnitude_proxy.routing.route import Step, Taken
from magnitude_proxy.telemetry import Telemetry
from magnitude_proxy.upstream.client import Upstream, make_session
from testkit.routes import ScriptedRoute, delta, failed, make_step, started
from testkit.upstream import (
    HANG,
    KEEP,
    RESET,
    STREAM_HEAD,
    OpenAIStub,
    Pause,
    Script,
    ScriptedServer,
    chunk,
    chunked,
    head,
    json_answer,
    refusing_url,
    split,
    sse,
)

Events = list[api.AnswerEvent]
END = sse(chunk(finish="stop"), "[DONE]")
WHOLE = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}


@asynccontextmanager
async def upstream(url: str, **settings: Any) -> AsyncIterator[Upstream]:
    telemetry = Telemetry(TelemetryConfig())
    async with make_session() as session:
        yield Upstream(UpstreamConfig(name="up", url=url, **settings), session, telemetry, time.monotonic)
    telemetry.close()


async def collect(route: Upstream, step: Step | None = None) -> Events:
    """Returns the events of one step; checks the terminal law."""
    events = [event async for event in route.answer(step or make_step(), 1)]
    ends = [e for e in events if isinstance(e, api.Completed | api.Failed)]
    assert ends == events[-1:]
    return events


async def ask(url: str, step: Step | None = None, **settings: Any) -> Events:
    async with upstream(url, **settings) as route:
        return await collect(route, step)


async def play(*scripts: Script, step: Step | None = None, **settings: Any) -> Events:
    async with ScriptedServer(scripts) as server:
        return await ask(server.url, step, **settings)


def text_of(events: Events, choice: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, api.Delta) and e.choice == choice)


def failure_of(events: Events) -> api.Failed:
    last = events[-1]
    assert isinstance(last, api.Failed)
    return last


WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


# A well-behaved server


@pytest.mark.parametrize("stream", [True, False])
async def test_text_finish_and_usage(stream: bool) -> None:
    async with OpenAIStub(text="Hello from afar") as stub:
        events = await ask(stub.url, make_step(stream=stream))
    assert isinstance(events[0], api.Started)
    assert text_of(events) == "Hello from afar"
    assert [e.reason for e in events if isinstance(e, api.Finished)] == ["stop"]
    usage = api.Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=2)
    assert events[-1] == api.Completed(request="r", epoch=1, usage=usage)


@pytest.mark.parametrize("stream", [True, False])
async def test_tool_calls(stream: bool) -> None:
    async with OpenAIStub() as stub:
        step = make_step(stream=stream, body={"model": "m", "messages": [], "tools": [WEATHER]})
        events = await ask(stub.url, step)
    calls = [call for e in events if isinstance(e, api.Delta) for call in e.tool_calls]
    assert (calls[0].index, calls[0].id, calls[0].name) == (0, "call_1", "weather")
    assert "".join(call.arguments for call in calls) == '{"city": "Paris"}'
    assert [e.reason for e in events if isinstance(e, api.Finished)] == ["tool_calls"]


@pytest.mark.parametrize("stream", [True, False])
async def test_choices_and_logprobs(stream: bool) -> None:
    async with OpenAIStub(text="a b") as stub:
        body = {"model": "m", "messages": [], "n": 2, "logprobs": True, "top_logprobs": 2}
        events = await ask(stub.url, make_step(stream=stream, body=body, n=2))
    assert [text_of(events, choice) for choice in (0, 1)] == ["a b", "a b"]
    found = [p for e in events if isinstance(e, api.Delta) and e.choice == 1 for p in e.logprobs]
    assert [(p.token, p.logprob, p.bytes) for p in found] == [("a", -0.25, (97,)), (" b", -0.25, (32, 98))]
    assert [t.token for t in found[0].top] == ["a", "x"]


@pytest.mark.parametrize("stream", [True, False])
async def test_completions(stream: bool) -> None:
    async with OpenAIStub(text="a b") as stub:
        step = make_step("completions", stream=stream, body={"model": "m", "prompt": "p", "logprobs": 1})
        events = await ask(stub.url, step)
        assert stub.requests[0].path == "/v1/completions"
    assert text_of(events) == "a b"
    found = [p for e in events if isinstance(e, api.Delta) for p in e.logprobs]
    assert [(p.token, p.logprob) for p in found] == [("a", -0.25), (" b", -0.25)]
    assert [t.token for t in found[1].top] == [" b", "x"]


async def test_what_is_sent(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sk-upstream\n")
    body = {
        "model": "gpt-x",
        "messages": [{"role": "user", "content": "é"}],
        "magnitude": {"session": "s"},
        "stream_options": {"include_usage": False, "other": 1},
        "unknown": [1],
    }
    async with OpenAIStub() as stub:
        async with upstream(stub.url + "/", key_file=str(key), models={"gpt-x": "mapped", "*": "any"}) as route:
            await collect(route, make_step(body=body))
            await collect(route, make_step(body={**body, "model": "else"}, stream=False))
        first, second = stub.requests
    assert first.body == {
        "model": "mapped",
        "messages": [{"role": "user", "content": "é"}],
        "unknown": [1],
        "stream": True,
        "stream_options": {"include_usage": True, "other": 1},
    }
    assert second.body["model"] == "any"
    assert second.body["stream"] is False
    assert "stream_options" not in second.body
    assert first.headers["Authorization"] == "Bearer sk-upstream"
    assert first.headers["Accept-Encoding"] == "identity"
    assert set(first.headers) == {
        "Host", "Accept", "Accept-Encoding", "User-Agent", "Content-Type", "Authorization", "Content-Length",
    }  # fmt: skip
    assert body["magnitude"] == {"session": "s"}


@pytest.mark.thorough
async def test_a_large_body_arrives_whole() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x" * 3_000_000}]}
    async with OpenAIStub() as stub:
        events = await ask(stub.url, make_step(body=body))
        assert stub.requests[0].body["messages"] == body["messages"]
    assert isinstance(events[-1], api.Completed)


async def test_models_are_listed_and_kept() -> None:
    async with OpenAIStub(model="big") as stub, upstream(stub.url) as route:
        assert await route.models() == ("big",)
        stub.model = "other"
        assert await route.models() == ("big",)
    async with refusing_url() as url, upstream(url) as route:
        assert await route.models() == ()


@pytest.mark.parametrize("content", [None, "", "two words\n", "ключ"])
async def test_unusable_key_files_stop_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_text(content, "utf-8")
    with pytest.raises(ConfigError) as caught:
        async with upstream("http://127.0.0.1:1/v1", key_file=str(file)):
            pass
    assert caught.value.param == "upstreams.up.key_file"


async def test_connections_are_kept_and_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnitude_proxy.upstream.client._DRAIN_S", 10.0)
    ending = chunked(sse(chunk("a"))) + chunked(END)
    stream_head = head(200, "Content-Type: text/event-stream", "Transfer-Encoding: chunked")
    async with ScriptedServer([[stream_head, ending, Pause(0.01), chunked(b""), KEEP]]) as server:
        async with upstream(server.url) as route:
            for _ in range(3):
                assert isinstance((await collect(route))[-1], api.Completed)
        assert server.connections == 1


# Streams, byte by byte


FULL = (
    b": hello\r\n\r\n"
    + sse(chunk("", role="assistant"), chunk("naïve "))
    + 'data: {"choices":[{"delta":{"content":"😀"}}]}\r\n\r\n'.encode()
    + b'data: {"choices":\ndata: [{"delta":{"content":"!"},"finish_reason":"stop"}]}\n\n'
    + sse({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}, "[DONE]")
)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 1000])
async def test_any_split_gives_the_same_events(size: int) -> None:
    events = await play([STREAM_HEAD, *split(FULL, size)])
    assert text_of(events) == "naïve 😀!"
    assert events[-1] == api.Completed(request="r", epoch=1, usage=api.Usage(prompt_tokens=1, completion_tokens=2))


async def test_unknown_fields_refusals_and_stop_strings() -> None:
    script = sse(
        chunk("", reasoning_content="hm", audio=None, annotations=[]),
        chunk(refusal="no"),
        {"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]},
    )
    events = await play([STREAM_HEAD, script])
    assert [(e.extra, e.refusal) for e in events if isinstance(e, api.Delta)] == [
        ({"reasoning_content": "hm"}, None),
        ({}, "no"),
    ]
    assert [e.matched_stop for e in events if isinstance(e, api.Finished)] == ["END"]


async def test_an_empty_finish_reason_is_none() -> None:
    first = {"choices": [{"delta": {"content": "a"}, "finish_reason": ""}]}
    events = await play([STREAM_HEAD, sse(first, chunk("b"), chunk(finish="stop"), "[DONE]")])
    assert text_of(events) == "ab"
    assert len([e for e in events if isinstance(e, api.Finished)]) == 1


async def test_an_end_without_done_is_complete_when_every_choice_is_finished() -> None:
    events = await play([STREAM_HEAD, sse(chunk("a"), chunk(finish="stop"))])
    assert isinstance(events[-1], api.Completed)


@pytest.mark.thorough
async def test_a_reset_after_the_last_finish_loses_nothing() -> None:
    events = await play([STREAM_HEAD, sse(chunk("a"), chunk(finish="stop")), Pause(0.3), RESET])
    assert isinstance(events[-1], api.Completed)


async def test_the_first_token_of_an_echo_has_no_logprob() -> None:
    choice = {"text": "ab", "finish_reason": "stop", "logprobs": {"tokens": ["a", "b"], "token_logprobs": [None, -1.0]}}
    events = await play([json_answer({"choices": [choice]})], step=make_step("completions", stream=False))
    assert [p.logprob for e in events if isinstance(e, api.Delta) for p in e.logprobs] == [-9999.0, -1.0]


BROKEN_STREAMS: dict[str, Sequence[Any]] = {
    "end after content": [sse(chunk("a"))],
    "done without finish": [sse(chunk("a"), "[DONE]")],
    "nothing": [],
    "only comments": [b": x\n\n"],
    "reset": [sse(chunk("a")), Pause(0.05), RESET],
    "cut off in a frame": [sse(chunk("a")), b'data: {"choices"'],
    "a second choice cut off": [sse(chunk("a"), chunk("b", index=1), chunk(finish="stop"), "[DONE]")],
    "one choice missing": [sse(chunk("a"), chunk(finish="stop"), "[DONE]")],
    "broken JSON": [b"data: {nope}\n\n"],
    "broken UTF-8": [b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n'],
    "wrong types": [sse({"choices": [{"delta": {"content": 5}}]})],
    "wrong tool calls": [sse({"choices": [{"delta": {"tool_calls": "x"}}]})],
    "not an object": [b"data: [1]\n\n"],
    "deep nesting": [b"data: " + b"[" * 100_000 + b"\n\n"],
    "error object": [sse({"error": {"message": "boom", "type": "server_error", "code": None}})],
    "error text": [sse({"error": "boom"})],
    "error after content": [sse(chunk("a"), {"error": {"message": "boom"}})],
    "finish reason error": [sse(chunk("a"), chunk(finish="error"), "[DONE]")],
    "oversized line": [b"data: " + b"x" * (1024 * 1024 + 10)],
    "html": [b"<html>hello</html>"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BROKEN_STREAMS)
async def test_broken_streams_are_never_complete(name: str) -> None:
    step = make_step(n=2) if name == "one choice missing" else None
    failure = failure_of(await play([STREAM_HEAD, *BROKEN_STREAMS[name]], step=step))
    assert (failure.code, failure.retryable) == ("upstream_stream_broken", True)
    assert "upstream up" in failure.message


FINISH_AT = FULL.index(b'"stop"}]}\n\n') + len(b'"stop"}]}\n\n')


@pytest.mark.parametrize("cut", [*range(0, len(FULL), 11), FINISH_AT - 1, FINISH_AT])
async def test_truncation_is_complete_only_behind_the_finish(cut: int) -> None:
    events = await play([STREAM_HEAD, FULL[:cut]])
    assert isinstance(events[-1], api.Completed) is (cut >= FINISH_AT)


async def test_an_error_with_a_status_inside_a_stream_counts_as_that_status() -> None:
    error = {"error": {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}}
    failure = failure_of(await play([STREAM_HEAD, sse(error)]))
    assert (failure.code, failure.retryable, failure.message) == ("upstream_http_400", False, "too long")
    busy = failure_of(await play([STREAM_HEAD, sse({"error": {"message": "x", "code": "429"}})]))
    assert (busy.code, busy.retryable) == ("upstream_http_429", True)


# Whole answers


BROKEN_ANSWERS: dict[str, tuple[Sequence[Any], str]] = {
    "empty": ([head(200, "Content-Type: application/json", length=0)], "upstream_empty"),
    "empty object": ([json_answer({})], "upstream_empty"),
    "no choices": ([json_answer({"choices": []})], "upstream_empty"),
    "null": ([json_answer(None)], "upstream_stream_broken"),
    "no finish": ([json_answer({"choices": [{"message": {"content": "a"}}]})], "upstream_stream_broken"),
    "error in 200": ([json_answer({"error": {"message": "boom"}})], "upstream_stream_broken"),
    "not JSON": ([head(200, length=5), b"hello"], "upstream_stream_broken"),
    "shorter than promised": ([head(200, length=500), json.dumps(WHOLE).encode()], "upstream_stream_broken"),
    "longer than promised": ([head(200, length=20), json.dumps(WHOLE).encode()], "upstream_stream_broken"),
    "bad chunk": ([head(200, "Transfer-Encoding: chunked"), b"zz\r\nabc\r\n"], "upstream_stream_broken"),
    "both framings": (
        [head(200, "Transfer-Encoding: chunked", length=5), chunked(json.dumps(WHOLE).encode()[:9])],
        "upstream_stream_broken",
    ),
    "not HTTP": ([b"SSH-2.0-OpenSSH\r\n\r\n"], "upstream_stream_broken"),
    "compressed": (
        [head(200, "Content-Encoding: gzip", length=3), b"\x1f\x8b\x08"],
        "upstream_stream_broken",
    ),
    "closed at once": ([], "upstream_disconnected"),
    "reset at once": ([RESET], "upstream_disconnected"),
}


# The server keeps these connections open, so that bytes left over in one would meet the next request.
WELL_FRAMED = {
    "empty", "empty object", "no choices", "null", "no finish", "error in 200", "not JSON",
    "longer than promised", "compressed",
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_ANSWERS)
async def test_broken_answers_fail_and_leave_nothing_to_the_next_request(name: str) -> None:
    script, code = BROKEN_ANSWERS[name]
    last = [KEEP] if name in WELL_FRAMED else [Pause(0.02)]
    async with ScriptedServer([[*script, *last], [json_answer(WHOLE)]]) as server, upstream(server.url) as route:
        failure = failure_of(await collect(route, make_step(stream=False)))
        after = await collect(route, make_step(stream=False))
    assert (failure.code, failure.retryable) == (code, True)
    assert text_of(after) == "hi"


async def test_a_whole_answer_to_a_stream_request() -> None:
    events = await play([json_answer(WHOLE)])
    assert text_of(events) == "hi"
    assert isinstance(events[-1], api.Completed)


async def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("magnitude_proxy.upstream.client.ANSWER_LIMIT", 100_000)
    failure = failure_of(await play([head(200), *[b"x" * 50_000] * 20], step=make_step(stream=False)))
    assert failure.code == "upstream_too_large"


# Statuses


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_refusals_keep_the_servers_words(status: int) -> None:
    body = {"error": {"message": "bad field", "type": "x", "param": "messages.0", "code": "bad_thing"}}
    failure = failure_of(await play([json_answer(body, status)]))
    assert (failure.code, failure.retryable) == (f"upstream_http_{status}", False)
    error = errors.from_failed(failure)
    assert (error.http_status, error.message, error.param, error.code) == (
        status,
        "bad field",
        "messages.0",
        "bad_thing",
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"message": "on top"}, "on top"),
        ({"detail": "fastapi"}, "fastapi"),
        ({"detail": [{"loc": ["x"]}]}, "upstream up refused the request with HTTP 422"),
        ({"error": "text"}, "text"),
        ({"error": {"message": {"a": 1}}}, "upstream up refused the request with HTTP 422"),
        (["x"], "upstream up refused the request with HTTP 422"),
    ],
)
async def test_error_bodies_of_other_servers(body: Any, message: str) -> None:
    assert failure_of(await play([json_answer(body, 422)])).message == message


@pytest.mark.parametrize("status", [401, 403, 408, 409, 429, 500, 502, 503, 302, 307, 204, 405])
async def test_other_statuses_let_another_route_try(status: int) -> None:
    script = [head(status, "Location: http://127.0.0.1:1/v1", length=0)]
    failure = failure_of(await play(script))
    assert (failure.code, failure.retryable) == (f"upstream_http_{status}", True)
    assert f"upstream up answered HTTP {status}" in failure.message
    assert "127.0.0.1" not in failure.message


async def test_redirects_are_not_followed() -> None:
    async with OpenAIStub() as stub:
        script = [head(307, f"Location: {stub.url}/chat/completions", length=0)]
        assert failure_of(await play(script)).code == "upstream_http_307"
        assert stub.requests == []


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        (["Retry-After: 7"], 7.0),
        (["Retry-After: 7", "retry-after-ms: 1500"], 1.5),
        (["Retry-After: Mon, 30 Nov 2026 10:00:30 GMT", "Date: Mon, 30 Nov 2026 10:00:10 GMT"], 20.0),
        (["Retry-After: Mon, 30 Nov 2026 10:00:30 GMT"], None),
        (["Retry-After: soon"], None),
        (["Retry-After: nan"], None),
        (["Retry-After: -5"], 0.0),
        (["Retry-After: 1e9"], 3600.0),
        ([], None),
    ],
)
async def test_retry_after(headers: list[str], seconds: float | None) -> None:
    assert failure_of(await play([head(429, *headers, length=0)])).retry_after_s == seconds


# Connections and time


async def test_nothing_listens() -> None:
    async with refusing_url() as url:
        failure = failure_of(await ask(url))
    assert (failure.code, failure.retryable) == ("upstream_unreachable", True)
    assert "127.0.0.1" not in failure.message


@pytest.mark.slow
async def test_an_unknown_host() -> None:
    assert failure_of(await ask("http://no-such-host.invalid/v1")).code == "upstream_unreachable"


async def test_a_server_without_tls() -> None:
    async with OpenAIStub() as stub:
        failure = failure_of(await ask(stub.url.replace("http:", "https:")))
    assert failure.code == "upstream_unreachable"
    assert "TLS" in failure.message


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "stream"),
    [
        ([HANG], True),
        ([STREAM_HEAD, HANG], True),
        ([STREAM_HEAD, sse(chunk("", role="assistant")), HANG], True),
        ([STREAM_HEAD, *[b": alive\n\n", Pause(0.02)] * 50], True),
        ([STREAM_HEAD, *split(b"x" * 50), HANG], True),
        ([head(200, length=100), b"{", HANG], False),
        ([head(400, length=100), b"{", HANG], False),
    ],
)
async def test_no_content_in_time(script: Script, stream: bool) -> None:
    failure = failure_of(await play(script, step=make_step(stream=stream), first_token_s=0.15))
    assert failure.code == "upstream_timeout"
    assert "first_token_s" in failure.message


@pytest.mark.thorough
async def test_silence_in_mid_stream() -> None:
    slow = [item for byte in split(b"data: {") for item in (byte, Pause(0.03))]
    events = await play([STREAM_HEAD, sse(chunk("a")), *slow * 20], idle_s=0.15)
    assert text_of(events) == "a"
    assert failure_of(events).code == "upstream_timeout"
    assert "idle_s" in failure_of(events).message


@pytest.mark.slow
async def test_a_slow_stream_with_content_goes_on() -> None:
    pieces = [item for _ in range(6) for item in (Pause(0.25), sse(chunk("a")))]
    events = await play([STREAM_HEAD, *pieces, END], first_token_s=1.0, idle_s=1.0)
    assert text_of(events) == "a" * 6


@pytest.mark.parametrize("script", [[HANG], [STREAM_HEAD, HANG], [STREAM_HEAD, sse(chunk("a")), HANG]])
async def test_cancelling_closes_the_connection(script: Script) -> None:
    async with ScriptedServer([script]) as server, upstream(server.url) as route:
        reader = asyncio.create_task(collect(route))
        while not server.requests:
            await asyncio.sleep(0.005)
        reader.cancel()
        await asyncio.wait({reader})
        async with asyncio.timeout(5):
            while not server.aborted:
                await asyncio.sleep(0.005)
    assert server.aborted == 1


# Through the dispatcher


async def dispatch(routes: Sequence[Any], step: Step | None = None) -> list[Taken | api.AnswerEvent]:
    telemetry = Telemetry(TelemetryConfig())
    dispatcher = Dispatcher(routes, DeadlineConfig(), RetryConfig(), telemetry, time.monotonic)
    events = [event async for event in dispatcher.run(step or make_step())]
    telemetry.close()
    ends = [e for e in events if isinstance(e, api.Completed | api.Failed)]
    assert ends == events[-1:]
    return events


def route_to(name: str, url: str, session: Any, telemetry: Telemetry) -> Upstream:
    return Upstream(UpstreamConfig(name=name, url=url), session, telemetry, time.monotonic)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ([head(503, length=0)], "upstream_http_503"),
        ([head(401, length=0)], "upstream_http_401"),
        ([RESET], "upstream_disconnected"),
        ([STREAM_HEAD, sse(chunk("", role="assistant")), Pause(0.3), RESET], "upstream_stream_broken"),
        ([STREAM_HEAD, sse({"error": {"message": "x"}})], "upstream_stream_broken"),
        ([json_answer({"choices": []})], "upstream_empty"),
    ],
)
async def test_the_second_upstream_answers_for_the_first(script: Script, reason: str) -> None:
    telemetry = Telemetry(TelemetryConfig())
    async with OpenAIStub(text="second") as stub, ScriptedServer([script]) as server, make_session() as session:
        routes = [route_to("one", server.url, session, telemetry), route_to("two", stub.url, session, telemetry)]
        events = await dispatch(routes)
    telemetry.close()
    assert [e for e in events if isinstance(e, Taken)] == [Taken("upstream:one"), Taken("fallback:two", reason)]
    assert "".join(e.text for e in events if isinstance(e, api.Delta)) == "second"


async def test_a_lost_worker_is_replaced_by_an_upstream_without_mixing_answers() -> None:
    worker = ScriptedRoute("local", [[started(), delta("", 4), failed("worker_lost")]])
    telemetry = Telemetry(TelemetryConfig())
    async with OpenAIStub(text="from upstream") as stub, make_session() as session:
        events = await dispatch([worker, route_to("one", stub.url, session, telemetry)])
    telemetry.close()
    deltas = [e for e in events if isinstance(e, api.Delta)]
    assert "".join(e.text for e in deltas) == "from upstream"
    assert all(not e.ids for e in deltas)


async def test_a_connection_closed_while_idle_is_opened_anew() -> None:
    telemetry = Telemetry(TelemetryConfig())
    scripts: list[Script] = [[], [json_answer(msgspec.to_builtins(WHOLE))]]
    async with ScriptedServer(scripts) as server, make_session() as session:
        events = await dispatch([route_to("one", server.url, session, telemetry)])
    telemetry.close()
    assert isinstance(events[-1], api.Completed)
    assert len(server.requests) == 2
