"""Several threads through one compiled function: they share out work by counters and wait for each other in it.

The threads stay in compiled code, without Python's lock, which others of the process hold meanwhile. From one step to
the next they sleep. Within a step nobody sleeps: a wait lasts microseconds unless the system has taken the processor
away, and then the time is given to whoever needs it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from numba import types

from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.emit import INT64, Emitter, Value, number, set_number, written

_SPINS = 2000
# What a team's threads look at, in int64: whether it was closed, steps begun, threads that have done their part of
# one, and behind these a semaphore of the system for each thread.
_CLOSED, _BEGUN, _DONE, _SEATS = range(4)
_SEAT = 8

_yield = types.ExternalFunction("sched_yield", types.int32())
_make_seat = types.ExternalFunction("sem_init", types.int32(types.int64, types.int32, types.uint32))
_wake = types.ExternalFunction("sem_post", types.int32(types.int64))
_sleep = types.ExternalFunction("sem_wait", types.int32(types.int64))
_try_seat = types.ExternalFunction("sem_trywait", types.int32(types.int64))


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
    _until(counter, (arrived + threads - 1) // threads * threads)


@compiled
def _until(counter: int, count: int) -> None:
    """Returns when a counter has come to `count`."""
    spins = 0
    while _peek(counter) < count:
        spins += 1
        if spins > _SPINS:
            _yield()
            spins = 0


@compiled
def begin(team: int, threads: int) -> None:
    """Wakes all threads but 0, whose part of the step is to call it."""
    set_number(team, _BEGUN, number(team, _BEGUN) + 1)
    for thread in range(1, threads):
        _wake(_seat(team, thread))


@compiled
def end(team: int, threads: int) -> None:
    """Returns when all threads but 0 have done their part of the steps that were begun."""
    _until(team + _DONE * 8, number(team, _BEGUN) * (threads - 1))


@compiled
def asked(team: int, thread: int) -> bool:
    """Returns for each step that was begun, True; False when the team was closed."""
    seat, spins = _seat(team, thread), 0
    while _try_seat(seat) != 0:
        spins += 1
        if spins > _SPINS:
            # Interrupted by a signal, it has not been woken.
            while _sleep(seat) != 0:
                pass
            break
    return _peek(team + _CLOSED * 8) == 0


@compiled
def done(team: int) -> None:
    """To be called by a thread other than 0 when it has done its part of a step."""
    take(team + _DONE * 8, 1)


@compiled
def _seat(team: int, thread: int) -> int:
    return team + (_SEATS + thread * _SEAT) * 8


@compiled
def _make(team: int, threads: int) -> None:
    for thread in range(threads):
        _make_seat(_seat(team, thread), 0, 0)


@compiled
def _close(team: int, threads: int) -> None:
    take(team + _CLOSED * 8, 1)
    begin(team, threads)


class Team:
    """Threads that compute steps with whoever calls `work` as thread 0.

    Args:
        size: how many threads there are, thread 0 included.
        work: compiled, or what calls compiled code; takes the team's address and a thread's number. As thread 0 it
            computes one step with the others, between `begin` and `end`; as any other one step, then `done`, for each
            time that it is `asked`.
    """

    def __init__(self, size: int, work: Callable[[int, int], None]) -> None:
        self.size = size
        self._state = np.zeros(_SEATS + size * _SEAT, np.int64)
        self._work = work
        _make(self._state.ctypes.data, size)
        for thread in range(1, size):
            arguments = (work, self._state, thread)
            threading.Thread(target=_take_part, args=arguments, daemon=True, name=f"magnitude-cpu-{thread}").start()

    def step(self) -> None:
        """Computes one step, as thread 0."""
        self._work(self._state.ctypes.data, 0)

    def close(self) -> None:
        """Ends the other threads."""
        _close(self._state.ctypes.data, self.size)


def _take_part(work: Callable[[int, int], None], state: npt.NDArray[np.int64], thread: int) -> None:
    # Holds what the thread looks at for as long as it does.
    work(state.ctypes.data, thread)
