"""One proxy process: starts its parts in order, listens, and stops without cutting anybody off.

    addresses ─► store ─► worker ─► listeners (open at once; /health/ready says when a route can answer)

On SIGTERM new requests get 503, running ones may finish for `GRACE_S`, the rest get an error event, then the parts
stop in reverse order. A second signal ends the grace.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TextIO

from magnitude_engine.errors import ConfigError
from magnitude_proxy.access import KeyRing, server_secret
from magnitude_proxy.catalogue import Catalogue
from magnitude_proxy.config import ProxyConfig
from magnitude_proxy.health import product_version
from magnitude_proxy.keyfile import configured_keys
from magnitude_proxy.keywatch import KeyWatch
from magnitude_proxy.lines import Lines
from magnitude_proxy.listener import admin_application, api_application, bind, listen
from magnitude_proxy.refusals import Refusals
from magnitude_proxy.routing.fallback import Dispatcher
from magnitude_proxy.routing.route import Route
from magnitude_proxy.session import Sessions
from magnitude_proxy.settings import check
from magnitude_proxy.surface import ModelSource, Surface
from magnitude_proxy.telemetry import Telemetry, proxy_log
from magnitude_proxy.upstream.client import Upstream, make_session
from magnitude_proxy.worker.local import LocalRoute
from magnitude_proxy.worker.supervisor import Supervisor, worker_command, worker_socket

GRACE_S = 10.0
LAST_WORD_S = 2.0
LOOK_S = 0.2
GARBAGE_ALLOCATIONS = 10_000
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class Bound(NamedTuple):
    """Where a running proxy listens; `url` is what a client sets as `base_url`, without `/v1` in `origin`."""

    port: int
    admin_port: int
    origin: str

    @property
    def url(self) -> str:
        """The `base_url` of OpenAI clients."""
        return f"{self.origin}/v1"


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy that listens."""

    bound: Bound
    surface: Surface


def run(config: ProxyConfig) -> int:
    """Runs the proxy until SIGTERM or SIGINT and returns the exit status.

    Raises:
        ConfigError: a setting cannot be used.
    """
    if not __debug__:
        raise ConfigError("do not run with python -O: libraries that this server relies on check with assert")
    check(config)
    logging.basicConfig(level=config.telemetry.log_level.upper(), format=LOG_FORMAT, handlers=[Lines(sys.stderr)])
    # LOG_FORMAT shows none of these, so none is looked up for every line; the first is where in the source it was made.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(config))
    return 0


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Returns uvloop's loop where there is one."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def serve(config: ProxyConfig, ready: Callable[[Bound], None] | None = None) -> None:
    """Runs the proxy until a signal or cancellation; `ready` is called once it listens.

    Raises:
        ConfigError: an address, the data folder or a key file cannot be used, or the worker refuses its model and
            nothing else could answer.
    """
    stop = asyncio.Event()
    async with running(config) as proxy:
        watch = KeyWatch(config, proxy.surface.keys)
        _on_signals(stop, proxy.surface, watch if config.key_file else None)
        _settle_garbage()
        sys.stdout.write(banner(config, proxy.bound))
        sys.stdout.flush()
        if ready is not None:
            ready(proxy.bound)
        refused = proxy.surface.refused if not config.upstreams else asyncio.Event()
        beside = (asyncio.create_task(_greet(config, proxy)), asyncio.create_task(watch.follow()))
        ends = {asyncio.create_task(stop.wait()), asyncio.create_task(refused.wait())}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*beside, *ends):
                task.cancel()
            await asyncio.wait({*beside, *ends})
        if refused.is_set() and not stop.is_set():
            raise ConfigError(f"the worker cannot start: {proxy.surface.failure()}", param="worker.model")


