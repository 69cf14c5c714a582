"""Anthropic's Messages over real sockets: what is read, what is asked, what is written, and how it fails."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_proxy.config import DeadlineConfig, KeyConfig, UpstreamConfig, WorkerConfig
from testkit.dialects import THOUGHTFUL, THOUGHTS, asked, named_events, worker_and_upstream
from testkit.proxy import Proxy, Reply, proxy_config, proxying, routing
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
    started,
)
from testkit.scripted_worker import ScriptedWorker
from testkit.upstream import STREAM_HEAD, OpenAIStub, ScriptedServer, json_answer

ASK: dict[str, Any] = {"model": "magnitude", "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "weather", "description": "Now", "input_schema": {"type": "object"}}
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Now", "parameters": {"type": "object"}},
}
# A request with every field that changes something, and the chat that it is.
FULL: dict[str, Any] = {
    "model": "magnitude",
    "max_tokens": 20,
    "system": [
        {"type": "text", "text": "You are brief.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Use tools."},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Weather in Zürich?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Zürich", "days": 1}},
                {"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "text", "text": "sun"}]},
                {"type": "text", "text": "Well?"},
            ],
        },
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    "stop_sequences": ["a", "b", "c", "d", "e"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "metadata": {"user_id": "user_1_account__session_0a1b2c3d4e"},
}
CHAT: dict[str, Any] = {
    "model": "magnitude",
    "max_tokens": 20,
    "messages": [
        {"role": "system", "content": "You are brief.\nUse tools."},
        {"role": "user", "content": [{"type": "text", "text": "Weather in Zürich?"}]},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Zürich", "days": 1}'},
                },
                {"id": "toolu_2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "sun"},
        {"role": "user", "content": [{"type": "text", "text": "Well?"}]},
    ],
    "tools": [CHAT_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    },
}


def call(index: int, id: str | None = None, name: str | None = None, arguments: str = "") -> api.Delta:
    piece = api.ToolCallDelta(index=index, id=id, name=name, arguments=arguments)
    return delta(tool_calls=(piece,))


# Text, then two calls, the first in pieces.
TWO_CALLS: list[Action] = [
    started(),
    delta("Let me "),
    delta("see."),
    call(0, "c0", "weather", '{"city": '),
    call(0, arguments='"Paris"}'),
    call(1, "c1", "time"),
    finished(reason="tool_calls"),
    completed(prompt_tokens=7, cached_tokens=3, completion_tokens=9),
]


def error_of(reply: Reply) -> dict[str, Any]:
    """Returns what stands under `error` of an error body, checked."""
    body = reply.json
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == reply.header("x-request-id") == reply.header("request-id")
    assert set(body["error"]) == {"type", "message"}
    error: dict[str, Any] = body["error"]
    return error


async def ask(proxy: Proxy, *, path: str = "/messages", **changes: Any) -> Reply:
    return await proxy.post(path, {**ASK, **changes})


async def test_a_message_with_text_and_calls(tmp_path: Path) -> None:
    async with routing(worker_and_upstream(tmp_path), ScriptedRoute("local", [TWO_CALLS])) as proxy:
        reply = await ask(proxy, tools=[TOOL])
    body = reply.json
    assert reply.header("x-magnitude-route") == "local"
    assert len(str(reply.header("x-magnitude-session"))) == 32
    assert body.pop("usage").pop("magnitude")["cached_tokens"] == 3
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "smollm2",
        "content": [
            {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "c0", "name": "weather", "input": {"city": "Paris"}},
            {"type": "tool_use", "id": "c1", "name": "time", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
    }


async def test_the_same_as_a_stream(tmp_path: Path) -> None:
    async with routing(worker_and_upstream(tmp_path), ScriptedRoute("local", [TWO_CALLS])) as proxy:
        events = named_events(await ask(proxy, tools=[TOOL], stream=True))
    assert events[0]["message"].pop("id").startswith("msg_")
    assert events[-2]["usage"].pop("magnitude")
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 3}
    first = {"type": "message", "role": "assistant", "model": "smollm2", "content": [], "stop_reason": None}
    weather: dict[str, Any] = {"type": "tool_use", "id": "c0", "name": "weather", "input": {}}
    clock: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "time", "input": {}}

    def grown(index: int, kind: str, **more: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **more}}

    assert events == [
        {
            "type": "message_start",
            "message": {**first, "stop_sequence": None, "usage": {"input_tokens": 4, "output_tokens": 0, **cached}},
        },
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        grown(0, "text_delta", text="Let me "),
        grown(0, "text_delta", text="see."),
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": weather},
        grown(1, "input_json_delta", partial_json='{"city": '),
        grown(1, "input_json_delta", partial_json='"Paris"}'),
        {"type": "content_block_stop", "index": 1},
        {"type": "content_block_start", "index": 2, "content_block": clock},
        {"type": "content_block_stop", "index": 2},
        {
            "type": "message_delta",
            "delta": {"stop_reason": "tool_use", "stop_sequence": None},
            "usage": {"input_tokens": 4, "output_tokens": 9, **cached},
        },
        {"type": "message_stop"},
    ]


async def test_the_worker_is_asked_what_a_chat_asks(tmp_path: Path) -> None:
    route = ScriptedRoute("local", [answer()])
    async with routing(worker_and_upstream(tmp_path), route) as proxy:
        reply = await proxy.post("/messages", FULL)
        assert reply.status == 200, reply.body
        dialect = asked(route)
        # More stop strings than OpenAI's wire takes.
        assert dialect.stop == tuple("abcde")
        await proxy.post("/chat/completions", {**CHAT, "stop": ["a", "b", "c", "d"]})
        chat = asked(route)
        assert dialect.input == chat.input
        assert (dialect.sampling, dialect.format, dialect.max_tokens) == (chat.sampling, chat.format, 20)
    assert reply.header("x-magnitude-ignored") == "thinking, output_config.effort, messages.thinking"


async def test_an_upstream_gets_the_chat(tmp_path: Path) -> None:
    async with OpenAIStub() as stub:
        upstreams = (UpstreamConfig(name="u0", url=stub.url, fields=("top_k",)),)
        async with proxying(proxy_config(tmp_path, upstreams=upstreams)) as proxy:
            reply = await proxy.post("/messages", {**FULL, "model": "stub-model"})
            picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
            seen = await ask(proxy, model="stub-model", messages=[{"role": "user", "content": [picture]}])
    sent = stub.requests[0]
    assert sent.path == "/v1/chat/completions"
    assert sent.body == {**CHAT, "model": "stub-model", "stop": list("abcde"), "stream": False}
    assert reply.json["content"][0]["input"] == {"city": "Paris"}
    assert reply.json["usage"]["cache_read_input_tokens"] == 2
    assert reply.header("x-magnitude-route") == "upstream:u0"
    assert seen.status == 200
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert stub.requests[1].body["messages"] == [{"role": "user", "content": [image]}]


@pytest.mark.parametrize(("thinking", "shown"), [({"type": "enabled", "budget_tokens": 1024}, True), (None, False)])
async def test_what_an_upstreams_model_thought_is_told_to_who_asked(
    tmp_path: Path, thinking: dict[str, Any] | None, shown: bool
) -> None:
    server = ScriptedServer([[json_answer(THOUGHTFUL)], [STREAM_HEAD, THOUGHTS]])
    async with server, proxying(proxy_config(tmp_path, server.url)) as proxy:
        whole = (await ask(proxy, model="m", thinking=thinking)).json
        events = named_events(await ask(proxy, model="m", thinking=thinking, stream=True))
    thought = [{"type": "thinking", "thinking": "Hm. So.", "signature": ""}] if shown else []
    assert whole["content"] == [*thought, {"type": "text", "text": "Yes."}]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    thoughts = [{"type": "thinking_delta", "thinking": piece} for piece in ("Hm. ", "So.")] if shown else []
    assert deltas == [*thoughts, {"type": "text_delta", "text": "Yes."}]


async def test_another_route_takes_over_before_the_first_content(tmp_path: Path) -> None:
    routes = ScriptedRoute("local", [[failed("worker_lost")]]), ScriptedRoute("u0", [answer("from upstream")])
    async with routing(worker_and_upstream(tmp_path), *routes) as proxy:
        reply = await ask(proxy, stream=True)
    assert [e["delta"]["text"] for e in named_events(reply) if e["type"] == "content_block_delta"] == ["from upstream"]
    assert reply.header("x-magnitude-route") == "fallback:u0"
    assert reply.header("x-magnitude-fallback-reason") == "worker_lost"


@pytest.mark.parametrize(
    ("said", "end", "reason", "sequence"),
    [
        ([delta("x")], api.Finished(request="", epoch=0, choice=0, reason="stop"), "end_turn", None),
        (
            [delta("x")],
            api.Finished(request="", epoch=0, choice=0, reason="stop", matched_stop="STOP"),
            "stop_sequence",
            "STOP",
        ),
        ([delta("x")], finished(reason="length"), "max_tokens", None),
        ([delta(refusal="No.")], finished(reason="content_filter"), "refusal", None),
        # A call of one named tool ends with "stop", as OpenAI has it.
        ([call(0, "c", "weather", "{}")], finished(reason="stop"), "tool_use", None),
        # What the limit cut off is not shown as a call.
        ([delta("x"), call(0, "c", "weather", '{"ci')], finished(reason="length"), "max_tokens", None),
    ],
)
async def test_stop_reasons(
    tmp_path: Path, said: list[Action], end: api.Finished, reason: str, sequence: str | None
) -> None:
    route = ScriptedRoute("local", [[started(), *said, end, completed()]])
    async with routing(worker_and_upstream(tmp_path), route) as proxy:
        whole = (await ask(proxy)).json
        stream = named_events(await ask(proxy, stream=True))
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    assert stream[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}
    assert len(whole["content"]) == 1


@pytest.mark.thorough
async def test_a_quiet_stream_is_pinged(tmp_path: Path) -> None:
    limits = DeadlineConfig(hold_headers_s=0.01, keepalive_s=0.01)
    route = ScriptedRoute("local", [[started(), Pause(0.08), delta("x"), finished(), completed()]])
    async with routing(worker_and_upstream(tmp_path, deadlines=limits), route) as proxy:
        kinds = [event["type"] for event in named_events(await ask(proxy, stream=True))]
    assert kinds[0] == "message_start"
    assert kinds.count("ping") >= 2
    assert [kind for kind in kinds if kind != "ping"][-1] == "message_stop"


@pytest.mark.parametrize(
    ("script", "status", "kind", "words"),
    [
        ([failed("overloaded", retryable=False)], 429, "rate_limit_error", "overloaded happened"),
        ([failed("worker_lost", retryable=False)], 503, "api_error", "worker_lost happened"),
        ([failed("deadline_exceeded", retryable=False)], 504, "timeout_error", "deadline_exceeded happened"),
        (
            [failed("context_length_exceeded", retryable=False, param="messages")],
            400,
            "invalid_request_error",
            "prompt is too long: context_length_exceeded happened",
        ),
        (
            [call(0, "a", "x"), call(1, "b", "y"), call(0, arguments="{}"), FOREVER],
            503,
            "api_error",
            "the answer cannot be told in order: tool call 0 went on after another part had begun",
        ),
        ([call(0, "a", "x", "[1]"), finished(), completed()], 503, "api_error", "no JSON object"),
    ],
)
async def test_failures_of_a_route(tmp_path: Path, script: list[Action], status: int, kind: str, words: str) -> None:
    async with routing(worker_and_upstream(tmp_path), ScriptedRoute("local", [script])) as proxy:
        reply = await ask(proxy)
    assert reply.status == status
    error = error_of(reply)
    assert error["type"] == kind
    assert words in error["message"]


async def test_a_stream_that_fails_ends_with_one_error(tmp_path: Path) -> None:
    script = [started(), delta("x"), Pause(0.01), failed("engine_error", retryable=False)]
    async with routing(worker_and_upstream(tmp_path), ScriptedRoute("local", [script])) as proxy:
        events = named_events(await ask(proxy, stream=True))
    kinds = ["message_start", "content_block_start", "content_block_delta", "error"]
    assert [event["type"] for event in events] == kinds
    assert events[-1]["error"]["type"] == "api_error"


TURN = ASK["messages"]
BLOCK = {"type": "text", "text": "x"}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*TURN, {"role": "assistant", "content": "I"}]}, "messages[1]"),
    ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "q"}]}]},
        "messages[0].content[0].tool_use_id",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}, *TURN]},
        "messages[0].content[0].name",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]}]},
        "messages[0].content[0]",
    ),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"temperature": 1.5}, "temperature"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
]


async def test_wrong_fields_are_named(tmp_path: Path) -> None:
    config = proxy_config(tmp_path, worker=WorkerConfig(mode="attach", socket=str(tmp_path / "none")))
    async with routing(config, ScriptedRoute("local", [answer()])) as proxy:
        for change, field in WRONG:
            reply = await ask(proxy, **change)
            assert reply.status == 400, change
            error = error_of(reply)
            assert error["type"] == "invalid_request_error"
            assert re.match(rf"{re.escape(field)}[ :]", error["message"]), error


async def test_keys_and_routes_in_anthropics_form(tmp_path: Path) -> None:
    keys = (KeyConfig(sha256=hashlib.sha256(b"secret").hexdigest(), tenant="one"),)
    async with routing(worker_and_upstream(tmp_path, keys=keys), ScriptedRoute("local", [answer()])) as proxy:
        without = await proxy.post("/messages", ASK)
        accepted = await proxy.post("/messages", ASK, x_api_key="secret")
        elsewhere = await proxy.post("/messages/batches", ASK, x_api_key="secret")
    assert (without.status, error_of(without)["type"]) == (401, "authentication_error")
    assert accepted.status == 200
    assert (elsewhere.status, error_of(elsewhere)["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("user", ["user_a_account__session_11111111-2222", '{"session_id": "11111111-2222"}'])
async def test_the_session_in_the_user_id(tmp_path: Path, user: str) -> None:
    async with routing(worker_and_upstream(tmp_path), ScriptedRoute("local", [answer()])) as proxy:
        told = await ask(proxy, metadata={"user_id": user})
        named = await proxy.post("/chat/completions", {"messages": TURN, "metadata": {"session_id": "11111111-2222"}})
        other = await ask(proxy, metadata={"user_id": "somebody"})
    assert told.header("x-magnitude-session") == named.header("x-magnitude-session")
    assert other.header("x-magnitude-session") != told.header("x-magnitude-session")


async def test_tokens_are_counted_by_the_worker(tmp_path: Path) -> None:
    worker = ScriptedWorker(tmp_path / "w.sock")
    await worker.start()
    config = proxy_config(tmp_path, worker=WorkerConfig(mode="attach", socket=str(worker.socket)))
    try:
        async with proxying(config) as proxy:
            async with asyncio.timeout(5):
                while not proxy.running.surface.dispatcher.ready():
                    await asyncio.sleep(0.005)
            counted = await proxy.post("/messages/count_tokens", {**FULL, "model": "scripted"})
            # A limit as long as the scripted model's context is the context's end.
            await ask(proxy, max_tokens=100)
            wrong = await proxy.post("/messages/count_tokens", {"messages": []})
    finally:
        await worker.close()
    # One token per message, as the script counts; without a limit, a sampling or a key of its own.
    assert counted.json == {"input_tokens": 6}
    assert worker.generated[0].max_tokens is None
    assert error_of(wrong)["message"].startswith("messages ")


async def test_tokens_cannot_be_counted_without_a_worker(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        reply = await proxy.post("/messages/count_tokens", ASK)
    assert reply.status == 404
    assert error_of(reply)["type"] == "not_found_error"
