"""Sends the events of one answer to the client: as one JSON body, or as a stream of server-sent events.

A stream's headers wait for the first content, so that a failure before it is a proper HTTP status and the route in
the headers is the one that answers; after `hold_headers_s` they go out all the same. From then on a failure is one
`data: {"error": …}` event and the stream ends without `[DONE]`. The commit of a complete answer goes to the store
before its end goes to the client, whose next step therefore finds it; nobody waits for the store's reply. A client
that leaves, or does not read for `STALL_S`, cancels the work behind its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

from aiohttp import web

from magnitude_engine import api
from magnitude_proxy.dialect.form import OUTCOME, OUTPUT, Dialect, Events, Item, Script, Tally
from magnitude_proxy.dialect.openai import OpenAI
from magnitude_proxy.errors import ProxyError, Unavailable, from_failed
from magnitude_proxy.identity import MAIN_BRANCH
from magnitude_proxy.limits import HEADER, shown
from magnitude_proxy.pruner import answered
from magnitude_proxy.session import Lease, StepOutcome
from magnitude_proxy.surface import Exchange, Surface
from magnitude_proxy.telemetry import (
    CACHE_MISSES,
    CACHED_TOKENS,
    COMPLETION_TOKENS,
    FIRST_TOKEN_SECONDS,
    PROMPT_TOKENS,
    WASTED_TOKENS,
    proxy_log,
)
from magnitude_proxy.wire.intake import Asked
from magnitude_proxy.wire.render import Head

EVENTS_AHEAD = 64
STALL_S = 30.0
LAST_WORD_S = 1.0
# Bytes that asyncio takes for a connection without making its writer wait, whatever happened before.
UNREAD = 16 * 1024
LOCAL = "local"


class Answer:
    """One answer on its way to one client."""

    def __init__(
        self,
        surface: Surface,
        exchange: Exchange,
        asked: Asked,
        lease: Lease,
        answer_id: str,
        dialect: Dialect | None = None,
    ) -> None:
        """Without a `dialect` the answer is written as the endpoint of `asked` has it."""
        self._dialect = dialect or OpenAI(asked.kind)
        self._surface = surface
        self._exchange = exchange
        self._asked = asked
        self._lease = lease
        self._id = answer_id
        self._tally = Tally()
        self._script: Script | None = None
        self._committed = False

    async def send(self, request: web.Request, events: Events) -> web.StreamResponse:
        """Sends the answer in the form that the client asked for; closes `events` in any case.

        Raises:
            ProxyError: it failed before anything was sent.
        """
        try:
            if self._asked.stream:
                response: web.StreamResponse = await self._stream(request, events)
            else:
                response = await self._whole(events)
            await self._part()
            return response
        except ProxyError as error:
            error.headers.update(self._headers())
            raise
        finally:
            self._exchange.route = self._tally.label or "none"
            # The client left: its session does not wait for this step any more.
            if not self._committed:
                self._commit(ok=False)

    async def _part(self) -> None:
        """Tells the worker that nothing more comes of the session, where the client said so."""
        identity, worker, tenant = self._lease.identity, self._surface.worker, self._exchange.tenant
        if identity.final and worker is not None and tenant is not None:
            branch = None if identity.branch == MAIN_BRANCH else identity.branch
            await worker.tell(api.EndSession(tenant=tenant.salt, session=identity.session, branch=branch))

    async def _whole(self, events: Events) -> web.Response:
        body = self._dialect.body()
        async with aclosing(events):
            async for item in events:
                self._see(item)
                if isinstance(item, OUTPUT):
                    body.add(item)
                elif isinstance(item, api.Failed):
                    self._commit(ok=False)
                    raise from_failed(item)
        encoded = body.encode(self._head(), self._tally.usage)
        self._commit(ok=True)
        return web.Response(body=encoded, content_type="application/json", headers=self._headers())

    async def _stream(self, request: web.Request, events: Events) -> web.StreamResponse:
        """Relays events to the client while a pump reads them ahead, at most `EVENTS_AHEAD`."""
        queue: asyncio.Queue[Item] = asyncio.Queue(EVENTS_AHEAD)
        reader = asyncio.create_task(pump(events, queue.put))
        outlet = Outlet(request, self._exchange)
        try:
            await self._relay(queue, outlet)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not (self._surface.drain.expired and outlet.open and request.transport is not None):
                raise
            task.uncancel()
            stopping = Unavailable("the server is stopping; send the request again", code="stopping")
            if self._script is not None:
                await outlet.write(self._script.broken(stopping), LAST_WORD_S)
        finally:
            reader.cancel()
            await asyncio.wait({reader})
        await outlet.end()
        return outlet.response

    async def _relay(self, queue: asyncio.Queue[Item], outlet: Outlet) -> None:
        """Writes what comes until the answer's end has been written."""
        clock, limits = self._surface.clock, self._surface.config.deadlines
        due = clock() + limits.hold_headers_s
        while True:
            batch = await _batch(queue, due - clock())
            for item in batch:
                self._see(item)
            last = batch[-1] if batch else None
            late = clock() >= due
            if self._script is None:
                if isinstance(last, api.Failed):
                    self._commit(ok=False)
                    raise from_failed(last)
                if not (late or self._tally.content or isinstance(last, api.Completed)):
                    continue
                self._script = self._dialect.script(self._head(), self._tally)
                await outlet.begin(self._headers())
            frames = self._script.frames(batch)
            if isinstance(last, OUTCOME):
                self._commit(ok=isinstance(last, api.Completed))
                await outlet.write(frames + self._script.ending(last), STALL_S)
                return
            if frames or late:
                await outlet.write(frames or self._dialect.keepalive, STALL_S)
                due = clock() + limits.keepalive_s

    @property
    def _bounded(self) -> bool:
        """Whether tokens count against a limit."""
        key = self._exchange.key
        return self._lease.limits.max_tokens is not None or (key is not None and key.limits.tokens_per_day is not None)

    def _see(self, item: Item) -> None:
        before = self._tally.content
        self._tally.see(item)
        if self._tally.content and not before:
            seconds = self._surface.clock() - self._exchange.began
            self._surface.telemetry.observe(FIRST_TOKEN_SECONDS, seconds, route=self._tally.label)

    def _head(self) -> Head:
        asked = self._asked
        return Head(
            id=self._id,
            created=int(self._surface.now()),
            model=self._surface.catalogue.shown(asked.model, self._tally.label == LOCAL),
            include_usage=asked.include_usage,
            predicted=asked.predicted,
        )

    def _headers(self) -> dict[str, str]:
        tally = self._tally
        headers = {"x-magnitude-session": self._lease.identity.session}
        if tally.label:
            headers["x-magnitude-route"] = tally.label
        if tally.miss is not None:
            headers["x-magnitude-cache-miss"] = f"{tally.miss.cause}; at={tally.miss.at}; wasted={tally.miss.wasted}"
        if tally.reason is not None:
            headers["x-magnitude-fallback-reason"] = tally.reason
        if self._asked.pruned is not None:
            headers["x-magnitude-pruned-tokens"] = str(self._asked.pruned.saved(tally.label))
        limits = shown(self._lease.limits, self._lease.use)
        if limits:
            headers[HEADER] = limits
        if self._asked.canonical:
            headers["x-magnitude-canonical"] = "tools"
        if self._lease.degraded:
            headers["x-magnitude-degraded"] = "store"
        if self._lease.identity.advice is not None:
            headers["x-magnitude-session-advice"] = self._lease.identity.advice
        ignored = self._dialect.dropped
        if tally.label == LOCAL:
            ignored += self._asked.ignored
        if ignored:
            headers["x-magnitude-ignored"] = ", ".join(ignored)
        return headers

    def _commit(self, *, ok: bool) -> None:
        """Records the step in its session and the tokens in the metrics."""
        self._committed = True
        tally, telemetry, pruned = self._tally, self._surface.telemetry, self._asked.pruned
        usage = tally.usage
        if self._bounded and not ok:
            # Tokens that are limited count also where the client left before it was told of them.
            usage = api.Usage(prompt_tokens=tally.read, completion_tokens=tally.written)
        route = tally.label or "none"
        telemetry.count(PROMPT_TOKENS, usage.prompt_tokens, route=route)
        telemetry.count(CACHED_TOKENS, usage.cached_tokens, route=route)
        telemetry.count(COMPLETION_TOKENS, usage.completion_tokens, route=route)
        if tally.miss is not None:
            telemetry.count(CACHE_MISSES, cause=tally.miss.cause)
            telemetry.count(WASTED_TOKENS, tally.miss.wasted, cause=tally.miss.cause)
        telemetry.explain(_speculation(usage))
        outcome = StepOutcome(
            route=route,
            finish_reason=tally.finish,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            tool_call=tally.tool_call,
            ok=ok,
            tracked=self._asked.tracked,
            aside=self._lease.identity.aside,
            anchors=() if pruned is None else pruned.said.anchors,
            place=-1 if pruned is None else len(pruned.scene.lines),
        )
        self._surface.sessions.commit(self._lease, outcome, self._ended)
        if pruned is not None and ok:
            answered(self._surface, self._lease, pruned, route)
        key = self._exchange.key
        if key is not None and key.limits.tokens_per_day is not None:
            spent = usage.prompt_tokens + usage.completion_tokens
            self._surface.sessions.spending.add(key.id, spent, self._surface.now())

    def _ended(self) -> None:
        """The branch was pruned while it answered, perhaps by another proxy: its worker may not know that."""
        surface, tenant, identity = self._surface, self._exchange.tenant, self._lease.identity
        if surface.worker is not None and tenant is not None:
            end = api.EndSession(tenant=tenant.salt, session=identity.session, branch=identity.branch, pruned=True)
            surface.worker.post(end)


