"""One pipelined connection to Valkey or Redis that no request can corrupt and no request waits for.

Requests put commands into a queue; one task writes whatever waits in it and reads the replies in order:

    request ─┐                          ┌─► batch written ─► replies read, one per command, in order
    request ─┼─► queue ─► pump (a task) ┤
    request ─┘                          └─► on any failure: drop the connection, answer all "down", knock again

Only the pump touches the socket, so that a cancelled request leaves its reply to the pump, which drops it: no reply
can reach another request (the class of CVE-2023-28858). While the store is down `call` fails at once; a knock loads
the function library again, which a restarted or replaced server may not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import hiredis
from redis.asyncio import Connection
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from magnitude_engine.errors import ConfigError
from magnitude_proxy.telemetry import store_log

CONNECT_S = 1.0
KNOCK_S = 1.0
EXCHANGE_S = 1.0
MAX_WAITING = 10_000
MAX_BATCH = 256
STEADY_S = 10.0
LATE_S = 0.002
MIN_EXTRA_S = 0.01

Command = tuple[str | int | float, ...]


class StoreDown(Exception):
    """The store did not answer, or not with what was asked; the caller goes on without it."""


class _Pending(NamedTuple):
    """A packed command and where its reply goes: a value, or the exception that says why there is none.

    The exception is a result, not raised into the future: nobody retrieves it when the request was cancelled.
    """

    packed: bytes
    reply: asyncio.Future[object]


class StoreConnection:
    """Runs commands of one store; `start` and `close` belong to the owner."""

    def __init__(self, url: str, timeout_s: float, *, library: str | None = None, knock_s: float = KNOCK_S) -> None:
        """Nothing is connected yet.

        Args:
            url: redis://, rediss:// or unix:// URL.
            timeout_s: no `call` takes longer, save while this event loop itself stands still.
            library: source of a function library to load on connecting and when the store lost it.
            knock_s: most seconds between two attempts to reach a store that is down.

        Raises:
            ConfigError: `url` has another scheme or a part that cannot be used.
        """
        self._url = url
        self._address = _address(url)
        self._timeout_s = timeout_s
        self._library = library
        self._knock_s = knock_s
        self._queue: deque[_Pending] = deque()
        self._wake = asyncio.Event()
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._up = False
        self.problem: str | None = f"{self._address} is not connected yet"
        _connection(url)

    @property
    def up(self) -> bool:
        """True while commands are sent; False from a failure until a knock is answered."""
        return self._up

    async def start(self) -> None:
        """Returns after the first attempt to connect, whether it succeeded or not."""
        self._task = asyncio.create_task(self._keep_connected(), name="magnitude-store")
        await self._tried.wait()

    async def close(self) -> None:
        """Drops the connection; waiting calls get StoreDown."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._up = False
        self.problem = f"the connection to {self._address} is closed"
        self._refuse_waiting(self.problem)

    async def call(self, *command: str | int | float) -> object:
        """Returns the reply to one command.

        Raises:
            StoreDown: no reply within `timeout_s`, an error reply, or the store is known to be down (at once).
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        value = await self._answer(self._push(command), deadline)
        if self._library is not None and _lacks_function(value):
            self._push(("FUNCTION", "LOAD", "REPLACE", self._library))
            value = await self._answer(self._push(command), deadline)
        if isinstance(value, ResponseError):
            self._down(f"{self._address} refused a command: {_reason(value)}")
        if isinstance(value, Exception):
            raise StoreDown(str(value)) from value
        return value

    def tell(self, *command: str | int | float) -> None:
        """Sends a command whose reply nobody needs, or drops it while the store is down."""
        with contextlib.suppress(StoreDown):
            self._push(command)

    def _push(self, command: Command) -> asyncio.Future[object]:
        """Puts a command into the queue; raises StoreDown when the store is down or hopelessly behind."""
        if not self._up:
            raise StoreDown(self.problem)
        if len(self._queue) >= MAX_WAITING:
            raise StoreDown(f"{self._address} has {MAX_WAITING} commands waiting")
        reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._queue.append(_Pending(hiredis.pack_command(command), reply))  # type: ignore[arg-type]  # stub says 1-tuple
        self._wake.set()
        return reply

    async def _answer(self, reply: asyncio.Future[object], deadline: float) -> object:
        """Returns what the pump put into `reply`; a deadline that passes takes the store down."""
        loop = asyncio.get_running_loop()
        timer = loop.call_at(deadline, self._overdue, reply, deadline)
        try:
            return await reply
        finally:
            timer.cancel()

    def _overdue(self, reply: asyncio.Future[object], due: float, *, patient: bool = True) -> None:
        """Takes the store down for a reply that is not there at `due`.

        When this runs late the loop itself stood still, and the store gets that time back, once: its reply may lie
        in the socket already, or the command was never sent.
        """
        if reply.done():
            return
        loop = asyncio.get_running_loop()
        late = loop.time() - due
        if patient and late > LATE_S:
            extra = min(max(late, MIN_EXTRA_S), self._timeout_s)
            loop.call_later(extra, functools.partial(self._overdue, reply, due, patient=False))
            return
        problem = f"{self._address} did not answer within {self._timeout_s:g} s"
        self._down(problem)
        reply.set_result(StoreDown(problem))

    def _down(self, problem: str) -> None:
        """Stops sending; the pump drops the connection as soon as its present exchange ends."""
        if self._up:
            store_log.warning("session store lost: %s", problem)
        self._up = False
        self.problem = problem
        self._wake.set()
        self._refuse_waiting(problem)

    def _refuse_waiting(self, problem: str) -> None:
        while self._queue:
            _settle(self._queue.popleft(), StoreDown(problem))

    async def _keep_connected(self) -> None:
        """Connects, pumps until the connection is lost, knocks again; ends only by cancellation."""
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            began = loop.time()
            connection = _connection(self._url)
            try:
                await self._prepare(connection)
                self._up = True
                self.problem = None
                self._tried.set()
                store_log.info("session store connected: %s", self._address)
                while self._up:
                    await self._wake.wait()
                    self._wake.clear()
                    while self._up and self._queue:
                        await self._exchange(connection)
            except (RedisError, hiredis.HiredisError, OSError) as error:
                self._down(f"{self._address}: {_reason(error)}")
            finally:
                self._tried.set()
                await connection.disconnect(nowait=True)
            pause = next_pause(pause, loop.time() - began, self._knock_s)
            await asyncio.sleep(pause)

    async def _prepare(self, connection: AbstractConnection) -> None:
        """Connects, authenticates, loads the function library; raises RedisError or OSError, also for a slow store."""
        async with asyncio.timeout(CONNECT_S):
            await connection.connect()  # type: ignore[no-untyped-call]
            if self._library is not None:
                await connection.send_command("FUNCTION", "LOAD", "REPLACE", self._library)
                await connection.read_response()
        # A store that cannot answer this in time would hold up a request at every knock.
        async with asyncio.timeout(self._timeout_s):
            await connection.send_command("PING")
            await connection.read_response()

    async def _exchange(self, connection: AbstractConnection) -> None:
        """Sends what waits and settles each reply; raises what redis-py or hiredis do when the connection broke."""
        batch = [self._queue.popleft() for _ in range(min(len(self._queue), MAX_BATCH))]
        answered = 0
        try:
            async with asyncio.timeout(EXCHANGE_S):
                await connection.send_packed_command([p.packed for p in batch], check_health=False)
                for pending in batch:
                    _settle(pending, await _read(connection))
                    answered += 1
        finally:
            for pending in batch[answered:]:
                _settle(pending, StoreDown(f"the connection to {self._address} broke"))


def next_pause(last_s: float, lasted_s: float, most_s: float) -> float:
    """Returns how long to leave a lost store alone: briefly for a hiccup, `most_s` when it keeps failing.

    Args:
        last_s: the pause before this connection, 0 for the first.
        lasted_s: how long the connection lasted.
    """
    if last_s == 0 or lasted_s >= STEADY_S:
        return most_s / 8
    return min(last_s * 2, most_s)


async def _read(connection: AbstractConnection) -> object:
    """Returns the next reply; an error reply is a value, since the connection is in order after it."""
    try:
        reply: object = await connection.read_response()
    except ResponseError as error:
        return error
    return reply


def _settle(pending: _Pending, value: object) -> None:
    if not pending.reply.done():
        pending.reply.set_result(value)


def _connection(url: str) -> AbstractConnection:
    """Returns an unconnected connection without timeouts or retries of its own; raises ConfigError."""
    try:
        settings: dict[str, Any] = {**parse_url(url)}
        kind = settings.pop("connection_class", Connection)
        settings |= {"socket_timeout": None, "socket_connect_timeout": CONNECT_S, "retry": Retry(NoBackoff(), 0)}
        connection: AbstractConnection = kind(**settings, protocol=2)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"store URL {_address(url)} cannot be used ({error}); "
            "use redis://[user:password@]host:port/0, rediss://… or unix:///path/to/socket",
            param="store.url",
        ) from error
    return connection


def _address(url: str) -> str:
    """Returns `url` without user, password and query, fit for logs."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _reason(error: Exception) -> str:
    """Returns what went wrong and, where it is known, what to do."""
    text = str(error) or type(error).__name__
    if "unknown command" in text and "FUNCTION" in text.upper():
        return "this server has no functions; use Valkey, or Redis 7.0 or newer"
    return text


def _lacks_function(value: object) -> bool:
    return isinstance(value, ResponseError) and "function not found" in str(value).lower()
