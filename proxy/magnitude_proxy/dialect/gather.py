"""What an answer's events say, gathered while they pass to whoever writes them to the client."""

from __future__ import annotations

from contextlib import aclosing

from magnitude_engine import api
from magnitude_proxy.dialect.form import Events, Item
from magnitude_proxy.dialect.parts import Interleaved, Parts
from magnitude_proxy.dialect.translate import Names
from magnitude_proxy.routing.route import Taken


class Gathering:
    """Gathers one answer; the base of both dialects.

    Attributes:
        parts: its parts so far.
        label: the route that answers.
        started: what the worker said of the prompt; None before, and of an upstream.
        finished: how it ended; None before.
        thoughts: whether the client reads what an upstream's model thought.
    """

    def __init__(self, names: Names, thoughts: bool = True) -> None:
        self._names = names
        self.thoughts = thoughts
        self.parts = Parts(thoughts)
        self.label = ""
        self.started: api.Started | None = None
        self.finished: api.Finished | None = None

    async def passing(self, events: Events) -> Events:
        """Yields `events`, failures in the dialect's names; one that cannot be written in it is a failure, too."""
        async with aclosing(events):
            async for item in events:
                passed = self._noted(item)
                if isinstance(passed, api.Completed):
                    await self.completed(passed.usage)
                yield passed
                if isinstance(passed, api.Completed | api.Failed):
                    return

    async def completed(self, usage: api.Usage) -> None:
        """Called once all parts are there, before the answer's end goes on."""

    def _noted(self, item: Item) -> Item:
        """Takes an event and returns what goes on in its place."""
        match item:
            case Taken():
                self.label = item.label
            case api.Started():
                self.started = item
            case api.Delta():
                try:
                    for _ in self.parts.add(item):
                        pass
                except Interleaved as error:
                    return _broken(item, f"the answer cannot be told in order: {error}")
            case api.Finished():
                self.finished = item
                for _ in self.parts.close():
                    pass
            case api.Completed() if self.finished is None:
                return _broken(item, "the answer broke off: it has no end; try again")
            case api.Failed():
                return self._names.failed(item)
        return item


def _broken(event: api.Delta | api.Completed, message: str) -> api.Failed:
    return api.Failed(request=event.request, epoch=event.epoch, code="stream_broken", message=message)
