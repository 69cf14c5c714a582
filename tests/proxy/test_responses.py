"""OpenAI's Responses over real sockets: what is read, asked and written, what is kept, and how it fails."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_proxy.config import DeadlineConfig, KeyConfig, StoreConfig, WorkerConfig
from testkit import store, wire
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
from testkit.upstream import STREAM_HEAD, OpenAIStub, ScriptedServer, json_answer

pytestmark = pytest.mark.thorough

ASK: dict[str, Any] = {"model": "magnitude", "input": "Hi"}
TOOL = {"type": "function", "name": "weather", "description": "Now", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
# A request with every field that changes something, and the chat that it is.
FULL: dict[str, Any] = {
    "model": "magnitude",
    "instructions": "You are brief.",
    "input": [
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"city":"Rome"}'},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ],
    "tools": [TOOL, {"type": "web_search"}],
    "tool_choice": {"type": "function", "name": "weather"},
    "parallel_tool_calls": False,
    "max_output_tokens": 20,
    "temperature": 0.5,
    "top_p": 0.9,
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "low"},
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "top_logprobs": 2,
    "reasoning": {"effort": "low"},
    "truncation": "disabled",
    "metadata": {"session_id": "mine"},
    "prompt_cache_key": "key",
}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome"}'}},
    {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
]
CHAT: dict[str, Any] = {
    "model": "magnitude",
    "messages": [
        {"role": "system", "content": "You are brief."},
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": "Let me see.", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "weather", "description": "Now", "parameters": {"type": "object"}},
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "weather"}},
    "parallel_tool_calls": False,
    "max_completion_tokens": 20,
    "temperature": 0.5,
    "top_p": 0.9,
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
    "logprobs": True,
    "top_logprobs": 2,
    "prompt_cache_key": "key",
}


def call(index: int, id: str | None = None, name: str | None = None, arguments: str = "") -> api.Delta:
    return delta(tool_calls=(api.ToolCallDelta(index=index, id=id, name=name, arguments=arguments),))


LOGPROB = api.TokenLogprob(token="see", logprob=-0.5, bytes=(115, 101, 101))
TWO_CALLS: list[Action] = [
    started(),
    delta("Let me "),
    delta("see", logprobs=(LOGPROB,)),
    call(0, "c0", None, '{"city": '),
    call(0, None, "weather", '"Paris"}'),
    call(1, "c1", "time"),
    finished(reason="tool_calls"),
    completed(prompt_tokens=7, cached_tokens=3, completion_tokens=9),
]


async def ask(proxy: Proxy, **changes: Any) -> Reply:
    reply = await proxy.post("/responses", {**ASK, **changes})
    if reply.status == 200 and not changes.get("stream"):
        wire.check("Response", reply.json)
    return reply


def checked_events(reply: Reply) -> list[dict[str, Any]]:
    events = named_events(reply)
    for event in events:
        wire.check("ResponseStreamEvent", event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def anonymous(response: dict[str, Any]) -> dict[str, Any]:
    """Returns a response without what differs between two of them."""
    items = [{**item, "id": item["id"].split("_")[0]} for item in response["output"]]
    return {**response, "id": "", "created_at": 0, "completed_at": 0, "output": items}


async def test_a_response_with_text_and_calls_and_its_stream(tmp_path: Path) -> None:
    async with routing(worker_and_upstream(tmp_path), ScriptedRoute("local", [TWO_CALLS])) as proxy:
        whole = await ask(proxy, tools=[TOOL])
        events = checked_events(await ask(proxy, tools=[TOOL], stream=True))
    body = whole.json
    assert whole.header("x-magnitude-route") == "local"
    assert [(item["type"], item["status"]) for item in body["output"]] == [
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
    ]
    assert body["output"][0]["content"][0]["text"] == "Let me see"
    assert body["output"][0]["content"][0]["logprobs"][0]["token"] == "see"
    assert [(item["call_id"], item["name"], item["arguments"]) for item in body["output"][1:]] == [
        ("c0", "weather", '{"city": "Paris"}'),
        ("c1", "time", ""),
    ]
    assert (body["status"], body["model"], body["store"]) == ("completed", "smollm2", True)
    assert body["usage"].pop("magnitude")["cached_tokens"] == 3
    assert body["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 16,
    }
    assert [event["type"].removeprefix("response.") for event in events] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    last = events[-1]["response"]
    del last["usage"]["magnitude"]
    assert anonymous(last) == anonymous(body)
    assert last["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert all(
        event["item"]["id"] == last["output"][event["output_index"]]["id"] for event in events if "item" in event
    )


async def test_the_worker_is_asked_what_a_chat_asks(tmp_path: Path) -> None:
    route = ScriptedRoute("local", [answer()])
    async with routing(worker_and_upstream(tmp_path), route) as proxy:
        reply = await proxy.post("/responses", FULL)
        assert reply.status == 200, reply.body
        dialect = asked(route)
        named = await proxy.post("/chat/completions", {**CHAT, "metadata": {"session_id": "mine"}})
        assert dialect == asked(route)
    assert reply.header("x-magnitude-session") == named.header("x-magnitude-session")
    assert reply.header("x-magnitude-ignored") == "reasoning, text.verbosity, tools[1], input.reasoning"
    wire.check("Response", reply.json)


async def test_an_upstream_gets_the_chat(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        reply = await proxy.post("/responses", {**FULL, "model": "stub-model"})
        events = checked_events(await ask(proxy, model="stub-model", tools=[TOOL], stream=True))
        picture = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
        await ask(proxy, model="stub-model", input=[{"role": "user", "content": [picture]}])
    assert stub.requests[0].path == "/v1/chat/completions"
    wanted = {**CHAT, "model": "stub-model", "stream": False, "reasoning_effort": "low", "verbosity": "low"}
    assert stub.requests[0].body == wanted
    assert reply.json["output"][0]["arguments"] == stub.arguments
    assert events[-1]["response"]["output"][0]["arguments"] == stub.arguments
    assert reply.header("x-magnitude-route") == "upstream:u0"
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
    assert stub.requests[2].body["messages"] == [{"role": "user", "content": [image]}]


async def test_what_an_upstreams_model_thought_is_an_item_of_its_own(tmp_path: Path) -> None:
    whole_answer = json_answer(THOUGHTFUL)
    server = ScriptedServer([[whole_answer], [STREAM_HEAD, THOUGHTS], [whole_answer]])
    async with server, proxying(proxy_config(tmp_path, server.url)) as proxy:
        whole = (await ask(proxy, model="m")).json
        events = checked_events(await ask(proxy, model="m", stream=True))
        kept = await proxy.post("/responses", {"model": "m", "input": "Well?", "previous_response_id": whole["id"]})
    thought, said = whole["output"]
    assert (thought["type"], thought["content"][0]["text"], said["content"][0]["text"]) == (
        "reasoning",
        "Hm. So.",
        "Yes.",
    )
    assert anonymous(events[-1]["response"])["output"] == anonymous(whole)["output"]
    deltas = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert deltas == ["Hm. ", "So."]
    assert kept.status == 200
    assert b"Hm." not in server.requests[2]


async def test_functions_of_a_namespace(tmp_path: Path) -> None:
    clock = {"type": "namespace", "name": "clock", "description": "Time", "tools": [{**TOOL, "name": "now"}]}
    said: list[Action] = [started(), call(0, "c0", "clock__now", "{}"), finished(reason="stop"), completed()]
    route = ScriptedRoute("local", [said])
    before = [
        {"type": "function_call", "call_id": "c", "name": "now", "namespace": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "noon"},
    ]
    choice = {"type": "function", "name": "now"}
    async with routing(worker_and_upstream(tmp_path), route) as proxy:
        body = (await ask(proxy, tools=[clock, TOOL], input=before, tool_choice=choice)).json
        events = checked_events(await ask(proxy, tools=[clock, TOOL], stream=True))
    given = route.seen[0].request.input
    assert isinstance(given, api.ChatInput)
    assert [tool.name for tool in given.tools] == ["clock__now", "weather"]
    assert given.tool_choice.name == given.messages[0].tool_calls[0].name == "clock__now"
    assert (body["output"][0]["name"], body["output"][0]["namespace"]) == ("now", "clock")
    assert body["tools"][0] == clock
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["name"] for event in done] == ["now"]
    assert anonymous(events[-1]["response"])["output"] == anonymous(body)["output"]


@pytest.mark.parametrize("kind", ["memory", "valkey"])
async def test_a_conversation_goes_on_from_what_is_kept(tmp_path: Path, kind: str) -> None:
    if kind == "memory":
        return await converse(tmp_path, StoreConfig(url="none"))
    async with store.server("valkey", tmp_path) as valkey:
        await converse(tmp_path, StoreConfig(url=valkey.url, timeout_s=5))
        keys = await valkey.do("KEYS", "magnitude:{*}:response")
        assert isinstance(keys, list)
        assert len(keys) == 1
        assert 0 < int(str(await valkey.do("PTTL", keys[0].decode()))) <= StoreConfig().session_ttl_s * 1000


async def converse(folder: Path, sessions: StoreConfig) -> None:
    """Plays a tool call and the answer to its result, then asks for, deletes and misses what was kept."""
    keys = tuple(KeyConfig(sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name) for name in ("one", "two"))
    said = [started(), delta("Hm."), call(0, "c0", "weather", '{"a":1}'), finished(reason="tool_calls"), completed()]
    route = ScriptedRoute("local", [said, answer("rain")])
    async with routing(worker_and_upstream(folder, keys=keys, store=sessions), route) as proxy:
        await proxy.running.surface.sessions.start()

        async def post(key: str = "one", path: str = "/responses", **body: Any) -> Reply:
            return await proxy.post(path, {**ASK, **body}, authorization=f"Bearer {key}")

        first = await post(instructions="Be brief.", tools=[TOOL])
        name = first.json["id"]
        result = [{"type": "function_call_output", "call_id": "c0", "output": "rain"}]
        second = await post(previous_response_id=name, input=result, tools=[TOOL], stream=True)
        assert checked_events(second)[-1]["response"]["previous_response_id"] == name
        given = route.seen[-1].request.input
        assert isinstance(given, api.ChatInput)
        assert given.messages == (
            api.Message(role="user", content="Hi"),
            api.Message(
                role="assistant",
                content="Hm.",
                tool_calls=(api.ToolCall(id="c0", name="weather", arguments='{"a":1}'),),
            ),
            api.Message(role="tool", content="rain", tool_call_id="c0"),
        )
        kept = await proxy.get(f"/v1/responses/{name}", authorization="Bearer one")
        assert kept.body == first.body
        refused = await post(path=f"/responses/{name}/cancel")
        assert (refused.status, refused.error["code"]) == (400, "unsupported_feature")
        unkept = await post(store=False)
        missing = [
            await post("two", previous_response_id=name),
            await post(previous_response_id=unkept.json["id"]),
            await post(previous_response_id="resp_never"),
            await proxy.get(f"/v1/responses/{name}", authorization="Bearer two"),
            await post("two", path=f"/responses/{name}/cancel"),
        ]
        assert [(reply.status, reply.error["code"]) for reply in missing] == [(404, "response_not_found")] * 5
        for expected in (200, 404):
            address = f"{proxy.url}/responses/{name}"
            async with proxy.http.delete(address, headers={"authorization": "Bearer one"}) as deleted:
                assert deleted.status == expected
        assert (await post(previous_response_id=name)).status == 404
        await proxy.running.surface.sessions.close()


async def test_without_its_store_an_answer_is_not_kept_and_none_is_found(tmp_path: Path) -> None:
    down = StoreConfig(url=f"unix://{tmp_path}/none.sock")
    async with routing(worker_and_upstream(tmp_path, store=down), ScriptedRoute("local", [answer()])) as proxy:
        reply = await ask(proxy)
        assert (reply.status, reply.json["store"]) == (200, False)
        assert reply.header("x-magnitude-degraded") == "store"
        found = await ask(proxy, previous_response_id=reply.json["id"])
        shown = await proxy.get(f"/v1/responses/{reply.json['id']}")
        async with proxy.http.delete(f"{proxy.url}/responses/x") as deleted:
            assert deleted.status == 503
    assert [(each.status, each.error["code"]) for each in (found, shown)] == [(503, "store_unavailable")] * 2


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [("length", "incomplete", "max_output_tokens"), ("content_filter", "incomplete", "content_filter")],
)
async def test_what_is_cut_is_incomplete(tmp_path: Path, reason: str, status: str, details: str) -> None:
    script: list[Action] = [started(), delta("a"), delta(refusal="No."), finished(reason=reason), completed()]
    async with routing(worker_and_upstream(tmp_path), ScriptedRoute("local", [script])) as proxy:
        whole = (await ask(proxy, max_output_tokens=3)).json
        events = checked_events(await ask(proxy, max_output_tokens=3, stream=True))
    assert (whole["status"], whole["incomplete_details"], whole["completed_at"]) == (status, {"reason": details}, None)
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    assert whole["output"][1]["content"] == [{"type": "refusal", "refusal": "No."}]
    assert events[-1]["type"] == "response.incomplete"
    assert anonymous(events[-1]["response"]) == anonymous(whole)
    assert {"response.refusal.delta", "response.refusal.done"} <= {event["type"] for event in events}


async def test_a_stream_that_fails_says_so_once(tmp_path: Path) -> None:
    broken = [started(), delta("x"), Pause(0.01), failed("engine_error", retryable=False)]
    mixed = [call(0, "a", "x"), Pause(0.01), call(1, "b", "y"), call(0, arguments="{}"), FOREVER]
    async with routing(worker_and_upstream(tmp_path), ScriptedRoute("local", [broken, mixed])) as proxy:
        first = checked_events(await ask(proxy, stream=True))
        second = checked_events(await ask(proxy, stream=True))
    for events, words in ((first, "engine_error happened"), (second, "went on after another part had begun")):
        last = events[-1]["response"]
        assert events[-1]["type"] == "response.failed"
        assert (last["status"], last["error"]["code"], last["store"]) == ("failed", "server_error", False)
        assert words in last["error"]["message"]
        assert [event["type"] for event in events].count("response.failed") == 1


async def test_a_quiet_stream_is_kept_alive(tmp_path: Path) -> None:
    limits = DeadlineConfig(hold_headers_s=0.01, keepalive_s=0.01)
    route = ScriptedRoute("local", [[started(), Pause(0.08), delta("x"), finished(), completed()]])
    async with routing(worker_and_upstream(tmp_path, deadlines=limits), route) as proxy:
        reply = await ask(proxy, stream=True)
    assert reply.body.count(b": keep-alive\n\n") >= 2
    assert checked_events(reply)[-1]["type"] == "response.completed"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "reasoning"}]}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input[0].content[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{"type": "web_search"}, {**TOOL, "name": "a b"}]}, "tools[1].name"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools[0].tools[0].type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
]


async def test_wrong_fields_are_named(tmp_path: Path) -> None:
    config = proxy_config(tmp_path, worker=WorkerConfig(mode="attach", socket=str(tmp_path / "none")))
    async with routing(config, ScriptedRoute("local", [answer()])) as proxy:
        for change, param in WRONG:
            reply = await ask(proxy, **change)
            assert reply.status == 400, change
            assert reply.error["param"] == param
            assert param in reply.error["message"]


async def test_the_workers_refusals_name_the_clients_fields(tmp_path: Path) -> None:
    message = "prompt of 9 tokens plus max_tokens 8 exceeds the context of 10; shorten the prompt or lower max_tokens"
    refusal = api.Failed(request="r", epoch=1, code="context_length_exceeded", message=message, param="max_tokens")
    async with routing(worker_and_upstream(tmp_path), ScriptedRoute("local", [[refusal]])) as proxy:
        reply = await ask(proxy)
    assert (reply.status, reply.error["param"]) == (400, "max_output_tokens")
    assert reply.error["message"] == message.replace("max_tokens", "max_output_tokens")