def _settle_garbage() -> None:
    """Spares the collector what lives as long as the process, and requests most of its passes.

    Requests leave hardly any cycles, and a pass over all modules and ten thousand sessions takes tens of milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_ALLOCATIONS, 20, 100)


async def _greet(config: ProxyConfig, proxy: Running) -> None:
    """Shows how to ask, once somebody answers."""
    await tell_loading(proxy.surface, sys.stderr)
    sys.stdout.write(example(config, proxy.bound))
    sys.stdout.flush()


def _on_signals(stop: asyncio.Event, surface: Surface, keys: KeyWatch | None) -> None:
    """Lets the first signal stop the proxy and the second end its grace; SIGHUP reads a key file again."""
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[bool]] = set()

    def stopper() -> None:
        if stop.is_set():
            surface.drain.expire()
        stop.set()

    def reload(keys: KeyWatch) -> None:
        reloads.add(task := asyncio.create_task(keys.reload()))
        task.add_done_callback(reloads.discard)

    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopper)
        if keys is not None:
            loop.add_signal_handler(signal.SIGHUP, reload, keys)


@asynccontextmanager
async def running(config: ProxyConfig, *, grace_s: float = GRACE_S) -> AsyncIterator[Running]:
    """Gives a proxy that listens; when left it stops in order, running requests first."""
    async with AsyncExitStack() as stack:
        listening = config.listen
        admin_port = listening.admin_port
        if admin_port is None:
            admin_port = listening.port + 1 if listening.port else 0
        # Taken before anything is started, so that a port in use stops the start at once.
        public_socket = stack.enter_context(bind(listening.host, listening.port, "--port"))
        admin_socket = stack.enter_context(bind(listening.admin_host, admin_port, "--admin-port"))
        surface = await _start(config, stack)
        public = await listen(api_application(surface), public_socket)
        stack.push_async_callback(public.cleanup)
        admin = await listen(admin_application(surface), admin_socket)
        stack.push_async_callback(admin.cleanup)
        stack.push_async_callback(_drain, surface, grace_s)
        host = f"[{listening.host}]" if ":" in listening.host else listening.host
        shown = "localhost" if host in ("0.0.0.0", "[::]") else host
        yield Running(Bound(public.port, admin.port, f"http://{shown}:{public.port}"), surface)


async def _drain(surface: Surface, grace_s: float) -> None:
    """Waits for running requests; ends those that outlast the grace."""
    drain = surface.drain
    drain.close()
    if not await drain.idle(grace_s):
        proxy_log.warning("%d requests outlasted the grace of %g s and are ended", drain.running, grace_s)
        drain.expire()
        await drain.idle(LAST_WORD_S)


async def _start(config: ProxyConfig, stack: AsyncExitStack) -> Surface:
    """Starts store, worker and upstream client; `stack` stops them."""
    data_dir = Path(config.data_dir)
    listed = configured_keys(config.keys, config.key_file, config.upstreams)
    keys = KeyRing(listed, server_secret(data_dir), config.limits)
    telemetry = Telemetry(config.telemetry)
    stack.push_async_callback(asyncio.to_thread, telemetry.close)
    sessions = Sessions(config.store, data_dir, telemetry)
    stack.push_async_callback(sessions.close)
    await sessions.start()
    local, supervisor = await _start_worker(config, telemetry, stack)
    client = make_session()
    stack.push_async_callback(client.close)
    several = len({key.tenant for key in config.keys}) > 1
    upstreams = [Upstream(upstream, client, telemetry, time.monotonic, several) for upstream in config.upstreams]
    routes: list[Route] = [*([] if local is None else [local]), *upstreams]
    return Surface(
        config=config,
        keys=keys,
        sessions=sessions,
        dispatcher=Dispatcher(routes, config.deadlines, config.retry, telemetry, time.monotonic),
        catalogue=Catalogue(
            config.worker, config.upstreams, lambda: None if local is None else local.card, int(time.time())
        ),
        telemetry=telemetry,
        worker=local,
        upstreams=tuple(
            ModelSource(made.name, bool(given.models), made.models)
            for given, made in zip(config.upstreams, upstreams, strict=True)
        ),
        refusals=Refusals(config.listen.max_refused_per_minute if listed else 0),
        failure=lambda: None if supervisor is None or supervisor.pid is not None else supervisor.failure,
        refused=asyncio.Event() if supervisor is None else supervisor.refused,
    )


async def _start_worker(
    config: ProxyConfig, telemetry: Telemetry, stack: AsyncExitStack
) -> tuple[LocalRoute | None, Supervisor | None]:
    """Starts what the worker's mode asks for: a route and its supervisor, a route, or nothing."""
    worker = config.worker
    if worker.mode == "none":
        return None, None
    if worker.mode == "attach":
        local = LocalRoute(Path(worker.socket or ""), telemetry, hang_s=worker.hang_s)
        stack.push_async_callback(local.close)
        await local.start()
        return local, None
    if worker.engine is None:
        raise ConfigError("worker.engine is not set: a worker needs to know its model", param="worker.engine")
    socket = Path(worker.socket) if worker.socket else worker_socket(Path(config.data_dir))
    local = LocalRoute(socket, telemetry, hang_s=worker.hang_s, coming=lambda: not supervisor.refused.is_set())
    supervisor = Supervisor(worker, worker_command(worker.engine, socket), local.pulse, telemetry)
    stack.push_async_callback(supervisor.stop)
    stack.push_async_callback(local.close)
    await supervisor.start()
    await local.start()
    return local, supervisor


def banner(config: ProxyConfig, bound: Bound) -> str:
    """Returns what a person sees first."""
    lines = [
        f"magnitude {product_version()}",
        f"  base_url   {bound.url}",
        f"  model      {config.worker.model if config.worker.mode != 'none' else 'none, upstreams only'}",
        f"  upstreams  {', '.join(f'{u.name} ({u.url})' for u in config.upstreams) or 'none'}",
        f"  store      {_shown_store(config)}",
        f"  metrics    http://{config.listen.admin_host}:{bound.admin_port}/metrics",
    ]
    return "\n".join(lines) + "\n\n"


def example(config: ProxyConfig, bound: Bound) -> str:
    """Returns a request to copy."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello!"}], "stream": True})
    key = " -H 'authorization: Bearer YOUR_KEY'" if config.keys or config.key_file else ""
    return f"\n  curl -N {bound.url}/chat/completions{key} -H 'content-type: application/json' -d '{body}'\n\n"


def _shown_store(config: ProxyConfig) -> str:
    """Returns the store without credentials."""
    url = config.store.url
    if url is None:
        return "embedded"
    return "memory" if url == "none" else url.rpartition("@")[2]


async def tell_loading(surface: Surface, stream: TextIO) -> None:
    """Says on `stream` when the model is ready, with a running count of seconds on a terminal, and why it is not."""
    worker, began, told = surface.worker, surface.clock(), ""
    if worker is None:
        return
    terminal = stream.isatty()
    start = "\r" if terminal else ""
    while not worker.available():
        failure = surface.failure()
        if failure and failure != told:
            stream.write(f"{start}the worker is not ready: {failure}\n")
            told = failure
        elif terminal:
            stream.write(f"\rloading the model … {surface.clock() - began:.0f} s ")
        stream.flush()
        await asyncio.sleep(LOOK_S)
    name = worker.card.name if worker.card is not None else "the model"
    stream.write(f"{start}{name} is ready after {surface.clock() - began:.1f} s\n")
    stream.flush()
