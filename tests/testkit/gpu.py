"""Timing on a GPU: what a case is, and how its time and the device's bandwidth are measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch

COPY_BYTES = 1 << 30
WARM_UP = 10
REPEATS = 50


class Case(NamedTuple):
    """One size: the kernel, torch's own operations for the same, and the bytes that must move at least.

    Both functions take the number of the repetition, to go round several inputs that together exceed the cache.
    """

    name: str
    kernel: Callable[[int], object]
    torch: Callable[[int], object]
    least_bytes: int


def microseconds(work: Callable[[int], object]) -> float:
    """Returns the median device time of one call."""
    for i in range(WARM_UP):
        work(i)
    # All repetitions are queued before the first is waited for, so that launches do not count.
    marks = [(_mark(), _mark()) for _ in range(REPEATS)]
    for i, (begin, end) in enumerate(marks):
        begin.record()
        work(i)
        end.record()
    torch.cuda.synchronize()
    return statistics.median(float(begin.elapsed_time(end)) * 1000 for begin, end in marks)


def bytes_per_microsecond(device: torch.device) -> float:
    """Returns the bandwidth of a large copy, bytes read and bytes written together."""
    source = torch.ones(COPY_BYTES, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / microseconds(lambda _: target.copy_(source))


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
