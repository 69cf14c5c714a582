"""Serves the engine on a unix socket, in the frames of `api.py`.

Per connection: `Hello` is answered with `Welcome`; then all other commands may come in any order. `Status` is pushed
to every connection and answers a `Probe`, also while a step runs, since steps have their own thread. A connection
that breaks the protocol is closed, and so is one that does not read what it is sent; the requests of a closed
connection are cancelled; other connections do not notice.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec

from magnitude_engine import api
from magnitude_engine.answer import Sink, failed
from magnitude_engine.engine import Engine
from magnitude_engine.errors import ConfigError, Overloaded
from magnitude_engine.inbox import JobKey
from magnitude_engine.telemetry import worker_log

STATUS_INTERVAL_S = 0.5
HELLO_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 1.0
BACKLOG_BYTES = 8 * 1024 * 1024
PREPARE_THREADS = 2
MAX_PREPARING = 1024

Asked = TypeVar("Asked", api.Generate, api.Count)


class Server:
    """Listens at `path` from `start` to `close`; the engine is the caller's, who starts and closes it."""

    def __init__(self, engine: Engine, path: Path) -> None:
        self._engine = engine
        self._path = path
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="magnitude-prepare")
        self._connections: dict[_Connection, asyncio.Task[None] | None] = {}
        self._listener: asyncio.Server | None = None
        self._pulse: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Opens the socket.

        Raises:
            ConfigError: another process listens there, or the place cannot be used.
        """
        self._listener = await asyncio.start_unix_server(self._accept, sock=open_socket(self._path))
        self._pulse = asyncio.create_task(self._push_status())

    def stop_accepting(self) -> None:
        """Closes the listening socket; connections stay."""
        if self._listener is not None:
            self._listener.close()
            self._path.unlink(missing_ok=True)

    async def close(self) -> None:
        """Sends what is pending, closes all connections and cancels what they still wait for."""
        self.stop_accepting()
        if self._pulse is not None:
            self._pulse.cancel()
        for connection, task in list(self._connections.items()):
            await connection.close()
            if task is not None:
                await asyncio.wait({task}, timeout=CLOSE_TIMEOUT_S)
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(self._engine, self._pool, reader, writer)
        self._connections[connection] = asyncio.current_task()
        try:
            await connection.serve()
        finally:
            del self._connections[connection]

    async def _push_status(self) -> None:
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            for connection in list(self._connections):
                connection.push_status()


class _Connection:
    """One proxy."""

    def __init__(
        self, engine: Engine, pool: ThreadPoolExecutor, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._frames = api.FrameReader(reader)
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._welcomed = False
        self._open: set[JobKey] = set()
        self._preparing = 0
        self._lock = threading.Lock()
        self._events: deque[api.AnswerEvent] = deque()
        self._flush_due = False

    async def serve(self) -> None:
        """Reads commands until the connection ends, then cancels what is open."""
        try:
            await self._greet()
            while self._welcomed:
                self._obey(await self._frames.command())
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            worker_log.warning("a connection was closed: its frame cannot be read: %s", error)
        except TimeoutError:
            worker_log.warning("a connection was closed: it did not say hello within %g s", HELLO_TIMEOUT_S)
        finally:
            self._abandon()
            self._writer.close()

    async def close(self) -> None:
        """Sends what is pending and closes."""
        self._flush()
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), timeout=CLOSE_TIMEOUT_S)
        except (ConnectionError, TimeoutError):
            self._writer.transport.abort()

    def push_status(self) -> None:
        """Sends a status unless older frames are still unread."""
        if self._welcomed and not self._writer.transport.get_write_buffer_size():
            self._send(self._engine.status())

    async def _greet(self) -> None:
        """Answers the first frame; anything but our protocol is told so, and `serve` then closes."""
        peer = peer_uid(self._writer.get_extra_info("socket"))
        if peer not in (None, 0, os.getuid()):
            worker_log.warning("a connection of user %s was refused; proxy and worker must be one user", peer)
            return
        hello = await asyncio.wait_for(self._frames.command(), HELLO_TIMEOUT_S)
        if not isinstance(hello, api.Hello) or hello.protocol != api.PROTOCOL_VERSION:
            said = f"protocol {hello.protocol}" if isinstance(hello, api.Hello) else "no hello"
            message = f"the worker speaks protocol {api.PROTOCOL_VERSION} and got {said}; run one version of both"
            worker_log.warning("a connection was refused: %s", message)
            self._send(api.Failed(request="", epoch=0, code="protocol_mismatch", message=message))
            return
        self._welcomed = True
        self._send(
            api.Welcome(
                protocol=api.PROTOCOL_VERSION,
                incarnation=self._engine.incarnation,
                pid=os.getpid(),
                model=self._engine.card,
            )
        )

    def _obey(self, command: api.Command) -> None:
        match command:
            case api.Generate():
                self._begin(command, self._engine.submit)
            case api.Count():
                self._begin(command, self._engine.count)
            case api.Cancel():
                self._open.discard(JobKey(command.request, command.epoch))
                self._engine.cancel(command.request, command.epoch)
            case api.Probe():
                self._send(self._engine.status())
            case api.ToolEvent():
                self._engine.tool_event(command)
            case api.Expect():
                self._engine.expect(command)
            case api.Register():
                self._register(command)
            case api.EndSession():
                self._engine.end_session(command)
            case api.AskMisses():
                self._send(self._engine.misses(command))
            case api.Inspect():
                self._engine.inspect(self._report)
            case api.Hello():
                raise ValueError("a second hello")

    def _register(self, register: api.Register) -> None:
        def told(event: api.Registered | api.Failed) -> None:
            if register.request:
                self._loop.call_soon_threadsafe(self._send, event)

        self._engine.register(register, told=told)

    def _report(self, report: api.CacheReport) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._send, report)

    def _begin(self, asked: Asked, work: Callable[[Asked, Sink], None]) -> None:
        """Has a request prepared, or a prompt counted, beside the loop."""
        key = JobKey(asked.request, asked.epoch)
        if key in self._open:
            raise ValueError(f"request {asked.request!r} came twice with epoch {asked.epoch}")
        if self._preparing >= MAX_PREPARING:
            self._send(failed(asked, Overloaded("too many requests came at once; try again in 1 s")))
            return
        self._open.add(key)
        self._preparing += 1
        task = self._pool.submit(work, asked, self._post)
        task.add_done_callback(lambda done: self._loop.call_soon_threadsafe(self._submitted, key, done))

    def _submitted(self, key: JobKey, done: Future[None]) -> None:
        """A cancellation that came while the request was prepared found nothing to cancel: it is repeated."""
        self._preparing -= 1
        if key not in self._open and not done.cancelled():
            self._engine.cancel(key.request, key.epoch)

    def _post(self, event: api.AnswerEvent) -> None:
        """The sink of this connection's requests; called on the engine's thread."""
        with self._lock:
            self._events.append(event)
            due, self._flush_due = self._flush_due, True
        if not due:
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        """Writes all posted events of open requests."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
            self._flush_due = False
        for event in events:
            key = JobKey(event.request, event.epoch)
            if key in self._open:
                self._send(event)
                if isinstance(event, api.Completed | api.Failed):
                    self._open.discard(key)

    def _send(self, event: api.Event) -> None:
        if self._writer.is_closing():
            return
        self._writer.write(api.encode_frame(event))
        if self._writer.transport.get_write_buffer_size() > BACKLOG_BYTES:
            worker_log.warning("a connection was dropped: it left %d bytes unread", BACKLOG_BYTES)
            self._abandon()
            self._writer.transport.abort()

    def _abandon(self) -> None:
        """Cancels all open requests."""
        self._welcomed = False
        abandoned, self._open = self._open, set()
        for key in abandoned:
            self._engine.cancel(key.request, key.epoch)


def open_socket(path: Path) -> socket.socket:
    """Returns a listening-ready unix socket at `path`, for this user only; its folder is made if it is missing.

    Raises:
        ConfigError: another process listens there, or the place cannot be used.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_mode & 0o022 and not path.parent.stat().st_mode & 0o1000:
            worker_log.warning("other users can replace the socket: make its folder private (mode 0700)")
        if path.is_socket():
            _remove_stale(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError:
            listener.close()
            raise
        finally:
            os.umask(before)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on the socket {path}: {error.strerror or error}; choose another --socket", param="socket"
        ) from error
    return listener


def _remove_stale(path: Path) -> None:
    """Removes the socket of a process that is gone."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise ConfigError(f"another worker listens on {path}; stop it or choose another --socket", param="socket")


def peer_uid(connection: socket.socket) -> int | None:
    """Returns the user id at the other end; None where the system cannot tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])
