"""The route to the local worker: one unix socket, many requests, and no frame that reaches the wrong one.

    connect ─► Hello ─► Welcome (protocol checked) ─► frames: Status to the pulse, events to their request's inbox
       ▲                                                │
       └──── back-off ◄── every open request fails ◄── lost: closed, reset, malformed frame

The fence of an attempt is `lease epoch * 1000 + attempt`: a frame that carries another one is dropped and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_engine.errors import WorkerLost
from magnitude_proxy.routing.route import Step
from magnitude_proxy.telemetry import FRAMES_FENCED, WORKER_UP, WORKER_VALUE, Telemetry, worker_log
from magnitude_proxy.worker.inbox import Inbox

ATTEMPTS = 1000
WELCOME_S = 10.0
PROBE_S = 1.0
INSPECT_S = 10.0
REGISTER_S = 30.0
COUNT_S = 10.0
MISSES_S = 5.0
RECONNECT_FIRST_S = 0.02
RECONNECT_MOST_S = 1.0


Reply = api.Registered | api.SessionMisses | api.Completed | api.Failed


class Pulse(NamedTuple):
    """How the connected worker does.

    Attributes:
        pid: process id it gave; None while there is no connection.
        silent_s: seconds since its last Status (or the connection, before the first).
        stuck_s: seconds since its step counter moved or it had no work.
    """

    pid: int | None
    silent_s: float
    stuck_s: float

    def hung(self, limit_s: float) -> bool:
        """True when a connected worker has been silent or stuck for `limit_s`."""
        return self.pid is not None and max(self.silent_s, self.stuck_s) >= limit_s


class LocalRoute:
    """Sends steps to the worker behind `socket` and keeps connected to it; `start` and `close` belong to the owner.

    Attributes:
        card: the model served; of the last worker while none is connected.
        status: the last status of the connected worker.
        problem: why there is no connection.
    """

    def __init__(
        self,
        socket: Path,
        telemetry: Telemetry,
        *,
        hang_s: float,
        coming: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A worker hung for `hang_s` gets no new requests.

        `coming` says whether a worker that is away is being started; `clock` gives monotonic seconds.
        """
        self._socket = socket
        self._telemetry = telemetry
        self._hang_s = hang_s
        self._coming = coming
        self._clock = clock
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._replies: dict[tuple[str, int], asyncio.Future[Reply]] = {}
        self._report: asyncio.Future[api.CacheReport | None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pid: int | None = None
        self._heard = self._moved = clock()
        self._task: asyncio.Task[None] | None = None
        self.card: api.ModelCard | None = None
        self.status: api.Status | None = None
        self.problem: str | None = "the worker is not connected yet"
        telemetry.gauge(WORKER_UP, lambda: [(float(self.available()), {})])
        telemetry.gauge(WORKER_VALUE, self._values)

    @property
    def name(self) -> str:
        """`local`."""
        return "local"

    async def start(self) -> None:
        """Begins to connect; returns at once."""
        self._task = asyncio.create_task(self._keep_connected(), name="magnitude-local")

    async def close(self) -> None:
        """Disconnects; open requests fail."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def available(self) -> bool:
        """True when a worker is connected, has welcomed us and is not hung."""
        return self._writer is not None and not self.pulse().hung(self._hang_s)

    def coming(self) -> bool:
        """True while somebody starts a worker."""
        return self._coming()

    def pulse(self) -> Pulse:
        """Returns how the worker does now."""
        now = self._clock()
        return Pulse(self._pid, now - self._heard, now - self._moved)

    async def inspect(self, limit_s: float = INSPECT_S) -> api.CacheReport:
        """Returns what the worker's cache holds, as it says between two steps; those who ask at once share one report.

        Raises:
            WorkerLost: there is no worker, it was lost meanwhile, or it said nothing for `limit_s` seconds.
        """
        if self._writer is None:
            raise WorkerLost(f"the local worker cannot say what its cache holds: {self.problem}")
        if self._report is None:
            self._report = asyncio.get_running_loop().create_future()
            _send(self._writer, api.encode_frame(api.Inspect()))
        asked = self._report
        try:
            async with asyncio.timeout(limit_s):
                report = await asyncio.shield(asked)
        except TimeoutError as error:
            if self._report is asked:
                self._report = None
            raise WorkerLost(
                f"the local worker did not say within {limit_s:g} s what its cache holds; it answers between "
                "two steps: try again"
            ) from error
        if report is None:
            raise WorkerLost("the local worker was lost before it said what its cache holds; try again")
        return report

    async def count(self, given: api.Input, limit_s: float = COUNT_S) -> api.Completed | api.Failed:
        """Returns how many tokens a prompt has as its usage, or why the worker does not say so within `limit_s`."""
        key = (f"count-{uuid.uuid4().hex}", 0)
        if self._writer is None:
            return _failed(key, "worker_lost", f"the local worker cannot count: {self.problem}")
        try:
            frame = api.encode_frame(api.Count(request=key[0], epoch=key[1], input=given))
        except ValueError as error:
            return _unsayable(key, error)
        inbox = self._inboxes[key] = Inbox()
        try:
            _send(self._writer, frame)
            async with asyncio.timeout(limit_s):
                for event in await inbox.take():
                    if isinstance(event, api.Completed | api.Failed):
                        return event
        except TimeoutError:
            return _failed(key, "deadline_exceeded", f"the local worker did not count the prompt within {limit_s:g} s")
        finally:
            del self._inboxes[key]
        return _failed(key, "worker_lost", "the local worker answered a count with something else")

    async def register(self, register: api.Register, limit_s: float = REGISTER_S) -> api.Registered | api.Failed:
        """Returns what the worker says of tools registered ahead, or why there is no such word; see `api.Register`."""
        reply = await self._ask(register, limit_s)
        if isinstance(reply, api.Completed | api.SessionMisses):
            return _failed(
                (register.request, register.epoch), "engine_error", "the worker did not say what it compiled"
            )
        return reply

    def post(self, end: api.EndSession) -> None:
        """Sends what has no answer, and drops it while there is no worker."""
        if self._writer is not None:
            _send(self._writer, api.encode_frame(end))

    async def misses(self, asked: api.AskMisses, limit_s: float = MISSES_S) -> api.SessionMisses:
        """Returns why prompts of a session were not found; raises WorkerLost where the worker does not say so."""
        reply = await self._ask(asked, limit_s)
        if not isinstance(reply, api.SessionMisses):
            raise WorkerLost(reply.message if isinstance(reply, api.Failed) else "the worker said something else")
        return reply

    async def tell(self, *news: api.ToolEvent | api.EndSession | api.Expect) -> bool:
        """Sends what has no answer, no faster than the worker takes it; False while there is none to take it."""
        writer = self._writer
        if writer is None:
            return False
        _send(writer, b"".join(map(api.encode_frame, news)))
        with contextlib.suppress(OSError):
            await writer.drain()
        return not writer.is_closing()

    async def _ask(self, command: api.Register | api.AskMisses, limit_s: float) -> Reply:
        """Returns the one reply to a command with an id of its own."""
        key, writer = (command.request, command.epoch), self._writer
        if writer is None or key in self._replies:
            reason = self.problem if writer is None else "a question with this id is already under way"
            return _failed(key, "worker_lost", f"the local worker cannot answer: {reason}")
        try:
            frame = api.encode_frame(command)
        except ValueError as error:
            return _unsayable(key, error)
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._replies[key] = reply
        try:
            _send(writer, frame)
            async with asyncio.timeout(limit_s):
                return await reply
        except TimeoutError:
            return _failed(key, "deadline_exceeded", f"the local worker did not answer within {limit_s:g} s; try again")
        finally:
            del self._replies[key]

    async def answer(self, step: Step, attempt: int) -> AsyncGenerator[api.AnswerEvent, None]:
        """Yields the worker's events of `step`; see `Route.answer`."""
        request = msgspec.structs.replace(step.request, epoch=step.request.epoch * ATTEMPTS + attempt)
        key = (request.request, request.epoch)
        writer = self._writer
        if writer is None or key in self._inboxes:
            reason = self.problem if writer is None else "a request with this id is already under way"
            yield _failed(key, "worker_lost", f"the local worker cannot answer: {reason}")
            return
        try:
            frame = api.encode_frame(request)
        except ValueError as error:
            yield _unsayable(key, error)
            return
        inbox = self._inboxes[key] = Inbox()
        over = False
        try:
            _send(writer, frame)
            with contextlib.suppress(OSError):
                await writer.drain()
            while not over:
                for event in await inbox.take():
                    over = isinstance(event, api.Completed | api.Failed)
                    yield event
                    if over:
                        break
        finally:
            del self._inboxes[key]
            if not over:
                _send(writer, api.encode_frame(api.Cancel(request=request.request, epoch=request.epoch)))

    async def _keep_connected(self) -> None:
        """Connects and converses until the connection is lost, then again; ends by cancellation."""
        pause = RECONNECT_FIRST_S
        while True:
            try:
                await self._converse()
            except EOFError:
                self.problem = "the worker closed the connection"
            except TimeoutError:
                self.problem = f"the worker accepted the connection but did not answer within {WELCOME_S:g} s"
            except OSError as error:
                lost = "the connection broke" if self._pid is not None else f"no worker listens on {self._socket}"
                self.problem = f"{lost} ({error.strerror})"
            except (ValueError, msgspec.MsgspecError) as error:
                self.problem = f"the worker broke the protocol: {error}"
            if self._pid is not None:
                pause = RECONNECT_FIRST_S
                worker_log.warning("connection to the worker lost: %s", self.problem)
            self._pid = None
            await asyncio.sleep(pause)
            pause = min(pause * 2, RECONNECT_MOST_S)

    async def _converse(self) -> None:
        """Runs one connection from Hello to its end; raises what ended it."""
        reader, writer = await asyncio.open_unix_connection(self._socket)
        probes: asyncio.Task[None] | None = None
        try:
            writer.write(api.encode_frame(api.Hello()))
            frames = api.FrameReader(reader)
            async with asyncio.timeout(WELCOME_S):
                self._welcome(await frames.event())
            self._writer = writer
            self.problem = None
            probes = asyncio.create_task(_probe(writer), name="magnitude-probe")
            while True:
                self._receive(await frames.event())
        finally:
            if probes is not None:
                probes.cancel()
            writer.close()
            self._lose()

    def _welcome(self, event: api.Event) -> None:
        """Notes whom we speak to; raises ValueError when it is no worker of this protocol."""
        if isinstance(event, api.Failed):
            raise ValueError(f"the worker refused the connection: {event.message}")
        if not isinstance(event, api.Welcome):
            raise ValueError(f"the worker's first frame is {type(event).__name__} instead of Welcome")
        if event.protocol != api.PROTOCOL_VERSION:
            raise ValueError(
                f"the worker speaks protocol {event.protocol} and this proxy {api.PROTOCOL_VERSION}; "
                "run both from the same release"
            )
        self.card = event.model
        self._heard = self._moved = self._clock()
        self._pid = event.pid
        worker_log.info("connected to worker process %d, model %s", event.pid, event.model.name)

    def _receive(self, event: api.Event) -> None:
        if isinstance(event, api.Status):
            now = self._clock()
            self._heard = now
            if self.status is None or event.steps != self.status.steps or not (event.running or event.waiting):
                self._moved = now
            self.status = event
        elif isinstance(event, api.CacheReport):
            self._reported(event)
        elif isinstance(event, Reply) and (event.request, event.epoch) in self._replies:
            self._replied(event)
        elif not isinstance(event, api.Welcome | api.Registered | api.SessionMisses):
            inbox = self._inboxes.get((event.request, event.epoch))
            if inbox is None:
                self._telemetry.count(FRAMES_FENCED)
            else:
                inbox.put(event)

    def _replied(self, reply: Reply) -> None:
        waiting = self._replies[reply.request, reply.epoch]
        if not waiting.done():
            waiting.set_result(reply)

    def _reported(self, report: api.CacheReport | None) -> None:
        """Gives `report`, None when none will come, to those who wait for one."""
        asked, self._report = self._report, None
        if asked is not None and not asked.done():
            asked.set_result(report)

    def _lose(self) -> None:
        """Fails every open request."""
        self._writer = None
        self.status = None
        self._reported(None)
        for key in list(self._replies):
            self._replied(_failed(key, "worker_lost", "the local worker was lost before it answered; try again"))
        for key, inbox in self._inboxes.items():
            inbox.put(_failed(key, "worker_lost", "the local worker was lost while it answered; try again"))

    def _values(self) -> Iterable[tuple[float, dict[str, str]]]:
        """Yields the worker's own figures for the metrics."""
        if self.status is None:
            return
        own = {
            "steps": self.status.steps,
            "running": self.status.running,
            "waiting": self.status.waiting,
            "pages_free": self.status.pages_free,
            "pages_total": self.status.pages_total,
        }
        for name, value in {**own, **self.status.counters, **self.status.gauges}.items():
            yield float(value), {"name": name}


async def _probe(writer: asyncio.StreamWriter) -> None:
    """Asks for a status every second, so that silence means something whatever the worker sends by itself."""
    while True:
        _send(writer, api.encode_frame(api.Probe()))
        await asyncio.sleep(PROBE_S)


def _send(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Writes `frame` unless the connection has just ended; the reader notices that by itself."""
    if not writer.is_closing():
        writer.write(frame)


def _failed(key: tuple[str, int], code: str, message: str) -> api.Failed:
    return api.Failed(request=key[0], epoch=key[1], code=code, message=message, retryable=True)


def _unsayable(key: tuple[str, int], error: ValueError) -> api.Failed:
    return _failed(key, "unsupported_feature", f"the local worker cannot be told of this: {error}")
