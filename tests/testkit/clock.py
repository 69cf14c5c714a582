"""Time for tests: a clock that is moved by hand, and an event loop whose time passes without waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class ManualClock:
    """Monotonic seconds that move only by `advance`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Lets `seconds` pass."""
        self.now += seconds


class _SkippingSelector(selectors.DefaultSelector):
    """Never blocks: the time that a wait would take is added to `skipped`."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: every task waits and no timer is set")
        self.skipped += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop for code without sockets: sleeps and timeouts take no real time, in the right order."""

    def __init__(self) -> None:
        self._selector_clock = _SkippingSelector()
        super().__init__(self._selector_clock)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._selector_clock.skipped


def virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` in virtual time; `asyncio.get_running_loop().time` is its clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
