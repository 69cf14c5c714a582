"""One question to an engine in this process, from its submission to its result."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from magnitude_engine import api
from magnitude_engine.client.answers import GenerateResult, StreamItem
from magnitude_engine.client.requests import Ask
from magnitude_engine.errors import EngineError, MagnitudeError
from magnitude_engine.inprocess.local import EventCollector, to_generate

if TYPE_CHECKING:
    from magnitude_engine.engine import Engine

ENDS = (api.Completed, api.Failed)
MAIN = "main"

Watch = Callable[["Asked"], AbstractContextManager[None]]


def _unwatched(asked: Asked) -> AbstractContextManager[None]:
    return contextlib.nullcontext()


class Asked:
    """One question, in the engine's terms; made before the engine is loaded, so that a wrong one costs nothing.

    Args:
        branch: the line of the session that it belongs to.
        watch: entered while the question is open; an error that it raises on entry is the question's.
    """

    def __init__(self, ask: Ask, branch: str = MAIN, watch: Watch = _unwatched) -> None:
        request = f"req_{uuid.uuid4().hex}"
        session = ask.session_id or f"session_{uuid.uuid4().hex}"
        self._generate = to_generate(ask, request, session, branch, secrets.randbits(63))
        self._collector = EventCollector(ask, request, session)
        self._watch = watch
        self._deliver: Callable[[api.AnswerEvent], None] = lambda event: None

    def items(self, engine: Engine) -> Iterator[StreamItem]:
        """Asks, and yields the answer; closing the iterator cancels the request."""
        events: queue.SimpleQueue[api.AnswerEvent] = queue.SimpleQueue()
        ended = False
        self._deliver = events.put
        with self._watch(self):
            try:
                engine.submit(self._generate, events.put)
                while not ended:
                    event = events.get()
                    ended = isinstance(event, ENDS)
                    item = self._collector.add(event)
                    if item is not None:
                        yield item
            finally:
                self._cancel(engine)

    async def aitems(self, engine: Engine) -> AsyncIterator[StreamItem]:
        """The same for an event loop, which it never blocks."""
        events: asyncio.Queue[api.AnswerEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        ended = False

        def deliver(event: api.AnswerEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        self._deliver = deliver
        with self._watch(self):
            try:
                await asyncio.to_thread(engine.submit, self._generate, deliver)
                while not ended:
                    event = await events.get()
                    ended = isinstance(event, ENDS)
                    item = self._collector.add(event)
                    if item is not None:
                        yield item
            finally:
                self._cancel(engine)

    def stop(self, engine: Engine, reason: MagnitudeError) -> None:
        """Stops the answer, from any thread; whoever reads it gets `reason` as its end."""
        self._cancel(engine)
        generate = self._generate
        ended = api.Failed(request=generate.request, epoch=generate.epoch, code=reason.code, message=reason.message)
        # The event loop of the reader may be closed by now; then nobody reads.
        with contextlib.suppress(RuntimeError):
            self._deliver(ended)

    def _cancel(self, engine: Engine) -> None:
        """Frees the engine of the question; nothing where it is answered."""
        engine.cancel(self._generate.request, self._generate.epoch)


def last(items: Iterator[StreamItem]) -> GenerateResult:
    """Reads `items` to their end and returns the result there."""
    result = None
    for item in items:
        result = item["result"]
    if result is None:
        raise EngineError("the engine ended the answer without a result")
    return result


async def alast(items: AsyncIterator[StreamItem]) -> GenerateResult:
    """Reads `items` to their end and returns the result there."""
    result = None
    async for item in items:
        result = item["result"]
    if result is None:
        raise EngineError("the engine ended the answer without a result")
    return result
