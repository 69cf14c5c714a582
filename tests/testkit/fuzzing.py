"""What schemathesis is told when it fuzzes a running server (`SCHEMATHESIS_HOOKS=testkit.fuzzing`).

Work is bounded: few tokens, few choices. What only a conversation makes right is often made right: ids of sessions and
kept responses, calls that tool messages answer, times. Answers are checked against OpenAI's own schemas too.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis
from schemathesis.core.transport import DEFAULT_MAX_STREAM_EVENTS as EVENTS_READ
from schemathesis.specs.openapi.checks import negative_data_rejection

from testkit import wire

LINES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")
SESSION = "fuzz"
TOKENS = 6
CHOICES = 3
MOST_CHOICES = 16
_LIMITS = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}
_kept: list[str] = []
_forked: list[str] = []


@schemathesis.serializer(*LINES)
def _lines(_: Any, value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    return b"\n".join(json.dumps(one).encode() for one in (value if isinstance(value, list) else [value]))


@schemathesis.deserializer(*LINES)
def _of_lines(_: Any, response: Any) -> Any:
    return [json.loads(line) for line in response.content.split(b"\n") if line]


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Leaves one rule out: all four of a chat are more than the generator combines."""
    chat = raw_schema.get("components", {}).get("schemas", {}).get("ChatRequest")
    if chat is not None:
        chat["allOf"] = [rule for rule in chat["allOf"] if "top_logprobs" not in json.dumps(rule)]


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Bounds the work, and names what exists."""
    size = len(repr(case.body))
    often = size % 2 == 0
    if isinstance(case.body, dict):
        case.body = _likelier(_bounded(case.path, case.body)) if often else _bounded(case.path, case.body)
        if case.path in _LIMITS and size % 3 and case.body.get("stream") in (None, False):
            case.body["stream"] = True
    if often:
        case.headers.pop("x-magnitude-limits", None)
    if case.path in _LIMITS and "x-magnitude-session" not in case.headers:
        case.headers["x-magnitude-session"] = SESSION
    given = case.path_parameters or {}
    if "id" in given and sum(map(ord, str(given["id"]))) % 2:
        if case.path.startswith("/v1/sessions/"):
            given["id"] = SESSION
        elif case.path.startswith("/v1/responses/") and _kept:
            given["id"] = _kept[-1]
    if "branch" in given and _forked and sum(map(ord, str(given["branch"]))) % 2:
        given.update(id=SESSION, branch=_forked[-1])


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Remembers what was kept, and what was forked."""
    if case.path == "/v1/responses" and response.status_code == 200 and not _is_stream(response):
        _kept.append(response.json()["id"])
    if case.path == "/v1/sessions/{id}/branches" and case.method == "POST" and response.status_code == 200:
        _forked.append(response.json()["data"][-1]["id"])


def _bounded(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Returns a body that makes little work; what is out of every bound stays."""
    made = dict(body)
    for name in _LIMITS.get(path, ()):
        if type(made.get(name)) is int and made[name] > TOKENS:
            made[name] = TOKENS
    for name in {"/v1/chat/completions": ("max_tokens",), "/v1/responses": ("max_output_tokens",)}.get(path, ()):
        made.setdefault(name, TOKENS)
        made[name] = TOKENS if made[name] is None else made[name]
    if type(made.get("n")) is int and CHOICES < made["n"] <= MOST_CHOICES:
        made["n"] = CHOICES
    return made


def _likelier(body: dict[str, Any]) -> dict[str, Any]:
    """Returns a body in which texts that must name something do."""
    made = dict(body)
    if isinstance(made.get("session_id"), str):
        made["session_id"] = SESSION
    if isinstance(made.get("timestamp"), str) and made["timestamp"][:4].isdecimal():
        made["timestamp"] = "2026-11-30T12:00:00Z"
    if isinstance(made.get("messages"), list):
        made["messages"] = [one for message in made["messages"] for one in _answering(message)]
    return made


def _answering(message: Any) -> list[Any]:
    """Returns a message, after the call that it answers where it answers one."""
    if (
        not isinstance(message, dict)
        or message.get("role") != "tool"
        or not isinstance(message.get("tool_call_id"), str)
    ):
        return [message]
    call = {"id": message["tool_call_id"], "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}, message]


@schemathesis.check
def rejects_what_is_wrong(ctx: Any, response: Any, case: Any) -> bool | None:
    """What does not fit the document is refused; a wrong line is told in the answer, and the others count."""
    return None if case.media_type in LINES else negative_data_rejection(ctx, response, case)


@schemathesis.check
def describes_its_headers(ctx: Any, response: Any, case: Any) -> None:
    """The document names the product's own headers of an answer."""
    if response.status_code == 200:
        own = {name for name in response.headers if name.startswith("x-magnitude-")}
        named = case.operation.definition.raw["responses"].get("200", {}).get("headers", {})
        assert own <= set(named), own - set(named)


@schemathesis.check
def wire_shape(ctx: Any, response: Any, case: Any) -> None:
    """OpenAI's schemas hold, and a stream has a good end."""
    if response.status_code != 200 or case.method != "POST" or case.path not in _LIMITS:
        return
    if _is_stream(response):
        _check_stream(case.path, response.content.decode())
    elif case.path == "/v1/chat/completions":
        wire.check("CreateChatCompletionResponse", response.json())
    elif case.path == "/v1/completions":
        wire.check("CreateCompletionResponse", response.json())


def _is_stream(response: Any) -> bool:
    return str(response.headers.get("content-type", [""])[0]).startswith("text/event-stream")


def _check_stream(path: str, text: str) -> None:
    told = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    *chunks, last = told or [""]
    # A longer stream was not read to its end.
    if len(told) >= EVENTS_READ:
        chunks = told
    elif path == "/v1/messages":
        assert json.loads(last)["type"] == "message_stop", last
    elif path == "/v1/responses":
        assert json.loads(last)["type"] in ("response.completed", "response.incomplete"), last
    else:
        assert last == "[DONE]", last
    checks = {"/v1/chat/completions": wire.check_chat_chunk, "/v1/completions": wire.check_completion_chunk}
    for one in chunks if path in checks else ():
        if one != "[DONE]":
            checks[path](json.loads(one))
