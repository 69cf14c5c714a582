"""Several threads through one compiled function: they share out work by counters and wait for each other in it.

Python's threads enter the function, which runs without Python's lock. Within it nobody sleeps: a wait lasts
microseconds unless the system has taken the processor away, and then the time is given to whoever needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from numba import types

from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.emit import INT64, Emitter, Value, written

_SPINS = 2000
_yield = types.ExternalFunction("sched_yield", types.int32())


def _write_take(e: Emitter, counter: Value, count: Value) -> Value:
    place = e.builder.inttoptr(counter, INT64.as_pointer())
    return e.builder.atomic_rmw("add", place, count, "seq_cst")


def _write_peek(e: Emitter, counter: Value) -> Value:
    place = e.builder.inttoptr(counter, INT64.as_pointer())
    return e.builder.load_atomic(place, "seq_cst", 8)


# Adds to the int64 at an address and returns what was there, at once for all threads.
take: Callable[[int, int], int] = written("aa", _write_take, types.int64)
_peek: Callable[[int], int] = written("a", _write_peek, types.int64)


@compiled
def meet(counter: int, threads: int) -> None:
    """Returns when all threads have called it as often as this one; `counter` is an int64 of zero at first."""
    if threads == 1:
        return
    arrived = take(counter, 1) + 1
    whole = (arrived + threads - 1) // threads * threads
    spins = 0
    while _peek(counter) < whole:
        spins += 1
        if spins > _SPINS:
            _yield()
            spins = 0


class Team:
    """Threads that wait to call a function together with whoever calls `run`.

    Args:
        size: how many threads call it, the caller's own included.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._start = [threading.Semaphore(0) for _ in range(size - 1)]
        self._ended = threading.Semaphore(0)
        self._call: Callable[[int], None] | None = None
        for index, start in enumerate(self._start, 1):
            threading.Thread(
                target=self._serve, args=(index, start), daemon=True, name=f"magnitude-cpu-{index}"
            ).start()

    def run(self, call: Callable[[int], None]) -> None:
        """Has every thread call `call` with its number, this one with 0; returns when all have."""
        self._call = call
        for start in self._start:
            start.release()
        call(0)
        for _ in self._start:
            self._ended.acquire()

    def close(self) -> None:
        """Ends the threads."""
        self._call = None
        for start in self._start:
            start.release()

    def _serve(self, index: int, start: threading.Semaphore) -> None:
        while True:
            start.acquire()
            call = self._call
            if call is None:
                return
            call(index)
            self._ended.release()