def _speculation(usage: api.Usage) -> dict[str, int]:
    """Returns who drafted how much, how much of it was right, and in how many steps was decided what, for a trace."""
    told = {f"speculation.decided.{reason}": steps for reason, steps in usage.draft_decisions.items()}
    for use in usage.speculation:
        told[f"speculation.{use.name}.drafted"] = use.drafted
        told[f"speculation.{use.name}.accepted"] = use.accepted
    return told


class Outlet:
    """The response of a stream: headers late, writes bounded in time."""

    def __init__(self, request: web.Request, exchange: Exchange) -> None:
        self._request = request
        self._exchange = exchange
        self.response = web.StreamResponse()

    @property
    def open(self) -> bool:
        """True once the headers are out."""
        return self._exchange.sent

    async def begin(self, headers: dict[str, str]) -> None:
        """Sends the headers."""
        self.response.headers.update(headers)
        self.response.headers["Content-Type"] = "text/event-stream; charset=utf-8"
        self.response.headers["Cache-Control"] = "no-cache"
        self.response.headers["X-Accel-Buffering"] = "no"
        self._exchange.sent = True
        await self.response.prepare(self._request)

    async def write(self, data: bytes, seconds: float) -> None:
        """Sends `data`; raises ConnectionError when the client has left or does not read for `seconds`."""
        transport = self._request.transport
        if transport is not None and transport.get_write_buffer_size() + len(data) < UNREAD:
            # It cannot come to a wait, so no timer is armed.
            await self.response.write(data)
            return
        try:
            async with asyncio.timeout(seconds):
                await self.response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionAbortedError(f"the client did not read for {seconds:g} s") from error

    async def end(self) -> None:
        """Ends the stream."""
        await self.response.write_eof()


async def pump(events: Events, put: Callable[[Item], Awaitable[None]]) -> None:
    """Hands events on, whatever happens with an outcome last; cancelling it cancels the work behind."""
    over = False
    try:
        async with aclosing(events):
            async for item in events:
                over = isinstance(item, OUTCOME)
                await put(item)
    except Exception as error:  # noqa: BLE001 - the edge of a task: its reader must learn of the end
        proxy_log.error("an answer failed inside the proxy", exc_info=error)
    if not over:
        message = "the answer ended without an outcome"
        await put(api.Failed(request="", epoch=0, code="internal_error", message=message))


async def _batch(queue: asyncio.Queue[Item], seconds: float) -> list[Item]:
    """Returns all events that are there, waiting at most `seconds` for one; none when the time is up."""
    batch: list[Item] = []
    if queue.empty():
        try:
            async with asyncio.timeout(seconds):
                batch.append(await queue.get())
        except TimeoutError:
            return batch
    while not queue.empty():
        batch.append(queue.get_nowait())
    return batch
