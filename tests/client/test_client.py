"""MagnitudeClient against a real HTTP server that speaks the same wire."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from magnitude_engine import AgentRuntimeConfig, MagnitudeClient
from magnitude_engine.client import AnswerStream, RuntimeHealth
from magnitude_engine.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectionFailed,
    NotReady,
    RequestError,
    RequestTimeout,
    StatusError,
    StreamBroken,
    WrongEventLoop,
)
from testkit.server import Reply, ScriptedServer, scripted, sse

CHAT = "POST /v1/chat/completions"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
HEADERS = {"x-magnitude-route": "local", "x-request-id": "req-1", "x-magnitude-session": "hashed"}


def answer(text: str | None, finish: str = "stop", **message: Any) -> dict[str, Any]:
    content = {"role": "assistant", "content": text, **message}
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "message": content, "finish_reason": finish}], "usage": USAGE}


def chunk(finish: str | None = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
    return {"id": "chatcmpl-1", "choices": [choice], "usage": None}


def error(message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": param}}


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted() as running:
        yield running


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[MagnitudeClient]:
    async with MagnitudeClient(server.base_url, "key-1", max_retries=0) as made:
        yield made


async def test_the_published_example_works(server: ScriptedServer) -> None:
    server.play(CHAT, Reply(answer("42"), headers=HEADERS))
    config = AgentRuntimeConfig(
        max_batch_size=32,
        enable_predictive_caching=True,
        speculative_decoding_enabled=True,
        draft_model_path="magnitude-1b-instruct-draft",
        target_model_path="meta-llama/Llama-3.3-70B-Instruct",
        optimization_target="latency_and_cost",
    )
    client = MagnitudeClient(endpoint=server.base_url, api_key="key-1", config=config)
    result = await client.generate_optimized(
        session_id="run-1",
        prompt="Goal: x\nThought:",
        temperature=0.2,
        max_tokens=64,
        stop_sequences=["</tool_call>", "Observation:"],
        track_feedback=True,
    )
    assert dict(result) == {
        "text": "42", "session_id": "run-1", "finish_reason": "stop", "usage": USAGE, "route": "local",
        "request_id": "req-1", "tool_calls": [],
    }  # fmt: skip
    assert server.bodies("/v1/chat/completions") == [
        {
            "model": "served",
            "messages": [{"role": "user", "content": "Goal: x\nThought:"}],
            "temperature": 0.2,
            "max_tokens": 64,
            "stop": ["</tool_call>", "Observation:"],
            "magnitude": {
                "session": "run-1",
                "track_feedback": True,
                "config": {
                    "max_batch_size": 32,
                    "enable_predictive_caching": True,
                    "speculative_decoding_enabled": True,
                    "draft_model_path": "magnitude-1b-instruct-draft",
                    "target_model_path": "meta-llama/Llama-3.3-70B-Instruct",
                    "optimization_target": "latency_and_cost",
                },
            },
        }
    ]
    assert server.asked[-1].headers["Authorization"] == "Bearer key-1"
    await client.aclose()


async def test_tool_calls_and_logprobs_of_a_whole_answer(server: ScriptedServer, client: MagnitudeClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    body = answer(None, "tool_calls", tool_calls=[call])
    body["choices"][0]["logprobs"] = {"content": [{"token": "a", "logprob": -0.5}], "refusal": None}
    server.play(CHAT, Reply(body))
    result = await client.generate_optimized(prompt="q", tools=[{"type": "function"}], logprobs=2, seed=7)
    assert result["text"] == ""
    assert result["tool_calls"] == [call]
    assert result["logprobs"] == {"content": [{"token": "a", "logprob": -0.5}]}
    sent = server.bodies("/v1/chat/completions")[0]
    assert (sent["logprobs"], sent["top_logprobs"], sent["seed"]) == (True, 2, 7)
    assert "session" not in sent["magnitude"]


async def test_the_server_names_the_session_when_the_caller_does_not(
    server: ScriptedServer, client: MagnitudeClient
) -> None:
    server.play(CHAT, Reply(answer("a"), headers=HEADERS))
    assert (await client.generate_optimized(prompt="q"))["session_id"] == "hashed"


async def test_a_stream_gives_deltas_and_then_the_result(server: ScriptedServer, client: MagnitudeClient) -> None:
    first = [{"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": ""}}]
    events = sse(
        chunk(role="assistant", content=""),
        chunk(content="Sm\u2028ö", logprobs={"content": [{"token": "Sm"}]}),
        chunk(content="l"),
        chunk(tool_calls=first),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
        chunk(finish="tool_calls"),
        {"id": "chatcmpl-1", "choices": [], "usage": USAGE, "magnitude": {"route": "fallback:other"}},
    )
    server.play(CHAT, Reply(pieces=[b": keep-alive\n\n", *events], headers=HEADERS))
    stream = await client.generate_optimized(session_id="s", prompt="q", stream=True, logprobs=0)
    assert isinstance(stream, AnswerStream)
    items = [item async for item in stream]
    result = items[-1]["result"]
    assert result is not None
    assert [item["text"] for item in items] == ["Sm\u2028ö", "l", ""]
    assert [item["result"] for item in items[:-1]] == [None, None]
    assert result["text"] == "Sm\u2028öl"
    assert result["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}
    ]
    assert (result["finish_reason"], result["usage"], result["route"]) == ("tool_calls", USAGE, "fallback:other")
    assert result["logprobs"] == {"content": [{"token": "Sm"}]}
    sent = server.bodies("/v1/chat/completions")[0]
    assert (sent["stream"], sent["stream_options"]) == (True, {"include_usage": True})


async def test_raw_prompts_go_to_completions(server: ScriptedServer, client: MagnitudeClient) -> None:
    choice = {"index": 0, "text": "out", "finish_reason": "length", "logprobs": {"tokens": ["out"]}}
    server.play("POST /v1/completions", Reply({"id": "cmpl-1", "choices": [choice], "usage": USAGE}))
    result = await client.generate_optimized(prompt="in", raw=True, logprobs=3)
    assert (result["text"], result["finish_reason"], result["logprobs"]) == ("out", "length", {"tokens": ["out"]})
    sent = server.bodies("/v1/completions")[0]
    assert (sent["prompt"], sent["logprobs"]) == ("in", 3)
    with pytest.raises(RequestError, match="raw=False") as caught:
        await client.generate_optimized(prompt="in", raw=True, tools=[{}])
    assert caught.value.param == "tools"
    with pytest.raises(RequestError, match="raw=False"):
        await client.generate_optimized(prompt="in", raw=True, prune=["thinking"])


async def test_chat_sends_the_messages(server: ScriptedServer, client: MagnitudeClient) -> None:
    server.play(CHAT, Reply(answer("hi")))
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    result = await client.chat(messages, session_id="s1", prune=["thinking"], extra_body={"top_k": 4})
    assert result["text"] == "hi"
    sent = server.bodies("/v1/chat/completions")[0]
    assert (sent["messages"], sent["top_k"]) == (messages, 4)
    assert sent["magnitude"] == {"session": "s1", "prune": ["thinking"]}


@pytest.mark.parametrize(
    ("pieces", "cut", "message"),
    [
        (sse(chunk(content="a"), error("worker died", "worker_lost"), done=False), False, "worker died.*worker_lost"),
        (sse(chunk(content="a"), done=False), False, "without \\[DONE\\]"),
        (sse(chunk(content="a")), False, "without a finish reason"),
        (sse(chunk(content="a"), done=False), True, "broke before its end"),
        ((*sse(chunk(content="a"), done=False), b"data: {nonsense\n\n"), False, "no OpenAI answer"),
    ],
)  # fmt: skip
async def test_a_broken_stream_is_an_error_and_never_retried(
    server: ScriptedServer, pieces: tuple[bytes, ...], cut: bool, message: str
) -> None:
    server.play(CHAT, Reply(pieces=pieces, cut=cut))
    async with MagnitudeClient(server.base_url, max_retries=2) as client:
        stream = await client.generate_optimized(prompt="q", stream=True)
        got = [(await anext(stream))["text"]]
        with pytest.raises(StreamBroken, match=message):
            got += [item["text"] async for item in stream]
    assert got == ["a"]
    assert len(server.bodies("/v1/chat/completions")) == 1


async def test_a_stream_left_early_is_closed(server: ScriptedServer, client: MagnitudeClient) -> None:
    server.play(CHAT, Reply(pieces=sse(chunk(content="a"), chunk(content="b"), chunk(finish="stop"))))
    async with await client.generate_optimized(prompt="q", stream=True) as stream:
        assert (await anext(stream))["text"] == "a"
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    unread = await client.generate_optimized(prompt="q", stream=True)
    await unread.aclose()


async def test_failures_that_pass_are_retried(server: ScriptedServer) -> None:
    soon = {"retry-after-ms": "1"}
    server.play(CHAT, Reply(error("busy"), 429, soon), Reply(error("down"), 503, soon), Reply(answer("ok")))
    async with MagnitudeClient(server.base_url) as client:
        assert (await client.generate_optimized(prompt="q"))["text"] == "ok"
    assert len(server.bodies("/v1/chat/completions")) == 3


async def test_final_errors_say_what_the_server_said(server: ScriptedServer, client: MagnitudeClient) -> None:
    body = error("temperature must be at most 2", "invalid_value", "temperature")
    server.play(CHAT, Reply(body, 400, {"x-request-id": "req-9"}))
    with pytest.raises(StatusError, match="answered 400: temperature must be at most 2") as caught:
        await client.generate_optimized(prompt="q", temperature=3)
    assert (caught.value.status, caught.value.error_code) == (400, "invalid_value")
    assert (caught.value.param, caught.value.request_id) == ("temperature", "req-9")


async def test_a_session_limit_is_not_retried(server: ScriptedServer) -> None:
    limit = Reply(error("limit", "session_limit_exceeded"), 429, {"x-should-retry": "false"})
    server.play(CHAT, limit, Reply(answer("never")))
    async with MagnitudeClient(server.base_url) as client:
        with pytest.raises(StatusError, match="limit"):
            await client.generate_optimized(prompt="q")
    assert len(server.bodies("/v1/chat/completions")) == 1


async def test_a_refused_key_is_named(server: ScriptedServer, client: MagnitudeClient) -> None:
    server.play("GET /v1/models", Reply(error("unknown key"), 401))
    with pytest.raises(AuthenticationFailed, match="MAGNITUDE_API_KEY"):
        await client.generate_optimized(prompt="q")


async def test_redirects_are_not_followed(server: ScriptedServer, client: MagnitudeClient) -> None:
    server.play("GET /v1/models", Reply({}, 307, {"location": "http://elsewhere/"}))
    with pytest.raises(StatusError, match="redirects to http://elsewhere/"):
        await client.generate_optimized(prompt="q")


async def test_an_unreachable_server_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    client = MagnitudeClient(f"http://127.0.0.1:{port}/v1", max_retries=0)
    with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{port}.*magnitude serve"):
        await client.verify_runtime_health()


@pytest.mark.thorough
async def test_a_silent_server_times_out_without_retry() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        client = MagnitudeClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05)
        with pytest.raises(RequestTimeout, match=r"nothing came for 0\.05 s"):
            await client.generate_optimized(prompt="q")


async def test_the_configs_model_is_used_where_it_is_served(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.play("GET /v1/models", Reply({"data": [{"id": "served"}, {"id": "wanted"}]}))
    server.play(CHAT, Reply(answer("a")))
    with caplog.at_level(logging.WARNING, "magnitude.client"):
        async with MagnitudeClient(server.base_url, config=AgentRuntimeConfig(target_model_path="wanted")) as client:
            await client.generate_optimized(prompt="q")
        assert caplog.messages == []
        async with MagnitudeClient(server.base_url, config=AgentRuntimeConfig(target_model_path="other")) as client:
            await client.generate_optimized(prompt="q")
            await client.generate_optimized(prompt="q")
    assert [body["model"] for body in server.bodies("/v1/chat/completions")] == ["wanted", "served", "served"]
    assert caplog.messages == ["the server does not list the model 'other'; 'served' answers instead"]


@pytest.mark.parametrize(("wanted", "sent"), [(None, "default"), ("gpt-x", "gpt-x")])
async def test_a_server_that_takes_any_model_gets_the_configs(
    server: ScriptedServer, wanted: str | None, sent: str
) -> None:
    server.play("GET /v1/models", Reply({"data": []}))
    server.play(CHAT, Reply(answer("a")))
    async with MagnitudeClient(server.base_url, config=AgentRuntimeConfig(target_model_path=wanted)) as client:
        await client.generate_optimized(prompt="q")
    assert [body["model"] for body in server.bodies("/v1/chat/completions")] == [sent]


HEALTH: dict[str, Any] = {
    "status": "ok", "model": "served", "draft": None, "speculation": False, "cache": "on", "store": "ok",
    "version": "0.1.0", "warnings": [],
}  # fmt: skip


async def test_health_names_what_differs_from_the_config(
    server: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.play("GET /health", Reply(HEALTH | {"status": "degraded", "warnings": ["the store is away"]}))
    config = AgentRuntimeConfig(target_model_path="big", draft_model_path="small", speculative_decoding_enabled=True)
    async with MagnitudeClient(server.base_url, config=config) as client:
        health = await client.verify_runtime_health()
        await client.verify_runtime_health()
    assert health == RuntimeHealth(
        status="degraded",
        model="served",
        cache="on",
        store="ok",
        warnings=(
            "the store is away",
            "the server does not list the model 'big'; 'served' answers instead",
            "the server uses no draft model, not 'small'; answers are the same, speed differs",
            "the server does not speculate; answers are the same, speed differs",
        ),
    )
    assert caplog.messages == list(health.warnings)


async def test_health_without_differences_warns_of_nothing(server: ScriptedServer, client: MagnitudeClient) -> None:
    server.play("GET /health", Reply(HEALTH))
    assert await client.verify_runtime_health() == RuntimeHealth(status="ok", model="served", cache="on", store="ok")


async def test_a_server_that_is_not_ready_says_why(server: ScriptedServer, client: MagnitudeClient) -> None:
    starting = HEALTH | {"status": "starting", **error("the model is still loading", "starting")}
    server.play("GET /health", Reply(starting, 503))
    with pytest.raises(NotReady, match=r"the model is still loading.*see the server's log"):
        await client.verify_runtime_health()


async def test_health_finds_a_refused_key(server: ScriptedServer, client: MagnitudeClient) -> None:
    server.play("GET /health", Reply(HEALTH))
    server.play("GET /v1/models", Reply(error("unknown key"), 401))
    with pytest.raises(AuthenticationFailed, match="unknown key"):
        await client.verify_runtime_health()


async def test_another_kind_of_server_is_recognised(server: ScriptedServer, client: MagnitudeClient) -> None:
    server.play("GET /health", Reply({"up": 1}))
    with pytest.raises(StatusError, match="Magnitude server's base URL"):
        await client.verify_runtime_health()


async def test_a_model_that_vanished_is_looked_up_anew(server: ScriptedServer, client: MagnitudeClient) -> None:
    server.play(CHAT, Reply(answer("a")), Reply(error("no such model", "model_not_found"), 404), Reply(answer("b")))
    await client.generate_optimized(prompt="q")
    server.play("GET /v1/models", Reply({"data": [{"id": "newer"}]}))
    with pytest.raises(StatusError, match="no such model"):
        await client.generate_optimized(prompt="q")
    await client.generate_optimized(prompt="q")
    assert [body["model"] for body in server.bodies("/v1/chat/completions")] == ["served", "served", "newer"]


async def test_feedback_is_sent_and_acknowledged(server: ScriptedServer, client: MagnitudeClient) -> None:
    server.play("POST /v1/feedback", Reply({"status": "acknowledged"}))
    feedback = {"session_id": "s", "success": False, "error_reason": None, "timestamp": "2026-11-30T12:00:00Z"}
    assert await client.submit_telemetry_feedback(feedback) == {"status": "acknowledged"}
    assert server.bodies("/v1/feedback") == [feedback]


@pytest.mark.parametrize(
    "wrong",
    [
        {"success": 1},
        {"session_id": ""},
        {"timestamp": "yesterday"},
        {"timestamp": None},
        {"error_reason": 4},
        {"mood": "good"},
    ],
)
async def test_wrong_feedback_is_refused_before_it_is_sent(
    server: ScriptedServer, client: MagnitudeClient, wrong: dict[str, Any]
) -> None:
    feedback = {"session_id": "s", "success": True, "timestamp": "2026-11-30", **wrong}
    with pytest.raises(RequestError, match=next(iter(wrong))):
        await client.submit_telemetry_feedback(feedback)
    assert server.asked == []


async def test_a_server_without_feedback_route_is_named(client: MagnitudeClient) -> None:
    feedback = {"session_id": "s", "success": True, "timestamp": "2026-11-30"}
    with pytest.raises(StatusError, match="has no feedback route") as caught:
        await client.submit_telemetry_feedback(feedback)
    assert (caught.value.status, caught.value.error_code) == (404, "feedback_unsupported")


@pytest.mark.parametrize("wrong", [{"temperature": float("nan")}, {"session_id": ""}, {"tools": [object()]}])
async def test_values_that_cannot_be_sent_are_refused(client: MagnitudeClient, wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        await client.generate_optimized(prompt="q", **wrong)
    with pytest.raises(TypeError, match="temprature"):
        await client.generate_optimized(prompt="q", temprature=1)  # type: ignore[call-overload]


@pytest.mark.parametrize("wrong", [{"endpoint": 5}, {"api_key": 5}, {"timeout": "1"}, {"max_retries": 1.5}])
def test_arguments_of_another_type_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        MagnitudeClient(**wrong)
    assert caught.value.param == next(iter(wrong))


def test_wrong_settings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="http"):
        MagnitudeClient("localhost:8000")
    with pytest.raises(ConfigError, match="api_key"):
        MagnitudeClient(api_key="a\nb")
    with pytest.raises(ConfigError, match="optimization_target"):
        AgentRuntimeConfig(optimization_target="speed")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch_size"):
        AgentRuntimeConfig(batch_size=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"AgentRuntimeConfig.*not dict"):
        MagnitudeClient(config={"max_batch_size": 1})  # type: ignore[arg-type]
    monkeypatch.setenv("MAGNITUDE_ENDPOINT", "nonsense")
    with pytest.raises(ConfigError, match="nonsense"):
        MagnitudeClient()


def test_another_event_loop_is_refused_at_once() -> None:
    async def make() -> MagnitudeClient:
        return MagnitudeClient()

    made = asyncio.run(make())
    with pytest.raises(WrongEventLoop, match=r"inside each asyncio\.run"):
        asyncio.run(made.generate_optimized(prompt="q"))


NEVER_CLOSED = """
import asyncio, sys
from magnitude_engine import MagnitudeClient
assert "torch" not in sys.modules
clients = []
async def main():
    asyncio.get_running_loop().slow_callback_duration = 60  # development mode would report slow imports
    client = MagnitudeClient(sys.argv[1])
    clients.append(client)
    print((await client.generate_optimized(session_id="s", prompt="q"))["text"])
    stream = await client.generate_optimized(session_id="s", prompt="q", stream=True)
    print((await anext(stream))["text"])
    clients.append(stream)
asyncio.run(main())
"""


@pytest.mark.slow
async def test_a_client_never_closed_ends_without_a_warning(server: ScriptedServer) -> None:
    server.play(CHAT, Reply(answer("whole")), Reply(pieces=sse(chunk(content="part"), chunk(content="more"))))
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", NEVER_CLOSED, server.base_url]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("whole\npart\n", "", 0)
