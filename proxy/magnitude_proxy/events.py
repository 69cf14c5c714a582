"""`POST /v1/sessions/{id}/events`: what an agent's tools do, told while they do it.

A body of type `application/json` is one event, answered with a `Receipt`. A body of type `application/x-ndjson` (or
`application/jsonl`) is one event a line for as long as the client keeps it open; each reaches the worker at once,
where output is computed ahead while the tool runs. A line that is wrong is answered at once with a `Fault` as a line,
and the stream goes on; after `MAX_FAULTS` of them, a line over `MAX_LINE` bytes, or `SILENCE_S` without a byte it
ends. The last line is the `Receipt`. Blank lines keep a stream alive.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from aiohttp import web

from magnitude_engine import api
from magnitude_proxy import forks
from magnitude_proxy.answer import STALL_S
from magnitude_proxy.chat import tenant_salt
from magnitude_proxy.errors import BadRequest, ProxyError, Unavailable
from magnitude_proxy.identity import MAIN_BRANCH, branch_name
from magnitude_proxy.middleware import read_body
from magnitude_proxy.pruner import marked
from magnitude_proxy.session import SessionRecord
from magnitude_proxy.sessions import found, store_down, unknown_session
from magnitude_proxy.store.connection import StoreDown
from magnitude_proxy.store.memory import NO_SESSION, NO_STEP
from magnitude_proxy.surface import EXCHANGE, SURFACE, Surface, json_response
from magnitude_proxy.telemetry import SESSION_EVENTS
from magnitude_proxy.wire.events import (
    STREAMS,
    BranchFailed,
    Fault,
    Receipt,
    SessionEvent,
    StepFailed,
    ToolFinished,
    ToolOutputDelta,
    ToolStarted,
    read_event,
)

STREAMS_AT_ONCE = 64
MAX_LINE = 4 << 20
MAX_FAULTS = 100
SILENCE_S = 900.0


async def events(request: web.Request) -> web.StreamResponse:
    """Takes one event, or a stream of them; raises ProxyError before anything is sent."""
    surface, salt = request.app[SURFACE], tenant_salt(request)
    feed = Feed(surface, salt, await _known(request), branch_name(request.headers.get("x-magnitude-branch")))
    if request.content_type not in STREAMS:
        await feed.take(read_event(await read_body(request)))
        await feed.flush()
        return json_response(feed.receipt())
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise BadRequest("compressed bodies are not accepted; leave Content-Encoding out", code="unsupported_encoding")
    with surface.turnstile.entered("open event streams", salt, STREAMS_AT_ONCE):
        return await _stream(request, feed)


async def _known(request: web.Request) -> SessionRecord:
    """Returns the session that the path names; with the store away, as this process remembers it."""
    try:
        return await found(request)
    except Unavailable:
        record = request.app[SURFACE].sessions.book.recall(tenant_salt(request), request.match_info["id"])
        if record is None:
            raise
        return record


async def _stream(request: web.Request, feed: Feed) -> web.StreamResponse:
    """Takes events line by line until the client, or a limit, ends the stream."""
    outlet = _Outlet(request)
    number = 0
    try:
        async with aclosing(lines(request.content)) as batches:
            async for batch in batches:
                for line in batch:
                    number += 1
                    if line.strip():
                        await _take(feed, line, number, outlet)
                await feed.flush()
    except _Ended as error:
        await feed.flush()
        await outlet.write(Fault(line=number + 1, error=error.body().error))
        outlet.response.force_close()
    await outlet.write(feed.receipt())
    await outlet.response.write_eof()
    return outlet.response


async def _take(feed: Feed, line: bytes, number: int, outlet: _Outlet) -> None:
    """Takes one line; tells what is wrong with it. Raises _Ended when too many were wrong."""
    try:
        await feed.take(read_event(line))
    except ProxyError as error:
        feed.rejected += 1
        await outlet.write(Fault(line=number, error=error.body().error))
        if feed.rejected >= MAX_FAULTS:
            raise _Ended(f"{MAX_FAULTS} lines were wrong; open another stream with right ones") from error


class _Ended(BadRequest):
    """The stream is not read any further."""


class Source(Protocol):
    """Bytes as they come."""

    async def readany(self) -> bytes:
        """Returns what is there, none at the end."""


async def lines(content: Source) -> AsyncGenerator[list[bytes], None]:
    """Yields the lines that came together, without their ends; the last line needs none.

    Raises:
        _Ended: a line is longer than `MAX_LINE`, nothing came for `SILENCE_S`, or the body is framed wrongly.
    """
    rest = bytearray()
    while True:
        try:
            async with asyncio.timeout(SILENCE_S):
                chunk = await content.readany()
        except TimeoutError as error:
            raise _Ended(f"nothing came for {SILENCE_S:g} s; send a blank line now and then") from error
        except web.RequestPayloadError as error:
            raise _Ended("the body ended early or is framed wrongly") from error
        *whole, last = chunk.split(b"\n")
        if whole:
            whole[0] = bytes(rest) + whole[0]
            rest.clear()
            yield whole
        rest += last
        if len(rest) > MAX_LINE:
            raise _Ended(f"a line is longer than {MAX_LINE} bytes; tell output in pieces")
        if not chunk:
            yield [bytes(rest)]
            return


@dataclass(slots=True)
class Feed:
    """Carries a session's events to where they count; output that is there at once goes as one piece.

    Attributes:
        taken, delivered, rejected: events so far, those of them that a worker got, and those refused.
    """

    surface: Surface
    salt: str
    record: SessionRecord
    branch: str
    taken: int = 0
    delivered: int = 0
    rejected: int = 0
    _waiting: list[api.ToolEvent] = field(default_factory=list)
    _held: int = 0

    async def take(self, event: SessionEvent) -> None:
        """Takes an event in; raises ProxyError where it cannot be carried out."""
        branch = self.branch if event.branch is None else branch_name(event.branch)
        if isinstance(event, StepFailed):
            await self._fail(event)
        elif isinstance(event, BranchFailed):
            await self._bury(branch, event.reason)
        else:
            record = self.surface.sessions.latest(self.record)
            self._put(neutral(event, self.salt, record.session, record.line_of(branch)))
            self._held += 1
        self.taken += 1
        self.surface.telemetry.count(SESSION_EVENTS, type=event.kind)

    async def flush(self) -> None:
        """Sends what was taken in to the worker, no faster than it takes it."""
        waiting, held = self._waiting, self._held
        self._waiting, self._held = [], 0
        worker = self.surface.worker
        if waiting and worker is not None and await worker.tell(*waiting):
            self.delivered += held

    def receipt(self) -> Receipt:
        """Returns the last word."""
        return Receipt(events=self.taken, delivered=self.delivered, rejected=self.rejected)

    def _put(self, event: api.ToolEvent) -> None:
        last = self._waiting[-1] if self._waiting else None
        together = last is not None and (last.kind, event.kind) == ("output", "output")
        if last is not None and together and (last.call, last.branch) == (event.call, event.branch):
            self._waiting[-1] = msgspec.structs.replace(last, text=last.text + event.text)
        else:
            self._waiting.append(event)

    async def _bury(self, branch: str, reason: str) -> None:
        if branch == MAIN_BRANCH:
            raise BadRequest("branch_failed names no branch: say which one came to nothing", param="branch")
        await forks.bury(self.surface, self.salt, self.record, branch, reason)

    async def _fail(self, event: StepFailed) -> None:
        try:
            step = await self.surface.sessions.book.fail(self.record, event.step, event.reason)
        except StoreDown as down:
            raise store_down() from down
        if step == NO_SESSION:
            raise unknown_session()
        if step == NO_STEP:
            raise BadRequest("step is none of the session's last 64 answered steps", param="step")
        marked(self.surface, self.record.session)


def neutral(event: SessionEvent, salt: str, session: str, branch: str) -> api.ToolEvent:
    """Returns a tool's event as the worker knows it."""
    match event:
        case ToolStarted():
            return api.ToolEvent(
                tenant=salt, session=session, branch=branch, kind="started", call=event.call_id, tool=event.tool
            )
        case ToolOutputDelta():
            return api.ToolEvent(
                tenant=salt, session=session, branch=branch, kind="output", call=event.call_id, text=event.text
            )
        case ToolFinished():
            return api.ToolEvent(
                tenant=salt,
                session=session,
                branch=branch,
                kind="finished",
                call=event.call_id,
                tool=event.tool,
                text=event.output,
            )
    raise TypeError(f"{type(event).__name__} is no event of a tool")


class _Outlet:
    """The response of a stream: begun by its first line, each written within `STALL_S`."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(headers={"Content-Type": STREAMS[0], "Cache-Control": "no-cache"})

    async def write(self, line: Fault | Receipt) -> None:
        """Sends a line; raises ConnectionError when the client has left or does not read."""
        if not self.response.prepared:
            self._request[EXCHANGE].sent = True
            await self.response.prepare(self._request)
        try:
            async with asyncio.timeout(STALL_S):
                await self.response.write(msgspec.json.encode(line) + b"\n")
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError(f"the client did not read for {STALL_S:g} s") from error
