"""Keeps one worker process running: spawned, watched, killed when it hangs, started again after a pause.

A worker is judged by what it does, not by whether it answers: `Pulse` says since when its step counter has stood
still while work waits. A verdict needs two looks in a row, since this process may itself have been the one that
stood still. Nothing is supervised in mode `attach`: there the worker has its own watchdog.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from magnitude_engine.config import EngineConfig
from magnitude_proxy import process
from magnitude_proxy.config import WorkerConfig
from magnitude_proxy.telemetry import WORKER_HANGS, WORKER_STARTS, Telemetry, worker_log
from magnitude_proxy.worker.local import Pulse

Verdict = Literal["fine", "hung", "not_ready"]

RESTART_FIRST_S = 0.2
RESTART_MOST_S = 30.0
HEALTHY_S = 60.0
GRACE_S = 3.0
STOP_S = 5.0
LAST_WORDS_S = 1.0
LOOK_S = 0.5
LINE_BYTES = 1024 * 1024
EXIT_REFUSED = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a worker may take: to become ready, and to make no progress."""

    start_s: float
    hang_s: float


def worker_socket(data_dir: Path) -> Path:
    """Returns a new socket path for a worker of this process, in a folder for this user alone.

    Sockets there that nobody listens on, left by processes that were killed, are removed.
    """
    folder = process.private_folder(data_dir / "worker")
    for left in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            if probe.connect_ex(str(left)) == errno.ECONNREFUSED:
                left.unlink(missing_ok=True)
    return process.socket_path(folder, f"{secrets.token_hex(4)}.sock")


def worker_command(engine: EngineConfig, path: Path) -> tuple[str, ...]:
    """Returns the command line of a worker that serves `engine` on the socket `path`."""
    config = msgspec.json.encode(engine).decode()
    module = ("-m", "magnitude_engine.main")
    grace = ("--grace", f"{GRACE_S:g}")
    return (sys.executable, *module, "--config", config, "--socket", str(path), *grace, "--parent-death")


def next_pause(last_s: float, lived_s: float, status: int) -> float:
    """Returns how long to wait before the next start, before jitter.

    Args:
        last_s: the pause before this start, 0 for the first.
        lived_s: how long the worker ran.
        status: its exit status; one that refuses its model or settings will do so again.
    """
    if status == EXIT_REFUSED:
        return RESTART_MOST_S
    if last_s == 0 or lived_s >= HEALTHY_S:
        return RESTART_FIRST_S
    return min(last_s * 2, RESTART_MOST_S)


def judge(pulse: Pulse, pid: int, unreached_s: float, was_ready: bool, limits: Limits) -> Verdict:
    """Returns what one look at the worker `pid` says.

    `unreached_s` counts from its start or from when it was last connected (`was_ready`).
    """
    if pulse.pid == pid:
        return "hung" if pulse.hung(limits.hang_s) else "fine"
    if was_ready:
        return "hung" if unreached_s >= limits.hang_s else "fine"
    return "not_ready" if unreached_s >= limits.start_s else "fine"


class Supervisor:
    """Runs `command` for as long as it is started; `start` and `stop` belong to the owner.

    Attributes:
        failure: why the worker ended the last time, in one line; None once one is ready again.
        refused: set once a worker refused its model or settings; it would do so again.
        restarts: how many workers followed the first.
    """

    def __init__(
        self,
        config: WorkerConfig,
        command: Sequence[str],
        pulse: Callable[[], Pulse],
        telemetry: Telemetry,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`pulse` looks at the worker (`LocalRoute.pulse`); `clock` is monotonic; `jitter` gives 0..1."""
        self._limits = Limits(config.start_s, config.hang_s)
        self._command = tuple(command)
        self._pulse = pulse
        self._telemetry = telemetry
        self._clock = clock
        self._jitter = jitter
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_error = ""
        self.failure: str | None = None
        self.refused = asyncio.Event()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """Process id of the worker while it runs."""
        child = self._process
        return child.pid if child is not None and child.returncode is None else None

    async def start(self) -> None:
        """Begins to spawn; the worker is ready when the route that gives the pulse is available."""
        self._task = asyncio.create_task(self._keep_running(), name="magnitude-supervisor")

    async def stop(self) -> None:
        """Ends the worker, with SIGKILL after a grace, and returns when it is reaped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _keep_running(self) -> None:
        pause = 0.0
        while True:
            began = self._clock()
            status = await self._run_once()
            pause = next_pause(pause, self._clock() - began, status)
            if status == EXIT_REFUSED:
                self.refused.set()
            wait = pause * (0.5 + 0.5 * self._jitter())
            worker_log.error("%s; next start in %.1f s", self.failure, wait)
            await asyncio.sleep(wait)
            self.restarts += 1

    async def _run_once(self) -> int:
        """Spawns one worker and returns its exit status; it is gone when this ends, also by cancellation."""
        try:
            child = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=LINE_BYTES,
                preexec_fn=process.die_with_parent(),
                start_new_session=True,
            )
        except OSError as error:
            self.failure = f"the worker cannot be started: {error}"
            return EXIT_REFUSED
        self._process = child
        self._last_error = ""
        self._telemetry.count(WORKER_STARTS)
        worker_log.info("worker started as process %d", child.pid)
        streams = ((child.stdout, logging.DEBUG), (child.stderr, logging.INFO))
        output = [asyncio.create_task(self._follow(stream, level)) for stream, level in streams]
        try:
            reason = await self._watch(child)
            # A grandchild may hold the pipes open: its words are not waited for.
            await asyncio.wait(output, timeout=LAST_WORDS_S)
        finally:
            for task in output:
                task.cancel()
            status = await process.stop(child, STOP_S)
        self.failure = reason or _epitaph(status, self._last_error)
        return status

    async def _watch(self, child: asyncio.subprocess.Process) -> str | None:
        """Returns when the worker has ended: None if it did so by itself, else why it was killed."""
        ended = asyncio.create_task(child.wait())
        reached, ready, suspicion = self._clock(), False, 0
        try:
            while True:
                await asyncio.wait((ended,), timeout=min(LOOK_S, self._limits.hang_s / 4))
                if ended.done():
                    return None
                pulse = self._pulse()
                now = self._clock()
                if pulse.pid == child.pid:
                    reached, ready = now, True
                    self.failure = None
                verdict = judge(pulse, child.pid, now - reached, ready, self._limits)
                suspicion = suspicion + 1 if verdict != "fine" else 0
                if suspicion >= 2:
                    await process.kill(child)
                    return self._killed(verdict)
        finally:
            ended.cancel()

    def _killed(self, verdict: Verdict) -> str:
        """Counts a worker that was killed and returns the reason in words."""
        if verdict == "hung":
            self._telemetry.count(WORKER_HANGS)
            return f"the worker made no progress for {self._limits.hang_s:g} s and was killed"
        return f"the worker was not ready after {self._limits.start_s:g} s and was killed"

    async def _follow(self, stream: asyncio.StreamReader | None, level: int) -> None:
        """Logs the lines of `stream` until it ends; the last one of stderr explains an exit."""
        while stream is not None:
            try:
                line = await stream.readline()
            except ValueError:
                continue
            if not line:
                return
            text = line.decode("utf-8", "replace").rstrip()
            worker_log.log(level, "%s", text)
            if level == logging.INFO and text:
                self._last_error = text


def _epitaph(status: int, last_error: str) -> str:
    """Returns how a worker ended: by a signal, or by itself with its own last words."""
    if status < 0:
        return f"the worker ended with signal {-status} ({signal.strsignal(-status)})"
    return f"the worker ended with status {status}" + (f": {last_error}" if last_error else "")
