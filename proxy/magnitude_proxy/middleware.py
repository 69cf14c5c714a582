"""Around every handler: request id, access, limits, errors in OpenAI's form, metrics and one log line."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import msgspec
from aiohttp import web

from magnitude_proxy.access import Key, host_is_local, is_loopback, origin_is_local
from magnitude_proxy.errors import (
    BadRequest,
    BodyTooLarge,
    Forbidden,
    HttpRefused,
    NotFound,
    ProxyError,
    RateLimited,
    RequestTimeout,
    Unauthorized,
    Unavailable,
)
from magnitude_proxy.surface import EXCHANGE, SURFACE, Exchange, Surface
from magnitude_proxy.telemetry import CLIENT_GONE, REQUEST_SECONDS, REQUESTS, SPAN_REQUEST, access_log, proxy_log

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Response = TypeVar("Response", bound=web.StreamResponse)

BODY_S = 60.0
SERVER = "magnitude"
LIVE = "/health/live"
READY = "/health/ready"
# The routes that cost tokens.
ANSWERING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
# What nothing is counted in.
_UNCOUNTED: AbstractContextManager[None] = nullcontext()
ADMIN: web.AppKey[bool] = web.AppKey("admin", bool)
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_UNSAFE = re.compile(r"[^\x21-\x7e]")


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Runs `handler` with the request's `Exchange`; every failure becomes a response in OpenAI's form."""
    surface = request.app[SURFACE]
    exchange = Exchange(id=request_id(request.headers.get("x-request-id")), began=surface.clock(), endpoint="other")
    request[EXCHANGE] = exchange
    try:
        with surface.telemetry.span(SPAN_REQUEST, path=request.path):
            response = await _answered(surface, request, handler)
        exchange.status = response.status
        return response
    except (asyncio.CancelledError, ConnectionError):
        surface.telemetry.count(CLIENT_GONE)
        raise
    finally:
        _record(surface, request, exchange)


async def _answered(surface: Surface, request: web.Request, handler: Handler) -> web.StreamResponse:
    """Returns the handler's response, or the one that tells its failure; a request cut by the stop gets a 503."""
    try:
        _admit(surface, request)
        with surface.drain.entered(), _counted(surface, request):
            return await handler(request)
    except ProxyError as error:
        return error_response(error)
    except web.HTTPException as error:
        return error_response(from_http(error, request))
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not surface.drain.expired or request.transport is None or request[EXCHANGE].sent or task is None:
            raise
        task.uncancel()
        return error_response(_stopping())
    except ConnectionError:
        raise
    except Exception as error:
        proxy_log.error("%s %s failed", request.method, _shown(request.path), exc_info=error)
        if request[EXCHANGE].sent:
            raise ConnectionAbortedError("a response that had begun cannot be completed") from error
        problem = f"the proxy failed on this request; its log has the reason under {request[EXCHANGE].id}"
        return error_response(ProxyError(problem))


def _counted(surface: Surface, request: web.Request) -> AbstractContextManager[None]:
    """Returns what counts a request for an answer against its key's quotas, and raises RateLimited when entered."""
    key = request[EXCHANGE].key
    if key is None or request[EXCHANGE].endpoint not in ANSWERING or request.method != "POST":
        return _UNCOUNTED
    if key.limits.concurrent_requests is None and key.limits.requests_per_minute is None:
        return _UNCOUNTED
    return surface.quotas.entered(key, surface.clock())


def _admit(surface: Surface, request: web.Request) -> None:
    """Fills in the exchange and refuses what may not go on.

    Raises:
        ProxyError: the reason.
    """
    exchange = request[EXCHANGE]
    resource = request.match_info.route.resource
    exchange.endpoint = resource.canonical if resource is not None else "other"
    admin = request.app[ADMIN]
    listen = surface.config.listen
    loopback = is_loopback(listen.admin_host if admin else listen.host)
    if loopback:
        _check_names(request)
    if request.path == LIVE or (admin and (loopback or request.path == READY)):
        return
    key = _known_key(surface, request)
    if key is None:
        raise Unauthorized("the API key is missing or unknown; send it as Authorization: Bearer KEY")
    if admin and not key.admin:
        raise Forbidden(
            "this key does not open the second listener, which tells of all tenants; use one with admin=true in the "
            "key file",
            code="admin_key_required",
        )
    exchange.key = key
    if surface.drain.closing and not exchange.endpoint.startswith("/health"):
        raise _stopping()


