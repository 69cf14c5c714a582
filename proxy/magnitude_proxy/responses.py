"""`/v1/responses`: OpenAI's Responses API over the same sessions, routes and worker, with the answers that are kept."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from magnitude_proxy.admission import admit
from magnitude_proxy.answer import LOCAL, Answer
from magnitude_proxy.chat import priority, steps, tenant_salt
from magnitude_proxy.dialect.parts import Part, Parts
from magnitude_proxy.dialect.responses_render import ResponseAnswer
from magnitude_proxy.dialect.responses_replies import Deleted, FunctionTool, ResponseReply, TextSetting
from magnitude_proxy.dialect.responses_requests import LOGPROBS, UNNAMED, Message, ResponseAsked, read_response_request
from magnitude_proxy.dialect.responses_wire import ResponsesRequest, TextFormat
from magnitude_proxy.errors import BadRequest, NotFound, Unavailable
from magnitude_proxy.middleware import read_body
from magnitude_proxy.pruner import pruned, watched
from magnitude_proxy.store.connection import StoreDown
from magnitude_proxy.store.responses import KeptResponse, KeptResponses
from magnitude_proxy.surface import EXCHANGE, SURFACE, Surface, json_response
from magnitude_proxy.wire.requests import convert, decode_json


async def create(request: web.Request) -> web.StreamResponse:
    """Answers one Responses request; raises ProxyError before anything is sent."""
    surface, exchange = request.app[SURFACE], request[EXCHANGE]
    body = decode_json(await read_body(request))
    salt = tenant_salt(request)
    wire = convert(body, ResponsesRequest)
    earlier = await _conversation(surface.sessions.responses, salt, wire.previous_response_id)
    asked = read_response_request(body, wire, earlier, surface.seed())
    offer = surface.catalogue.offer(asked.chat.model, exchange.upstream)
    lease = await admit(request, salt, asked.chat)
    name = f"resp_{uuid.uuid4().hex}"
    chat = await pruned(surface, request.headers, salt, lease, asked.chat)
    step = steps(chat, lease, salt, name, offer, priority(request, chat))[0]
    dialect = _answer(surface, salt, asked, name)
    answer = Answer(surface, exchange, chat, lease, name, dialect)
    return await answer.send(request, dialect.passing(watched(chat, surface.dispatcher.run(step))))


async def show(request: web.Request) -> web.Response:
    """Returns a kept response; raises ProxyError."""
    if request.query.get("stream", "false") != "false":
        raise BadRequest("stream: a kept response is told as a whole; leave it out", param="stream")
    kept = await _kept(request)
    return web.Response(body=kept.body, content_type="application/json")


async def delete(request: web.Request) -> web.Response:
    """Forgets a kept response; raises ProxyError."""
    name = request.match_info["id"]
    try:
        there = await request.app[SURFACE].sessions.responses.forget(tenant_salt(request), name)
    except StoreDown as error:
        raise _store_down() from error
    if not there:
        raise _unknown(name, "id")
    return json_response(Deleted(id=name))


async def cancel(request: web.Request) -> web.Response:
    """Refuses to cancel: a response that is kept is complete; raises ProxyError in any case."""
    await _kept(request)
    raise BadRequest(
        "only responses in the background can be cancelled, and there are none here; close the connection to end one "
        "that is under way",
        param="id",
        code="unsupported_feature",
    )


def _answer(surface: Surface, salt: str, asked: ResponseAsked, name: str) -> ResponseAnswer:
    """Returns what writes the answer and keeps it."""

    def shown(label: str) -> str:
        return surface.catalogue.shown(asked.chat.model, label == LOCAL)

    keep = functools.partial(_keep, surface.sessions.responses, salt, asked.messages)
    return ResponseAnswer(_opening(asked, name, int(surface.now())), asked, keep, shown, surface.now)


async def _keep(
    responses: KeptResponses, salt: str, messages: Sequence[Message], response: ResponseReply, parts: Parts
) -> bool:
    """Keeps a response with the conversation that it ends; False when that cannot be done."""
    conversation = [*messages, *_said(parts.parts)]
    kept = KeptResponse(body=msgspec.json.encode(response), conversation=msgspec.json.encode(conversation))
    return await responses.keep(salt, response.id, kept)


def _said(parts: Sequence[Part]) -> list[Message]:
    """Returns the answer as messages of a chat."""
    messages: list[Message] = []
    for part in parts:
        last = messages[-1] if messages else None
        if part.kind == "thought":
            continue
        if part.kind != "call":
            messages.append({"role": "assistant", "content": part.text})
            continue
        if last is None:
            last = {"role": "assistant", "content": ""}
            messages.append(last)
        call = {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.text}}
        last.setdefault("tool_calls", []).append(call)
    return messages


def _opening(asked: ResponseAsked, name: str, created: int) -> ResponseReply:
    """Returns the response before its first output: what the client asked for, with every default."""
    wire = asked.wire
    form = None if wire.text is None or wire.text.format is None else _told(wire.text.format)
    given: dict[str, Any] = {
        "instructions": wire.instructions,
        "max_output_tokens": wire.max_output_tokens,
        "metadata": wire.metadata,
        "parallel_tool_calls": wire.parallel_tool_calls,
        "previous_response_id": wire.previous_response_id,
        "prompt_cache_key": wire.prompt_cache_key,
        "safety_identifier": wire.safety_identifier,
        "store": wire.store,
        "temperature": wire.temperature,
        "text": None if form is None else TextSetting(format=form),
        "tool_choice": wire.tool_choice,
        "tools": tuple(map(_tool, asked.definitions)),
        "top_logprobs": wire.top_logprobs if LOGPROBS in (wire.include or ()) else None,
        "top_p": wire.top_p,
    }
    present = {field: value for field, value in given.items() if value is not None}
    return ResponseReply(id=name, created_at=created, status="in_progress", model=asked.chat.model, **present)


def _told(form: TextFormat) -> dict[str, Any]:
    """Returns the form of the text as the response shows it; a schema has a name there."""
    given = {name: value for name, value in msgspec.to_builtins(form).items() if value is not None}
    return {"name": UNNAMED, **given} if form.type == "json_schema" else given


def _tool(given: dict[str, Any]) -> dict[str, Any]:
    """Returns a tool as the response shows it: of a function every field, of another kind what the client sent."""
    shown: dict[str, Any] = given
    if given["type"] == "function":
        shown = msgspec.to_builtins(msgspec.convert(given, FunctionTool))
    return shown


async def _conversation(responses: KeptResponses, salt: str, name: str | None) -> list[Message]:
    """Returns the conversation that ends with the response of this name; nothing without a name."""
    if name is None:
        return []
    try:
        kept = await responses.find(salt, name)
    except StoreDown as error:
        raise _store_down() from error
    if kept is None:
        raise _unknown(name, "previous_response_id")
    messages: list[Message] = msgspec.json.decode(kept.conversation)
    return messages


async def _kept(request: web.Request) -> KeptResponse:
    """Returns the response that the path names."""
    name = request.match_info["id"]
    try:
        kept = await request.app[SURFACE].sessions.responses.find(tenant_salt(request), name)
    except StoreDown as error:
        raise _store_down() from error
    if kept is None:
        raise _unknown(name, "id")
    return kept


def _store_down() -> Unavailable:
    return Unavailable(
        "kept responses cannot be reached: the session store does not answer; send the conversation in input",
        code="store_unavailable",
    )


def _unknown(name: str, param: str) -> NotFound:
    return NotFound(
        f"{param} {name[:64]!r} is not known: it was never kept (store: false), was deleted, or is too old; send the "
        "conversation in input",
        param=param,
        code="response_not_found",
    )
