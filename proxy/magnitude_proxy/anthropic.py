"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's API over the same sessions, routes and worker."""

from __future__ import annotations

import uuid

import msgspec
from aiohttp import web

from magnitude_engine import api
from magnitude_proxy.admission import admit
from magnitude_proxy.answer import Answer
from magnitude_proxy.chat import priority, steps, tenant_salt
from magnitude_proxy.dialect.messages_render import MessageAnswer
from magnitude_proxy.dialect.messages_replies import error_reply
from magnitude_proxy.dialect.messages_requests import NAMES, read_count_request, read_messages_request
from magnitude_proxy.errors import ErrorBody, NotFound, from_failed
from magnitude_proxy.middleware import Handler, read_body
from magnitude_proxy.pruner import pruned, watched
from magnitude_proxy.surface import EXCHANGE, SURFACE, json_response

ROUTE = "/v1/messages"


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an answer of `count_tokens`."""

    input_tokens: int


async def messages(request: web.Request) -> web.StreamResponse:
    """Answers one Messages request; raises ProxyError before anything is sent."""
    surface, exchange = request.app[SURFACE], request[EXCHANGE]
    card = surface.worker.card if surface.worker is not None else None
    asked = read_messages_request(
        await read_body(request), surface.seed(), None if card is None else card.context_length
    )
    salt = tenant_salt(request)
    offer = surface.catalogue.offer(asked.chat.model, exchange.upstream)
    lease = await admit(request, salt, asked.chat)
    answer_id = f"msg_{uuid.uuid4().hex}"
    chat = await pruned(surface, request.headers, salt, lease, asked.chat)
    step = steps(chat, lease, salt, answer_id, offer, priority(request, chat))[0]
    limited = asked.chat.generate.max_tokens is not None
    dialect = MessageAnswer(asked.max_tokens, limited, asked.dropped, asked.thoughts)
    answer = Answer(surface, exchange, chat, lease, answer_id, dialect)
    return await answer.send(request, dialect.passing(watched(chat, surface.dispatcher.run(step))))


async def count_tokens(request: web.Request) -> web.Response:
    """Answers how many tokens the worker's prompt for a request has; raises ProxyError."""
    surface = request.app[SURFACE]
    asked = read_count_request(await read_body(request), surface.seed())
    tenant_salt(request)
    refusal = surface.catalogue.offer(asked.model, request[EXCHANGE].upstream).refusal or asked.refusal
    if refusal is not None:
        raise from_failed(NAMES.failed(refusal))
    if surface.worker is None:
        raise NotFound("this server has no local worker, and only that can count tokens: leave the count out")
    counted = await surface.worker.count(asked.inputs[0])
    if isinstance(counted, api.Failed):
        raise from_failed(NAMES.failed(counted))
    told = TokenCount(input_tokens=counted.usage.prompt_tokens)
    return json_response(told)


@web.middleware
async def in_anthropics_form(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tells errors of the Messages routes in Anthropic's form, those included that no handler saw."""
    response = await handler(request)
    if response.status < 400 or not request.path.startswith(ROUTE) or not isinstance(response, web.Response):
        return response
    if not isinstance(response.body, bytes) or response.content_type != "application/json":
        return response
    told = msgspec.json.decode(response.body, type=ErrorBody).error
    made = error_reply(response.status, told.message, told.code, request[EXCHANGE].id)
    response.body = msgspec.json.encode(made)
    return response


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Puts the request id also where Anthropic's clients look for it, before the headers go out."""
    exchange = request.get(EXCHANGE) if request.path.startswith(ROUTE) else None
    if exchange is not None:
        response.headers["request-id"] = exchange.id