def _known_key(surface: Surface, request: web.Request) -> Key | None:
    """Returns what the request's key may do, None for one that is none; raises RateLimited for too many of those."""
    if not surface.keys.required:
        return surface.keys.find(None)
    key = surface.keys.find(_presented_key(request))
    name, address, now = None if key is None else key.id, request.remote or "", surface.clock()
    wait = surface.refusals.wait_s(address, name, now)
    if wait:
        raise RateLimited(
            "too many requests with unknown API keys came from this address; check the key, and wait",
            param="max_refused_per_minute",
            wait_s=math.ceil(wait),
            again=False,
        )
    surface.refusals.count(address, name, now)
    return key


def _stopping() -> Unavailable:
    return Unavailable(
        "the server is stopping; send the request again", code="stopping", headers={"Connection": "close"}
    )


def _check_names(request: web.Request) -> None:
    """Refuses requests that a web page elsewhere made a browser send to this machine (DNS rebinding)."""
    host = request.headers.get("Host")
    if not host_is_local(host):
        raise Forbidden(
            f"Host {_shown(host)!r} is not this machine; a server on loopback answers to localhost and loopback "
            "addresses only, use --host to serve others",
            code="host_not_allowed",
        )
    origin = request.headers.get("Origin")
    if not origin_is_local(origin):
        raise Forbidden(f"Origin {_shown(origin)!r} may not use this server", code="origin_not_allowed")


def _presented_key(request: web.Request) -> str | None:
    """Returns the bearer token, or the `x-api-key` header."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return request.headers.get("x-api-key")


async def read_body(request: web.Request) -> bytes:
    """Returns the request's body.

    Raises:
        BodyTooLarge: it exceeds the configured limit, by its declared or its real length.
        BadRequest: it is compressed.
        RequestTimeout: it did not arrive within `BODY_S`.
    """
    limit = request.app[SURFACE].config.listen.max_body_bytes
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise BadRequest("compressed bodies are not accepted; leave Content-Encoding out", code="unsupported_encoding")
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    try:
        if request.content.is_eof():
            return await request.read()
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise _too_large(limit) from error
    except TimeoutError as error:
        raise RequestTimeout(f"the body did not arrive within {BODY_S:g} s", headers={"Connection": "close"}) from error
    except web.RequestPayloadError as error:
        raise BadRequest("the body ended early or is framed wrongly", headers={"Connection": "close"}) from error


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is larger than {limit} bytes; shorten it or raise --max-body-bytes", headers={"Connection": "close"}
    )


def request_id(given: str | None) -> str:
    """Returns the client's request id when it is fit for headers and logs, else a new one."""
    return given if given and _SANE_ID.fullmatch(given) else f"req_{random.getrandbits(128):032x}"


def error_response(error: ProxyError) -> web.Response:
    """Returns the response for `error`."""
    headers = dict(error.headers)
    close = headers.pop("Connection", None) == "close"
    response = web.Response(
        body=msgspec.json.encode(error.body()),
        status=error.http_status,
        content_type="application/json",
        headers={**headers, "Server": SERVER},
    )
    if close:
        response.force_close()
    return response


def from_http(error: web.HTTPException, request: web.Request) -> ProxyError:
    """Returns aiohttp's own refusal in this product's form."""
    where = f"{request.method} {_shown(request.path)}"
    if error.status == 404:
        return NotFound(f"there is no route {where}")
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        return HttpRefused(f"{where} is not allowed; use {allowed}", status=405, headers={"Allow": allowed})
    return HttpRefused(f"{where}: {error.reason}", status=error.status)


async def name_request(request: web.Request, response: web.StreamResponse) -> None:
    """Puts the request id into every response before its headers go out; the server's software stays unnamed."""
    response.headers["Server"] = SERVER
    exchange = request.get(EXCHANGE)
    if exchange is not None:
        response.headers["x-request-id"] = exchange.id


def _record(surface: Surface, request: web.Request, exchange: Exchange) -> None:
    """Writes the metrics and the log line of a request that has ended."""
    seconds = surface.clock() - exchange.began
    telemetry, endpoint, route = surface.telemetry, exchange.endpoint, exchange.route
    telemetry.count(REQUESTS, endpoint=endpoint, route=route, status=str(exchange.status))
    telemetry.observe(REQUEST_SECONDS, seconds, endpoint=endpoint, route=route)
    access_log.info(
        "%s %s %d %.1fms route=%s id=%s%s",
        request.method,
        _shown(request.path),
        exchange.status,
        seconds * 1000,
        route,
        exchange.id,
        f" key={exchange.key.name}" if exchange.key is not None and exchange.key.name else "",
    )


def _shown(text: str | None) -> str:
    """Returns client text for a message or a log line: printable ASCII, at most 128 characters."""
    return _UNSAFE.sub("?", (text or "")[:128])
