"""One pipelined connection to Valkey or Redis that no request can corrupt and no request waits for.

    request ─┐            ┌─► written, with what waited for it ─► replies settled in order
    request ─┼─► pipe ────┤
    request ─┘            └─► on any failure: drop the connection, answer all "down", knock again

redis-py connects, authenticates and prepares; then the pipe takes over the transport, since a command through
redis-py's own streams costs several times as much. Only the pipe reads the socket, and it settles replies in the order
of the commands, so that a cancelled request leaves its reply to the pipe, which drops it: no reply can reach another
request (the class of CVE-2023-28858). While the store is down `call` fails at once; a knock loads the function library
again, which a restarted or replaced server may not have.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import hiredis
from redis.asyncio import Connection
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from magnitude_engine.errors import ConfigError
from magnitude_proxy.store.deadlines import Deadlines
from magnitude_proxy.store.pipe import Pipe, StoreDown, settle
from magnitude_proxy.telemetry import store_log

__all__ = ["KNOCK_S", "STEADY_S", "Command", "Link", "StoreConnection", "StoreDown", "next_pause"]

CONNECT_S = 1.0
KNOCK_S = 1.0
MAX_WAITING = 10_000
STEADY_S = 10.0
LATE_S = 0.002
MIN_EXTRA_S = 0.01

Command = tuple[str | int | float | bytes, ...]


class Link(Protocol):
    """What those who keep something in the store use of it; its operations are named for the metrics."""

    async def call(self, operation: str, *command: str | int | float | bytes) -> object:
        """Returns the reply to a command; raises StoreDown."""

    def tell(self, *command: str | int | float | bytes) -> None:
        """Sends a command whose reply nobody needs, or drops it while the store is down."""


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
        self._pipe: Pipe | None = None
        self._tried = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._deadlines = Deadlines(self._overdue)
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
        """Drops the connection once what is under way is answered, or `timeout_s` has passed."""
        if self._pipe is not None:
            await self._pipe.idle(self._timeout_s)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self._deadlines.clear()
        self._up = False
        self.problem = f"the connection to {self._address} is closed"

    async def call(self, *command: str | int | float | bytes) -> object:
        """Returns the reply to one command.

        Raises:
            StoreDown: no reply within `timeout_s`, an error reply, or the store is known to be down (at once).
        """
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        value = await self._timed(self._push(command), deadline)
        if self._library is not None and _lacks_function(value):
            self._push(("FUNCTION", "LOAD", "REPLACE", self._library))
            value = await self._timed(self._push(command), deadline)
        return self._checked(value)

    def later(self, done: Callable[[object], None], *command: str | int | float | bytes) -> None:
        """Takes a command and returns; `done` gets the reply, or StoreDown when there is none (see `call`).

        A later `call` is answered after it, since the store takes the commands of one connection in order.

        Raises:
            StoreDown: the store is known to be down; `done` is not called.
        """

        def settled(reply: asyncio.Future[object]) -> None:
            try:
                done(self._checked(reply.result()))
            except StoreDown as error:
                done(error)

        def first(reply: asyncio.Future[object]) -> None:
            if self._library is None or not _lacks_function(reply.result()):
                settled(reply)
                return
            try:
                self._push(("FUNCTION", "LOAD", "REPLACE", self._library))
                self._timed(self._push(command), deadline).add_done_callback(settled)
            except StoreDown as error:
                done(error)

        deadline = asyncio.get_running_loop().time() + self._timeout_s
        self._timed(self._push(command, urgent=False), deadline).add_done_callback(first)

    def tell(self, *command: str | int | float | bytes) -> None:
        """Sends a command whose reply nobody needs, or drops it while the store is down."""
        with contextlib.suppress(StoreDown):
            self._push(command, urgent=False)

    def _push(self, command: Command, *, urgent: bool = True) -> asyncio.Future[object]:
        """Sends a command (see `Pipe.send`); raises StoreDown when the store is down or hopelessly behind."""
        if not self._up or self._pipe is None:
            raise StoreDown(self.problem)
        if self._pipe.waiting >= MAX_WAITING:
            raise StoreDown(f"{self._address} has {MAX_WAITING} commands waiting")
        packed = hiredis.pack_command(command)  # type: ignore[arg-type]  # stub says 1-tuple
        return self._pipe.send(packed, urgent=urgent)

    def _timed(self, reply: asyncio.Future[object], deadline: float) -> asyncio.Future[object]:
        """Returns `reply`; a deadline that passes without it takes the store down."""
        self._deadlines.watch(reply, deadline)
        return reply

    def _checked(self, value: object) -> object:
        """Returns a reply that is one; raises StoreDown for all others."""
        if isinstance(value, ResponseError):
            self._down(f"{self._address} refused a command: {_reason(value)}")
        if isinstance(value, Exception):
            raise StoreDown(str(value)) from value
        return value

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
        settle(reply, StoreDown(problem))

    def _down(self, problem: str) -> None:
        """Drops the connection and answers all that wait."""
        if self._up:
            store_log.warning("session store lost: %s", problem)
        self._up = False
        self.problem = problem
        if self._pipe is not None:
            self._pipe.drop(problem)

    async def _keep_connected(self) -> None:
        """Connects, waits until the connection is lost, knocks again; ends only by cancellation."""
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            began = loop.time()
            connection = _connection(self._url)
            try:
                await self._prepare(connection)
                self._pipe = Pipe(_transport(connection), self._address)
                self._up = True
                self.problem = None
                self._tried.set()
                store_log.info("session store connected: %s", self._address)
                await self._pipe.lost.wait()
                self._down(f"{self._address}: {self._pipe.reason}")
            except (RedisError, hiredis.HiredisError, OSError) as error:
                self._down(f"{self._address}: {_reason(error)}")
            finally:
                self._tried.set()
                if self._pipe is not None:
                    self._pipe.drop(f"the connection to {self._address} is closed")
                    self._pipe = None
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


def next_pause(last_s: float, lasted_s: float, most_s: float) -> float:
    """Returns how long to leave a lost store alone: briefly for a hiccup, `most_s` when it keeps failing.

    Args:
        last_s: the pause before this connection, 0 for the first.
        lasted_s: how long the connection lasted.
    """
    if last_s == 0 or lasted_s >= STEADY_S:
        return most_s / 8
    return min(last_s * 2, most_s)


def _transport(connection: AbstractConnection) -> asyncio.Transport:
    """Returns the transport of a connection that redis-py has prepared, which it shows to nobody."""
    writer = connection._writer
    if writer is None:
        raise OSError("the connection was closed while it was prepared")
    return cast(asyncio.Transport, writer.transport)


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
