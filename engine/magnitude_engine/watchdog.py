"""Keeps a worker process alive; PID 1 of a worker container.

Starts the worker, restarts it with growing delays when it ends, kills it when it hangs, reaps every other process
that falls to it, and passes SIGTERM on. A worker hangs when it has work and its step counter stands still, when
it sends no status, or when it does not listen in time; one that is merely slow or idle does not. Exit status 2
(settings or model cannot be used) is passed on at once, since a restart will not help.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from magnitude_engine import api
from magnitude_engine.telemetry import worker_log

TICK_S = 0.2
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
HEALTHY_S = 60.0
EXIT_UNUSABLE = 2


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """Seconds: without progress while there is work; from start until it listens; from SIGTERM to SIGKILL."""

    hang_s: float = 20.0
    start_s: float = 300.0
    grace_s: float = 10.0


class Pulse:
    """Judges one worker by its status frames; all times are seconds of one monotonic clock."""

    def __init__(self, limits: WatchLimits, started: float) -> None:
        self._limits = limits
        self._started = started
        self._heard: float | None = None
        self._moved = started
        self._steps = -1
        self._busy = False

    def observe(self, status: api.Status, now: float) -> None:
        """Takes a status in."""
        self._heard = now
        busy = status.running + status.waiting > 0
        # Work that comes after an idle time starts the count anew.
        if status.steps != self._steps or not (busy and self._busy):
            self._moved = now
        self._steps, self._busy = status.steps, busy

    def verdict(self, now: float) -> str | None:
        """Returns why the worker must be killed; None while it is well."""
        limits = self._limits
        if self._heard is None:
            late = now - self._started > limits.start_s
            return f"it does not listen after {limits.start_s:g} s" if late else None
        if now - self._heard > limits.hang_s:
            return f"it has sent no status for {limits.hang_s:g} s"
        if self._busy and now - self._moved > limits.hang_s:
            return f"it has work and has not finished a step for {limits.hang_s:g} s"
        return None


def restart_delay(failures: int, chance: float) -> float:
    """Returns seconds before restart number `failures` (from 1); `chance` in 0..1 spreads them over a half."""
    return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(failures - 1, 10)) * (1 + chance / 2))


def reap() -> dict[int, int]:
    """Returns pid → exit status (negative: the signal) of all children that have ended, and lets them go."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def watch(command: Sequence[str], socket_path: str, limits: WatchLimits) -> int:
    """Runs `command` as worker until SIGTERM or SIGINT; returns the exit status."""
    return asyncio.run(Watchdog(command, socket_path, limits).run())


class Watchdog:
    """One worker and its successors; must run on the main thread and own all child processes."""

    def __init__(
        self,
        command: Sequence[str],
        socket_path: str,
        limits: WatchLimits,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._command = list(command)
        self._socket = socket_path
        self._limits = limits
        self._clock = clock
        self._chance = chance
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Returns 0 after a stop on request, 2 when the worker cannot be used."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        failures = 0
        while True:
            began = self._clock()
            status = await self._attend(self._spawn())
            if self._stop.is_set():
                return 0
            if status == EXIT_UNUSABLE:
                return EXIT_UNUSABLE
            failures = 1 if self._clock() - began > HEALTHY_S else failures + 1
            delay = restart_delay(failures, self._chance())
            worker_log.warning("the worker ended with status %d; it starts anew in %.1f s", status, delay)
            if await self._stopped_within(delay):
                return 0

    def _spawn(self) -> int:
        return os.posix_spawn(self._command[0], self._command, os.environ)

    async def _attend(self, pid: int) -> int:
        """Returns the exit status of the worker once it has ended."""
        pulse = Pulse(self._limits, self._clock())
        listener = asyncio.create_task(self._listen(pulse))
        told: float | None = None
        killed = False
        try:
            while True:
                ended = reap()
                if pid in ended:
                    return ended[pid]
                reason = pulse.verdict(self._clock())
                if told is not None and self._clock() - told > self._limits.grace_s + 1:
                    reason = "it has not stopped in time"
                if self._stop.is_set() and told is None:
                    told = self._clock()
                    os.kill(pid, signal.SIGTERM)
                elif reason is not None and not killed:
                    killed = True
                    worker_log.error("the worker is killed: %s", reason)
                    os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(TICK_S)
        finally:
            listener.cancel()

    async def _listen(self, pulse: Pulse) -> None:
        """Feeds the worker's status frames to `pulse`; connects again whenever the connection is lost."""
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket)
                try:
                    writer.write(api.encode_frame(api.Hello()))
                    frames = api.FrameReader(reader)
                    while True:
                        event = await frames.event()
                        if isinstance(event, api.Status):
                            pulse.observe(event, self._clock())
                finally:
                    writer.close()
            except (OSError, EOFError, ValueError, msgspec.MsgspecError):
                await asyncio.sleep(TICK_S)

    async def _stopped_within(self, seconds: float) -> bool:
        """Waits; True when a stop was asked for meanwhile."""
        ends = self._clock() + seconds
        while self._clock() < ends and not self._stop.is_set():
            reap()
            await asyncio.sleep(TICK_S)
        return self._stop.is_set()
