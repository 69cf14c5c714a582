"""`/health`, `/health/live`, `/health/ready`, `/v1/models` and the second listener's `/metrics`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import msgspec
from aiohttp import web

from magnitude_engine import api
from magnitude_proxy.fallback import Dispatcher
from magnitude_proxy.policy import LOCAL
from magnitude_proxy.replies import ModelsReply
from magnitude_proxy.surface import SURFACE, Surface

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """Body of `/health`; `draft`, `speculation`, `cache` and `store` are words for `MagnitudeClient`'s health struct.

    Attributes:
        status: `ok`; `starting` while the model loads; `degraded` when something configured is away; `unavailable`
            when nothing can answer.
        worker: `ready`, `loading`, `failed` or `none`.
        warnings: what a person should look at.
    """

    status: Literal["ok", "starting", "degraded", "unavailable", "stopping"]
    version: str
    model: api.ModelCard | None
    worker: str
    store: str
    upstreams: dict[str, str]
    speculation: str
    draft: str | None
    cache: str
    running: int
    waiting: int
    warnings: tuple[str, ...]


def product_version() -> str:
    """Returns the installed version."""
    try:
        return version("magnitude-runtime")
    except PackageNotFoundError:
        return "unknown"


async def health(request: web.Request) -> web.Response:
    """A summary for people and clients; always 200 while the proxy runs."""
    return _json(summary(request.app[SURFACE]))


async def live(_: web.Request) -> web.Response:
    """200 as long as the event loop turns; needs no key."""
    return _json({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """200 when some route can answer a request now, else 503."""
    surface = request.app[SURFACE]
    able = is_ready(surface)
    return _json({"status": "ready" if able else _state(surface)}, 200 if able else 503)


async def models(request: web.Request) -> web.Response:
    """The list of models."""
    return _json(ModelsReply(data=request.app[SURFACE].catalogue.listed()))


async def model(request: web.Request) -> web.Response:
    """One model; raises NotFound."""
    return _json(request.app[SURFACE].catalogue.find(request.match_info["name"]))


async def metrics(request: web.Request) -> web.Response:
    """All metrics in Prometheus text form."""
    return web.Response(body=request.app[SURFACE].telemetry.exposition(), headers={"Content-Type": METRICS_TYPE})


def is_ready(surface: Surface) -> bool:
    """True when a request would find a route: a worker that is connected and moves, or an upstream not held back."""
    return not surface.drain.closing and surface.dispatcher.ready()


def summary(surface: Surface) -> Health:
    """Returns the state of all parts."""
    worker = surface.worker
    status = worker.status if worker is not None else None
    engine = surface.config.worker.engine
    level = engine.optimization_level if engine is not None else "unknown"
    return Health(
        status=_state(surface),
        version=product_version(),
        model=worker.card if worker is not None else None,
        worker=_worker_word(surface),
        store=_store_word(surface),
        upstreams=_upstream_words(surface.dispatcher),
        speculation="off",
        draft=None,
        cache="none" if worker is None else "off" if level == "off" else "on",
        running=status.running if status is not None else 0,
        waiting=status.waiting if status is not None else 0,
        warnings=tuple(_warnings(surface)),
    )


def _state(surface: Surface) -> Literal["ok", "starting", "degraded", "unavailable", "stopping"]:
    if surface.drain.closing:
        return "stopping"
    word = _worker_word(surface)
    if not surface.dispatcher.ready():
        return "starting" if word == "loading" else "unavailable"
    return "degraded" if _warnings(surface) else "ok"


def _worker_word(surface: Surface) -> str:
    if surface.worker is None:
        return "none"
    if surface.worker.available():
        return "ready"
    return "failed" if surface.failure() else "loading"


def _store_word(surface: Surface) -> str:
    if surface.config.store.url == "none":
        return "memory"
    return "ok" if surface.sessions.healthy() else "down"


def _upstream_words(dispatcher: Dispatcher) -> dict[str, str]:
    return {view.name: "ok" if view.usable else "held back" for view in dispatcher.snapshot() if view.name != LOCAL}


def _warnings(surface: Surface) -> list[str]:
    """Returns what is configured but not as it should be."""
    found = []
    failure = surface.failure()
    if failure:
        found.append(f"the local worker cannot start: {failure}")
    elif surface.worker is not None and not surface.worker.available():
        found.append("the local worker is not ready")
    if not surface.sessions.healthy():
        found.append(f"the session store is away, sessions are kept in memory: {surface.sessions.problem}")
    for name, word in _upstream_words(surface.dispatcher).items():
        if word != "ok":
            found.append(f"upstream {name} is {word} after failures")
    return found


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
