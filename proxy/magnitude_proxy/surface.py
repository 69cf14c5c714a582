"""What the HTTP handlers share: the parts that they call, one exchange's facts, and the orderly stop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
from aiohttp import web

from magnitude_engine import api
from magnitude_proxy.access import Key, KeyRing, Tenant
from magnitude_proxy.catalogue import Catalogue
from magnitude_proxy.config import ProxyConfig
from magnitude_proxy.errors import TooManyRequests
from magnitude_proxy.pruning.scene import Recents
from magnitude_proxy.quota import Quotas
from magnitude_proxy.refusals import Refusals
from magnitude_proxy.routing.fallback import Dispatcher
from magnitude_proxy.session import Sessions
from magnitude_proxy.telemetry import Telemetry

SEED_BITS = 63


class Worker(Protocol):
    """What the handlers see of the local worker."""

    @property
    def card(self) -> api.ModelCard | None:
        """The model, None before the worker has said."""

    @property
    def status(self) -> api.Status | None:
        """The worker's last pulse."""

    def available(self) -> bool:
        """True when it can answer now."""

    async def count(self, given: api.Input) -> api.Completed | api.Failed:
        """Returns how many tokens a prompt has as its usage, or why it cannot say."""

    async def inspect(self, limit_s: float = ...) -> api.CacheReport:
        """Returns what its cache holds; raises WorkerLost when it cannot say so in time."""

    async def misses(self, asked: api.AskMisses) -> api.SessionMisses:
        """Returns why prompts of a session were not found in its cache; raises WorkerLost when it cannot say."""

    async def register(self, register: api.Register) -> api.Registered | api.Failed:
        """Returns what it compiled of tools registered ahead, or why it did not."""

    def post(self, end: api.EndSession) -> None:
        """Sends what has no answer, and drops it while there is no worker."""

    async def tell(self, *news: api.ToolEvent | api.EndSession | api.Expect) -> bool:
        """Sends what has no answer, no faster than it is taken; False while there is no worker to take it."""


class ModelSource(NamedTuple):
    """An upstream as a source of model names; `mapped` says that its names are configured."""

    name: str
    mapped: bool
    models: Callable[[], Awaitable[tuple[str, ...]]]


class Turnstile:
    """Lets each tenant do only so much of a kind at once."""

    def __init__(self) -> None:
        self._inside: Counter[tuple[str, str]] = Counter()

    @property
    def busy(self) -> bool:
        """Whether anybody is at work."""
        return bool(self._inside)

    @contextmanager
    def entered(self, what: str, tenant: str, most: int) -> Iterator[None]:
        """Counts the work inside; raises TooManyRequests where `most` are at work. `what` names them, in the plural."""
        key = (what, tenant)
        if self._inside[key] >= most:
            raise TooManyRequests(
                f"{most} {what} at once are allowed; try again when one has ended", headers={"Retry-After": "1"}
            )
        self._inside[key] += 1
        try:
            yield
        finally:
            self._inside[key] -= 1
            if not self._inside[key]:
                del self._inside[key]


class Drain:
    """The orderly stop: from `close` on nothing new begins, at `expire` what still runs is ended.

    A handler's work runs inside `entered`; `expire` cancels it there, and `expired` tells such a cancellation
    from a client that left.
    """

    def __init__(self) -> None:
        self.closing = False
        self.expired = False
        self._running: set[asyncio.Task[object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """How many requests are at work."""
        return len(self._running)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Counts the present task as a running request."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a request is handled outside of a task")
        self._running.add(task)
        self._idle.clear()
        try:
            yield
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle.set()

    def close(self) -> None:
        """Lets nothing new begin."""
        self.closing = True

    async def idle(self, seconds: float) -> bool:
        """Waits until nothing runs, at most `seconds`; True when nothing does."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def expire(self) -> None:
        """Cancels what still runs."""
        self.expired = True
        for task in self._running:
            task.cancel()


@dataclass(frozen=True, slots=True)
class Surface:
    """The parts behind the handlers; one per process.

    Attributes:
        worker: None without a local worker.
        failure: why the worker ended, while none runs.
        refusals: of unknown keys, by address.
        refused: set once a worker refused its model or settings; it would do so again.
        now: Unix seconds.
        clock: monotonic seconds.
        seed: a new random seed for a request without one.
        recents: sessions between two steps, whose prompts may become shorter meanwhile.
    """

    config: ProxyConfig
    keys: KeyRing
    sessions: Sessions
    dispatcher: Dispatcher
    catalogue: Catalogue
    telemetry: Telemetry
    worker: Worker | None = None
    upstreams: tuple[ModelSource, ...] = ()
    failure: Callable[[], str | None] = lambda: None
    refused: asyncio.Event = field(default_factory=asyncio.Event)
    drain: Drain = field(default_factory=Drain)
    turnstile: Turnstile = field(default_factory=Turnstile)
    recents: Recents = field(default_factory=Recents)
    quotas: Quotas = field(default_factory=Quotas)
    refusals: Refusals = field(default_factory=lambda: Refusals(0))
    now: Callable[[], float] = time.time
    clock: Callable[[], float] = time.monotonic
    seed: Callable[[], int] = lambda: secrets.randbits(SEED_BITS)


@dataclass(slots=True)
class Exchange:
    """What is known of one HTTP request, for its headers, its log line and its metrics.

    Attributes:
        began: monotonic seconds.
        key: what the request may do, once its key is checked.
        status: of the response; 499 when the client left before its end.
        route: label of the route that answered, `none` when none did.
        sent: response headers have gone out, so that no other response can.
    """

    id: str
    began: float
    endpoint: str
    key: Key | None = None
    status: int = 499
    route: str = "none"
    sent: bool = False

    @property
    def tenant(self) -> Tenant | None:
        """Whom the key stands for."""
        return None if self.key is None else self.key.tenant

    @property
    def upstream(self) -> str | None:
        """The only upstream that the key allows; None where it allows all."""
        return None if self.key is None else self.key.upstream


def json_response(value: object, status: int = 200) -> web.Response:
    """Returns a response whose body is `value` as JSON."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


SURFACE: web.AppKey[Surface] = web.AppKey("surface", Surface)
EXCHANGE: web.RequestKey[Exchange] = web.RequestKey("exchange", Exchange)
