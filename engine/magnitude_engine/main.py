"""The worker process: loads a model and serves it on a unix socket.

    python -m magnitude_engine.main --config JSON --socket PATH [--parent-death]
    python -m magnitude_engine.main watch --config JSON --socket PATH       restarts the above (see watchdog.py)

JSON is an `EngineConfig`, as text or as the path of a file. When it listens, the worker prints one line of JSON
(`Ready`) on standard output; logs go to standard error. SIGTERM: new requests are refused, open ones may end
within the grace period, the rest are failed. Exit status:

    0   stopped on request
    2   settings or model cannot be used; one line on standard error says why; a restart will not help
    3   steps kept failing; a restart may help
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from magnitude_engine import api
from magnitude_engine.config import EngineConfig, cache_folder
from magnitude_engine.errors import ConfigError, ModelError
from magnitude_engine.kv.disk.folder import LOCK_WAIT_S, BlockFolder, SystemFiles
from magnitude_engine.telemetry import worker_log
from magnitude_engine.watchdog import WatchLimits, watch

if TYPE_CHECKING:
    from magnitude_engine.engine import Engine

PR_SET_PDEATHSIG = 1
DEFAULTS = WatchLimits()


class Exit(IntEnum):
    """Exit status of the worker; see the module's text."""

    STOPPED = 0
    UNUSABLE = 2
    GAVE_UP = 3


class Ready(api.Frozen, frozen=True, kw_only=True):
    """The line on standard output that says the worker listens."""

    event: str
    pid: int
    socket: str
    model: api.ModelCard


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the worker or the watchdog; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    if options.parent_death:
        die_with_parent()
    try:
        config = read_config(options.config)
        if options.mode == "watch":
            worker = ["--config", options.config, "--socket", options.socket, "--grace", str(options.grace)]
            limits = WatchLimits(hang_s=options.hang_s, start_s=options.start_s, grace_s=options.grace)
            return watch(
                [sys.executable, "-m", "magnitude_engine.main", *worker, "--parent-death"], options.socket, limits
            )
        return work(config, Path(options.socket), options.grace)
    except (ConfigError, ModelError) as error:
        print(f"magnitude worker: {error.message}", file=sys.stderr, flush=True)  # noqa: T201 - for the operator
        return Exit.UNUSABLE


def work(config: EngineConfig, path: Path, grace_s: float) -> int:
    """Loads the model and serves it until a signal comes; returns the exit status.

    Raises:
        ConfigError, ModelError: it cannot be served.
    """
    if config.kv_disk_mb and config.optimization_level != "off":
        # A folder in use is known at once, and a model takes long to load.
        BlockFolder(cache_folder(config), b"", SystemFiles(), LOCK_WAIT_S).close()
    # Torch and the model code take a second to import: the watchdog and a wrong setting must not wait for them.
    from magnitude_engine.engine import Engine
    from magnitude_engine.model.loader import load_model

    engine = Engine(load_model(config), config, incarnation=uuid.uuid4().hex)
    return asyncio.run(serve(engine, path, grace_s))


async def serve(engine: Engine, path: Path, grace_s: float) -> int:
    """Starts the engine and serves it until SIGTERM, SIGINT or its own end; returns the exit status."""
    from magnitude_engine.server import Server

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    gave_up = asyncio.Event()

    def give_up() -> None:
        gave_up.set()
        stop.set()

    def on_fatal() -> None:
        loop.call_soon_threadsafe(give_up)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    server = Server(engine, path)
    await server.start()
    engine.start(on_fatal)
    ready = Ready(event="ready", pid=os.getpid(), socket=str(path), model=engine.card)
    print(msgspec.json.encode(ready).decode(), flush=True)  # noqa: T201 - read by whoever started the worker
    await stop.wait()
    worker_log.info("stopping")
    server.stop_accepting()
    await asyncio.to_thread(engine.close, 0.0 if gave_up.is_set() else grace_s)
    await server.close()
    return Exit.GAVE_UP if gave_up.is_set() else Exit.STOPPED


def read_config(text: str) -> EngineConfig:
    """Returns the settings in `text`, which is JSON or the path of a JSON file.

    Raises:
        ConfigError: it is neither, or a setting is wrong.
    """
    try:
        data = text.encode() if text.lstrip().startswith("{") else Path(text).read_bytes()
        return msgspec.json.decode(data, type=EngineConfig)
    except OSError as error:
        raise ConfigError(
            f"--config: cannot read {text}: {error.strerror}; give JSON or a file", param="config"
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"--config: {error}; see magnitude_engine.config.EngineConfig", param="config") from error


def die_with_parent() -> None:
    """Asks Linux to end this process when the one that started it ends; elsewhere does nothing."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(Exit.STOPPED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m magnitude_engine.main", description="Magnitude's worker process")
    parser.add_argument("mode", nargs="?", choices=["serve", "watch"], default="serve", help="watch restarts a worker")
    parser.add_argument("--config", required=True, help="EngineConfig as JSON, or a file that holds it")
    parser.add_argument("--socket", required=True, help="path of the unix socket")
    parser.add_argument("--parent-death", action="store_true", help="end when the parent process ends")
    parser.add_argument(
        "--grace", type=float, default=DEFAULTS.grace_s, help="seconds that open requests get on SIGTERM"
    )
    parser.add_argument("--hang-s", type=float, default=DEFAULTS.hang_s, help="watch: seconds without a step")
    parser.add_argument("--start-s", type=float, default=DEFAULTS.start_s, help="watch: seconds until it listens")
    return parser


if __name__ == "__main__":
    sys.exit(main())
