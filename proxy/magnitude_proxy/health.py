"""`/health`, `/health/live`, `/health/ready`, `/v1/models` and the second listener's `/metrics` and `/cache`."""

from __future__ import annotations

import asyncio
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from magnitude_engine import api
from magnitude_engine.errors import WorkerLost
from magnitude_proxy.errors import ErrorDetail, NotFound, Unavailable
from magnitude_proxy.routing.fallback import Dispatcher
from magnitude_proxy.routing.policy import LOCAL
from magnitude_proxy.surface import EXCHANGE, SURFACE, Surface, json_response
from magnitude_proxy.wire.replies import ModelsReply

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


State = Literal["ok", "degraded", "starting", "unavailable", "stopping"]


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/health/live`."""

    status: Literal["ok"] = "ok"


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/health/ready`; with HTTP 503 it says what keeps requests from being answered."""

    status: Literal["ready"] | State


class WorkerHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's part of `/health`; `failure` says why it cannot start.

    The figures are left out where nothing is known of them, and where there are several tenants: they tell what the
    others do.
    """

    state: Literal["ready", "loading", "failed", "none"]
    running: int | UnsetType = UNSET
    waiting: int | UnsetType = UNSET
    pages_free: int | UnsetType = UNSET
    pages_total: int | UnsetType = UNSET
    failure: str | None = None


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/health`; the first six fields are those of `MagnitudeClient`'s health struct.

    Attributes:
        status: `ok`; `degraded` when something configured is away; with HTTP 503 `starting` while the model loads,
            `unavailable` when nothing can answer, `stopping`.
        card: all facts of the worker's model but where it lies.
        upstreams: name → `ok` or `held back`.
        warnings: what a person should look at.
        error: why nothing can answer, when nothing can.
    """

    status: State
    model: str | None
    draft: str | None
    speculation: bool
    cache: str
    store: str
    version: str
    card: api.ModelCard | None
    worker: WorkerHealth
    upstreams: dict[str, str]
    warnings: tuple[str, ...]
    error: ErrorDetail | UnsetType = UNSET


def product_version() -> str:
    """Returns the installed version."""
    try:
        return version("magnitude-runtime")
    except PackageNotFoundError:
        return "unknown"


async def health(request: web.Request) -> web.Response:
    """A summary for people and clients; 503 when nothing can answer."""
    found = summary(request.app[SURFACE])
    return json_response(found, 200 if found.status in ("ok", "degraded") else 503)


async def live(_: web.Request) -> web.Response:
    """200 as long as the event loop turns; needs no key."""
    return json_response(Live())


async def ready(request: web.Request) -> web.Response:
    """200 when some route can answer a request now, else 503."""
    surface = request.app[SURFACE]
    able = is_ready(surface)
    return json_response(Ready(status="ready" if able else _state(surface, _worker(surface))), 200 if able else 503)


async def models(request: web.Request) -> web.Response:
    """The list of models."""
    surface, only = request.app[SURFACE], request[EXCHANGE].upstream
    return json_response(ModelsReply(data=surface.catalogue.listed(await _found(surface, only), only)))


async def model(request: web.Request) -> web.Response:
    """One model; raises NotFound."""
    surface, only = request.app[SURFACE], request[EXCHANGE].upstream
    return json_response(surface.catalogue.find(request.match_info["name"], await _found(surface, only), only))


async def _found(surface: Surface, only: str | None) -> dict[str, tuple[str, ...]]:
    """Returns what upstreams without a map of names list; those that do not answer list what they last did."""
    open_ones = [each for each in surface.upstreams if not each.mapped and only in (None, each.name)]
    lists = await asyncio.gather(*(upstream.models() for upstream in open_ones))
    return {upstream.name: names for upstream, names in zip(open_ones, lists, strict=True)}


async def metrics(request: web.Request) -> web.Response:
    """All metrics in Prometheus text form."""
    return web.Response(body=request.app[SURFACE].telemetry.exposition(), headers={"Content-Type": METRICS_TYPE})


async def cache(request: web.Request) -> web.Response:
    """What the worker's cache holds, an `api.CacheReport`; 404 without a local worker, 503 while it cannot say."""
    worker = request.app[SURFACE].worker
    if worker is None:
        raise NotFound("this server has no local worker, so no cache of its own: upstreams answer", code="no_worker")
    try:
        return json_response(await worker.inspect())
    except WorkerLost as lost:
        raise Unavailable(lost.message, code=lost.code) from lost


def is_ready(surface: Surface) -> bool:
    """True when a request would find a route: a worker that is connected and moves, or an upstream not held back."""
    return not surface.drain.closing and surface.dispatcher.ready()


def summary(surface: Surface) -> Health:
    """Returns the state of all parts."""
    engine = surface.config.worker.engine
    level = engine.optimization_level if engine is not None else "on"
    card = surface.worker.card if surface.worker is not None else None
    worker = _worker(surface)
    state = _state(surface, worker)
    return Health(
        status=state,
        model=card.name if card is not None else None,
        draft=card.draft if card is not None else None,
        speculation=engine is not None and engine.drafts,
        cache="none" if surface.worker is None else "off" if level == "off" else "on",
        store=_store_word(surface),
        version=product_version(),
        card=None if card is None else msgspec.structs.replace(card, path=""),
        worker=worker,
        upstreams=_upstream_words(surface.dispatcher),
        warnings=tuple(_warnings(surface, worker)),
        error=_error(state, worker),
    )


def _state(surface: Surface, worker: WorkerHealth) -> State:
    if surface.drain.closing:
        return "stopping"
    if not surface.dispatcher.ready():
        return "starting" if worker.state == "loading" else "unavailable"
    return "degraded" if _warnings(surface, worker) else "ok"


def _error(state: State, worker: WorkerHealth) -> ErrorDetail | UnsetType:
    """Returns why nothing can answer."""
    words = {
        "starting": "the model is still loading",
        "unavailable": "nothing can answer now: "
        + (f"the local worker cannot start ({worker.failure})" if worker.failure else "no route is available"),
        "stopping": "the server is stopping",
    }.get(state)
    return UNSET if words is None else ErrorDetail(message=words, type="server_error", code=state)


def _worker(surface: Surface) -> WorkerHealth:
    worker = surface.worker
    if worker is None:
        return WorkerHealth(state="none")
    failure = surface.failure()
    status = worker.status
    state: Literal["ready", "loading", "failed"] = (
        "ready" if worker.available() else "failed" if failure is not None else "loading"
    )
    if status is None or surface.keys.tenants > 1:
        return WorkerHealth(state=state, failure=failure)
    return WorkerHealth(
        state=state,
        running=status.running,
        waiting=status.waiting,
        pages_free=status.pages_free,
        pages_total=status.pages_total,
        failure=failure,
    )


def _store_word(surface: Surface) -> str:
    if surface.config.store.url == "none":
        return "memory"
    return "ok" if surface.sessions.healthy() else "down"


def _upstream_words(dispatcher: Dispatcher) -> dict[str, str]:
    views = (view for view in dispatcher.snapshot() if view.name != LOCAL)
    return {v.name: "held back" if not v.usable else "failing" if v.failing else "ok" for v in views}


def _warnings(surface: Surface, worker: WorkerHealth) -> list[str]:
    """Returns what is configured but not as it should be."""
    found = []
    if worker.state == "failed":
        found.append(f"the local worker cannot start: {worker.failure}")
    elif worker.state == "loading":
        found.append("the local worker is not ready")
    if not surface.sessions.healthy():
        found.append(f"the session store is away, sessions are kept in memory: {surface.sessions.problem}")
    for name, word in _upstream_words(surface.dispatcher).items():
        if word != "ok":
            found.append(f"upstream {name} is {word} after failures")
    return found
