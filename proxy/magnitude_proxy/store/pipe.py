"""Commands under way on one connection to Valkey or Redis, and their replies in order."""

from __future__ import annotations

import asyncio
from collections import deque

import hiredis
from redis.exceptions import ResponseError

HELD_S = 0.001


class StoreDown(Exception):
    """The store did not answer, or not with what was asked; the caller goes on without it."""


class Pipe(asyncio.Protocol):
    """The commands under way on one connection.

    A reply is a value, or the exception that says why there is none. The exception is a result, not raised into the
    future: nobody retrieves it when the request was cancelled.
    """

    def __init__(self, transport: asyncio.Transport, address: str) -> None:
        self._transport = transport
        self._broke = f"the connection to {address} broke"
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(replyError=ResponseError)
        self._pending: deque[asyncio.Future[object]] = deque()
        self._unsent: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self.lost = asyncio.Event()
        self.reason = self._broke
        transport.set_protocol(self)

    async def idle(self, seconds: float) -> None:
        """Returns when nothing is outstanding of what was sent so far, at the latest after `seconds`."""
        self._flush()
        if self._pending:
            await asyncio.wait([self._pending[-1]], timeout=seconds)

    @property
    def waiting(self) -> int:
        """How many replies are outstanding."""
        return len(self._pending)

    def send(self, packed: bytes, *, urgent: bool = True) -> asyncio.Future[object]:
        """Sends a command and returns where its reply goes; one that is not urgent goes with the next that is.

        None waits longer than `HELD_S`. Two commands in one write save a system call each way, here and in the store.
        """
        self._unsent.append(packed)
        reply: asyncio.Future[object] = self._loop.create_future()
        self._pending.append(reply)
        if urgent:
            self._flush()
        elif self._timer is None:
            self._timer = self._loop.call_later(HELD_S, self._flush)
        return reply

    def drop(self, problem: str) -> None:
        """Ends the connection; whatever is outstanding gets StoreDown."""
        while self._pending:
            settle(self._pending.popleft(), StoreDown(problem))
        self._unsent.clear()
        self._flush()
        self._transport.abort()
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        """Settles the replies that are whole."""
        try:
            self._reader.feed(data)
            while (value := self._reader.gets()) is not False:
                settle(self._pending.popleft(), value)
        except (hiredis.HiredisError, IndexError) as error:
            self.reason = str(error) or self._broke
            self.drop(self._broke)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if exc is not None:
            self.reason = str(exc) or self._broke
        self.drop(self._broke)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unsent:
            self._transport.write(b"".join(self._unsent))
            self._unsent.clear()


def settle(reply: asyncio.Future[object], value: object) -> None:
    """Gives `reply` its value unless its request was cancelled."""
    if not reply.done():
        reply.set_result(value)
