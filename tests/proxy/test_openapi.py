"""`/openapi.json` is the routes that are served, and its schemas are what the handlers take and give."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from magnitude_proxy.dialect.messages_requests import read_count_request, read_messages_request
from magnitude_proxy.dialect.responses_requests import read_response_request
from magnitude_proxy.dialect.responses_wire import ResponsesRequest
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.feedback import FeedbackRequest, read_feedback
from magnitude_proxy.keyfile import parse_key_file
from magnitude_proxy.listener import admin_application, api_application
from magnitude_proxy.tools import read_registration
from magnitude_proxy.wire.events import read_event
from magnitude_proxy.wire.intake import read_chat, read_completion
from magnitude_proxy.wire.requests import convert, decode_json
from testkit.openapi import Document, check
from testkit.proxy import ASK, Proxy, proxy_config, routing
from testkit.routes import ScriptedRoute, answer

pytestmark = pytest.mark.thorough

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "now"}}
SCHEMA = {"type": "object"}


@pytest.fixture
async def proxy(tmp_path: Path) -> AsyncIterator[Proxy]:
    async with routing(proxy_config(tmp_path, "http://127.0.0.1:9/v1"), ScriptedRoute("u0", [answer("hi")])) as made:
        yield made


@pytest.fixture
async def document(proxy: Proxy) -> Document:
    return Document((await proxy.get("/openapi.json")).json)


async def test_every_served_route_is_described_and_the_reverse(proxy: Proxy, document: Document) -> None:
    surface = proxy.running.surface
    admin = Document((await proxy.get(f"{proxy.admin}/openapi.json")).json)
    for app, described in ((api_application(surface), document), (admin_application(surface), admin)):
        served = {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource is not None}
        assert {route for route in served if route[0] != "HEAD"} == set(described.operations)


async def test_it_is_valid_small_and_reads_well(proxy: Proxy, document: Document) -> None:
    admin = Document((await proxy.get(f"{proxy.admin}/openapi.json")).json)
    for one in (document, admin):
        for reference in one.references():
            assert one.resolved({"$ref": reference})
        for name, schema in one.body["components"]["schemas"].items():
            Draft202012Validator.check_schema(schema)
            assert name.isalnum(), f"two structs share the name of {name}: rename one"
        told = [(route["operationId"], route["summary"]) for route in one.operations.values()]
        assert len({name for name, _ in told}) == len(told)
        assert all(summary and "raises" not in summary for _, summary in told)
    assert len(json.dumps(document.body)) < 160_000
    validator = pytest.importorskip("openapi_spec_validator", reason="openapi-spec-validator is not installed")
    for one in (document, admin):
        validator.validate(one.body)


async def test_keys_are_asked_for_where_it_says_so(document: Document, tmp_path: Path) -> None:
    config = proxy_config(tmp_path / "keyed", "http://127.0.0.1:9/v1", keys=parse_key_file("sk-one alice\n", "keys"))
    async with routing(config, ScriptedRoute("u0", [answer("hi")])) as keyed:
        body = (await keyed.get("/openapi.json", authorization="Bearer sk-one")).json
        admin = (await keyed.get(f"{keyed.admin}/openapi.json")).json
        for origin, described in ((keyed.origin, body), (keyed.admin, admin)):
            for (method, path), operation in Document(described).operations.items():
                if method == "GET":
                    status = (await keyed.get(f"{origin}{path.replace('{', '').replace('}', '')}")).status
                    assert (status == 401) == ({} not in operation.get("security", described["security"])), path
    assert body["security"] == [{"bearer": []}, {"apiKey": []}]
    assert document.body["security"] == admin["security"] == [*body["security"], {}]


async def test_answers_errors_and_streams_are_as_described(proxy: Proxy, document: Document) -> None:
    chat = ("POST", "/v1/chat/completions")
    whole = await proxy.post("/chat/completions", ASK)
    check(document.gives(*chat), whole.json)
    named = {name.lower() for name in whole.headers}
    assert {"x-request-id", "x-magnitude-session", "x-magnitude-route"} <= named
    told = document.operations[chat]["responses"]["200"]["headers"]
    assert {name for name in named if name.startswith("x-")} <= set(told)
    for event in (await proxy.post("/chat/completions", {**ASK, "stream": True})).events[:-1]:
        check(document.gives(*chat, media="text/event-stream"), event)
    check(document.gives(*chat, status=400), (await proxy.post("/chat/completions", {})).json)
    response = await proxy.post("/responses", {"input": "Hi", "tools": [{"type": "function", "name": "f"}]})
    check(document.gives("POST", "/v1/responses"), response.json)
    message = {"max_tokens": 5, "messages": [USER]}
    check(document.gives("POST", "/v1/messages"), (await proxy.post("/messages", message)).json)
    check(document.gives("POST", "/v1/messages", status=400), (await proxy.post("/messages", {})).json)
    check(document.gives("GET", "/v1/sessions"), (await proxy.get("/v1/sessions")).json)
    check(document.gives("GET", "/health"), (await proxy.get("/health")).json)


READERS: dict[str, Callable[[bytes], object]] = {
    "/v1/chat/completions": lambda raw: read_chat(raw, 0),
    "/v1/completions": lambda raw: read_completion(raw, 0),
    "/v1/messages": lambda raw: read_messages_request(raw, 0, None),
    "/v1/messages/count_tokens": lambda raw: read_count_request(raw, 0),
    "/v1/responses": lambda raw: read_response_request(
        decode_json(raw), convert(decode_json(raw), ResponsesRequest), [], 0
    ),
    "/v1/tools": lambda raw: read_registration(raw, "salt"),
    "/v1/feedback": lambda raw: read_feedback(convert(decode_json(raw), FeedbackRequest)),
    "/v1/sessions/{id}/events": read_event,
}
SAID = {"session_id": "s", "success": True}
CHAT, TEXT, MESSAGES, COUNT, RESPONSES, TOOLS, FEEDBACK, EVENTS = READERS
GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER], "stream": True, "stream_options": {}, "logprobs": True, "top_logprobs": 20}),
    (CHAT, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "now"}}}),
    (CHAT, {"messages": [{**USER, "content": [{"type": "image_url"}, {"type": "text", "text": ""}]}], "anything": 1}),
    (CHAT, {"messages": [USER], "response_format": {"type": "text"}, "guided_json": {}, "structured_outputs": {}}),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {"schema": True}}}),
    (CHAT, {"messages": [USER], "logit_bias": {"0": -100, "9999999999": 100}, "magnitude": {"config": {}}}),
    (TEXT, {"prompt": [[1], [2, 3]], "logprobs": 0, "best_of": 1}),
    (TEXT, {"prompt": [1, 2]}),
    (MESSAGES, {"max_tokens": 1, "messages": [USER, {"role": "user", "content": []}], "mcp_servers": []}),
    (COUNT, {"messages": [USER], "tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "any"}}),
    (RESPONSES, {"input": [{"role": "user", "content": "Hi"}, {"type": "reasoning", "content": [{"type": "x"}]}]}),
    (RESPONSES, {"input": "Hi", "tools": [{"type": "web_search_preview"}], "background": False, "prompt": None}),
    (TOOLS, {"system": "x"}),
    (TOOLS, {"tools": [TOOL]}),
    (FEEDBACK, {**SAID, "timestamp": "2026-11-30"}),
    (EVENTS, {"type": "step_failed"}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER], "stream_options": {}}),
    (CHAT, {"messages": [USER], "top_logprobs": 1}),
    (CHAT, {"messages": [{"role": "user"}]}),
    (CHAT, {"messages": [{**USER, "tool_calls": [CALL]}]}),
    (CHAT, {"messages": [{"role": "tool", "content": "x"}]}),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}),
    (CHAT, {"messages": [{**USER, "content": [{"type": "video"}]}]}),
    (CHAT, {"messages": [{**USER, "content": [{"type": "text"}]}]}),
    (CHAT, {"messages": [USER], "tools": [{"type": "function", "function": {"name": "a b"}}]}),
    (CHAT, {"messages": [USER], "tool_choice": "required"}),
    (CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "now"}),
    (CHAT, {"messages": [USER], "response_format": {"type": "json_schema", "json_schema": {}}}),
    (CHAT, {"messages": [USER], "guided_json": {}, "guided_regex": "a"}),
    (CHAT, {"messages": [USER], "guided_choice": [""]}),
    (CHAT, {"messages": [USER], "structured_outputs": {"regex": "a", "json_object": True}}),
    (CHAT, {"messages": [USER], "prediction": {"type": "content", "content": [{"type": "refusal"}]}}),
    (CHAT, {"messages": [USER], "logit_bias": {"a": 1}}),
    (CHAT, {"messages": [USER], "magnitude": {"config": {"max_batch_size": 0}}}),
    (TEXT, {"prompt": [1, "a"]}),
    (TEXT, {"prompt": [[]]}),
    (TEXT, {"prompt": ["a"] * 129}),
    (MESSAGES, {"messages": [USER]}),
    (MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a"}]}]}),
    (MESSAGES, {"max_tokens": 1, "messages": [USER], "mcp_servers": [{}]}),
    (MESSAGES, {"max_tokens": 1, "messages": [USER], "system": [{"type": "image"}]}),
    (MESSAGES, {"max_tokens": 1, "messages": [USER], "output_config": {"format": {"type": "json_schema"}}}),
    (COUNT, {"messages": [USER], "tools": [{"name": "f"}]}),
    (COUNT, {"messages": [USER], "tool_choice": {"type": "any"}}),
    (RESPONSES, {"input": "Hi", "background": True}),
    (RESPONSES, {"input": [{"content": "Hi"}]}),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}),
    (RESPONSES, {"input": [{"role": "assistant", "content": [{"type": "input_image", "image_url": "x"}]}]}),
    (RESPONSES, {"input": "Hi", "tools": [{"type": "function"}]}),
    (RESPONSES, {"input": "Hi", "text": {"format": {"type": "json_schema"}}}),
    (TOOLS, {"tools": []}),
    (TOOLS, {"tools": [{"type": "custom"}]}),
    (FEEDBACK, {**SAID, "timestamp": "yesterday"}),
    (EVENTS, {"type": "tool_started"}),
    (EVENTS, {"call_id": "c"}),
]


async def test_schemas_hold_what_the_handlers_check(document: Document) -> None:
    for path, body in GOOD:
        check(document.takes(path), body)
        READERS[path](json.dumps(body).encode())
    for path, body in BAD:
        assert not document.takes(path).is_valid(body), (path, body)
        with pytest.raises(BadRequest):
            READERS[path](json.dumps(body).encode())
