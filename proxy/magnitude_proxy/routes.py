"""The table of routes: what each listener serves, and what each route takes and gives."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, get_args

import msgspec
from aiohttp import web

from magnitude_engine import api
from magnitude_proxy import anthropic, branches, events, feedback, health, limits, misses, responses, sessions, tools
from magnitude_proxy.access import is_loopback
from magnitude_proxy.chat import chat
from magnitude_proxy.completions import completions
from magnitude_proxy.dialect import messages_replies, messages_wire, responses_replies, responses_wire
from magnitude_proxy.errors import ErrorBody
from magnitude_proxy.middleware import ADMIN, LIVE, READY
from magnitude_proxy.openapi.document import document
from magnitude_proxy.openapi.route import Done, Parameter, Route, json, lines, streamed
from magnitude_proxy.pruning.plan import Word
from magnitude_proxy.surface import SURFACE
from magnitude_proxy.wire import replies, requests
from magnitude_proxy.wire.events import KINDS, Fault, Receipt

_ANSWERED = (
    "x-magnitude-session",
    "x-magnitude-route",
    "x-magnitude-fallback-reason",
    "x-magnitude-cache-miss",
    "x-magnitude-canonical",
    "x-magnitude-degraded",
    "x-magnitude-session-advice",
    "x-magnitude-ignored",
    "x-magnitude-limits",
)
_TEXT = {"type": "string"}
_WORDS = "|".join(get_args(Word))
_REQUEST_ID = Parameter("x-request-id", "header", _TEXT, "A name for the request, fit for headers and logs.")
_BRANCH = Parameter("x-magnitude-branch", "header", _TEXT, "The branch of the session; without one the main branch.")
_IDENTITY = (
    _REQUEST_ID,
    Parameter("x-magnitude-session", "header", _TEXT, "The client's own id of its session."),
    _BRANCH,
    Parameter("x-magnitude-parent", "header", _TEXT, "The session that this one was started by."),
    Parameter(
        limits.HEADER,
        "header",
        _TEXT,
        "Limits of the session, lower than the server's: `iterations=50, tokens=100000, seconds=600, repeats=3`.",
    ),
)
_PRUNE = Parameter(
    "x-magnitude-prune",
    "header",
    {"type": "string", "pattern": f"^\\s*({_WORDS})?(\\s*,\\s*({_WORDS})?)*\\s*$"},
    "What the prompt may lose. It changes what the model sees.",
)
_CHAT = (*_IDENTITY, _PRUNE)
_CHAT_ANSWERED = (*_ANSWERED, "x-magnitude-pruned-tokens")
_PAGE = (
    Parameter(
        "limit",
        "query",
        {"type": "integer", "minimum": 1, "maximum": sessions.MAX_PAGE, "default": sessions.PAGE},
        "How many to list at most.",
    ),
    Parameter("after", "query", _TEXT, "The `last_id` of the page before."),
)
_WHOLE = (Parameter("stream", "query", {"enum": ["false"]}, "A kept response is told as a whole."),)
_EVENTS = tuple(KINDS.values())


async def openapi(request: web.Request) -> web.Response:
    """This document."""
    surface, admin = request.app[SURFACE], request.app[ADMIN]
    keys = surface.keys.required and not (admin and is_loopback(surface.config.listen.admin_host))
    return web.Response(body=_encoded(admin, keys), content_type="application/json")


@functools.cache
def _encoded(admin: bool, keys: bool) -> bytes:
    """Returns the document of a listener."""
    return msgspec.json.encode(document(ADMIN_ROUTES if admin else PUBLIC_ROUTES, health.product_version(), keys=keys))


_READY = Route("GET", READY, health.ready, gives=json(health.Ready), unwell=health.Ready)
_BOTH = (
    Route("GET", "/openapi.json", openapi, gives=json(dict[str, Any])),
    Route("GET", LIVE, health.live, gives=json(health.Live), open=True),
)

PUBLIC_ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat,
        takes=json(requests.ChatRequest),
        gives=json(replies.ChatReply) | streamed(replies.ChatChunk, ErrorBody, Done),
        parameters=_CHAT,
        headers=_CHAT_ANSWERED,
        upstreams=True,
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        takes=json(requests.CompletionRequest),
        gives=json(replies.TextReply) | streamed(replies.TextReply, ErrorBody, Done),
        parameters=_IDENTITY,
        headers=_ANSWERED,
        upstreams=True,
    ),
    Route(
        "POST",
        "/v1/responses",
        responses.create,
        takes=json(responses_wire.ResponsesRequest),
        gives=json(responses_replies.ResponseReply) | streamed(*responses_replies.EVENTS),
        parameters=_CHAT,
        headers=_CHAT_ANSWERED,
        upstreams=True,
    ),
    Route(
        "GET",
        "/v1/responses/{id}",
        responses.show,
        gives=json(responses_replies.ResponseReply),
        parameters=_WHOLE,
        refuses=(404,),
    ),
    Route("DELETE", "/v1/responses/{id}", responses.delete, gives=json(responses_replies.Deleted), refuses=(404,)),
    Route("POST", "/v1/responses/{id}/cancel", responses.cancel, gives={}, refuses=(404,)),
    Route(
        "POST",
        "/v1/messages",
        anthropic.messages,
        takes=json(messages_wire.MessagesRequest),
        gives=json(messages_replies.WholeMessage) | streamed(messages_replies.Event),
        parameters=_CHAT,
        headers=(*_CHAT_ANSWERED, "request-id"),
        error=messages_replies.ErrorReply,
        upstreams=True,
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        anthropic.count_tokens,
        takes=json(messages_wire.CountRequest),
        gives=json(anthropic.TokenCount),
        headers=("request-id",),
        error=messages_replies.ErrorReply,
        refuses=(404, 429),
    ),
    Route(
        "POST",
        "/v1/tools",
        tools.tools,
        takes=json(tools.ToolsRequest),
        gives=json(tools.ToolsReply),
        refuses=(404, 429),
    ),
    Route(
        "POST",
        "/v1/feedback",
        feedback.feedback,
        takes=json(feedback.FeedbackRequest),
        gives=json(feedback.FeedbackReply),
    ),
    Route("GET", "/v1/sessions", sessions.listed, gives=json(sessions.SessionsReply), parameters=_PAGE),
    Route("GET", "/v1/sessions/{id}", sessions.shown, gives=json(sessions.SessionReport), refuses=(404,)),
    Route("DELETE", "/v1/sessions/{id}", sessions.deleted, gives=json(sessions.DeletedReply), refuses=(404,)),
    Route("GET", "/v1/sessions/{id}/cache", misses.cache, gives=json(misses.CacheReply), refuses=(404,)),
    Route(
        "POST",
        "/v1/sessions/{id}/events",
        events.events,
        takes=json(*_EVENTS) | lines(*_EVENTS),
        gives=json(Receipt) | lines(Fault, Receipt),
        parameters=(_REQUEST_ID, _BRANCH),
        refuses=(404, 429),
    ),
    Route(
        "POST",
        "/v1/sessions/{id}/branches",
        branches.fork,
        takes=json(branches.ForkRequest),
        gives=json(branches.BranchesReply),
        refuses=(404, 409, 429),
    ),
    Route("GET", "/v1/sessions/{id}/branches", branches.listed, gives=json(branches.BranchesReply), refuses=(404,)),
    Route(
        "POST",
        "/v1/sessions/{id}/branches/{branch}/score",
        branches.score,
        takes=json(branches.ScoreRequest),
        gives=json(branches.BranchReply),
        refuses=(404, 409),
    ),
    Route(
        "POST",
        "/v1/sessions/{id}/branches/{branch}/prune",
        branches.prune,
        takes=json(branches.PruneRequest),
        optional=True,
        gives=json(branches.BranchesReply),
        refuses=(404,),
    ),
    Route(
        "POST",
        "/v1/sessions/{id}/branches/{branch}/select",
        branches.select,
        gives=json(branches.BranchReply),
        refuses=(404, 409),
    ),
    Route("GET", "/v1/models", health.models, gives=json(replies.ModelsReply)),
    Route("GET", "/v1/models/{name:.+}", health.model, gives=json(replies.ModelReply), refuses=(404,)),
    Route("GET", "/health", health.health, gives=json(health.Health), unwell=health.Health),
    _READY,
    *_BOTH,
)

ADMIN_ROUTES: tuple[Route, ...] = (
    Route("GET", "/metrics", health.metrics, gives={"text/plain": ()}),
    Route("GET", "/cache", health.cache, gives=json(api.CacheReport), refuses=(404,)),
    replace(_READY, open=True),
    *_BOTH,
)
