"""Talks to a worker in its own frames."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType

from magnitude_engine import api
from testkit.engine import Recorder


class WorkerClient:
    """One connection; `async with` greets and closes. Status frames are kept apart in `statuses`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.statuses: list[api.Status] = []
        self.welcome: api.Welcome | None = None

    async def __aenter__(self) -> WorkerClient:
        self.reader, self.writer = await asyncio.open_unix_connection(self._path)
        self.frames = api.FrameReader(self.reader)
        self.send(api.Hello())
        event = await self.event()
        assert isinstance(event, api.Welcome)
        self.welcome = event
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.writer.close()

    def send(self, *frames: api.Command) -> None:
        """Writes frames."""
        for frame in frames:
            self.writer.write(api.encode_frame(frame))

    async def event(self) -> api.Event:
        """Returns the next event that is no status."""
        while True:
            event = await asyncio.wait_for(self.frames.event(), 60)
            if not isinstance(event, api.Status):
                return event
            self.statuses.append(event)

    async def status(self) -> api.Status:
        """Returns the next status."""
        while True:
            event = await asyncio.wait_for(self.frames.event(), 60)
            if isinstance(event, api.Status):
                return event

    async def answer(self, *requests: api.Generate) -> list[Recorder]:
        """Sends requests at once and returns what each is answered."""
        self.send(*requests)
        recorders = {r.request: Recorder() for r in requests}
        while not all(r.done for r in recorders.values()):
            event = await self.event()
            assert not isinstance(event, api.Welcome | api.Status)
            recorders[event.request](event)
        return list(recorders.values())

    async def until(self, kind: type[api.Event]) -> api.Event:
        """Returns the next event of a kind."""
        while True:
            event = await self.event()
            if isinstance(event, kind):
                return event

    async def closed(self) -> bool:
        """Waits for the worker to close the connection."""
        try:
            while True:
                await self.event()
        except (asyncio.IncompleteReadError, ConnectionError):
            return True
