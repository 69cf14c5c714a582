"""Lets a request for an answer in: the session that it belongs to, on the terms of its key and its client."""

from __future__ import annotations

from aiohttp import web

from magnitude_engine import api
from magnitude_proxy.config import SessionLimits
from magnitude_proxy.limits import HEADER, Terms, lowered, read_limits, repeated
from magnitude_proxy.quota import day_spent
from magnitude_proxy.session import Lease
from magnitude_proxy.surface import EXCHANGE, SURFACE
from magnitude_proxy.wire.intake import Asked


async def admit(request: web.Request, salt: str, asked: Asked) -> Lease:
    """Returns the lease of a request's step.

    Raises:
        BadRequest: the limits that the client names are none.
        SessionLimitExceeded: its session has used up what it may.
        RateLimited: its key has used up the day's tokens.
    """
    surface, key = request.app[SURFACE], request[EXCHANGE].key
    client = read_limits(request.headers.get(HEADER))
    if key is not None and key.limits.tokens_per_day is not None:
        now = surface.now()
        day_spent(await surface.sessions.spending.today(key.id, now), key.limits.tokens_per_day, now)
    given = asked.inputs[0]
    messages = given.messages if isinstance(given, api.ChatInput) else ()
    terms = Terms(
        server=SessionLimits() if key is None else key.limits,
        client=client if asked.limits is None else lowered(client, asked.limits),
        repeats=repeated(messages),
    )
    return await surface.sessions.enter(salt, request.headers, asked.hints, terms)
