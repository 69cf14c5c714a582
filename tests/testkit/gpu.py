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
    """One size: the kernel, torch's own operations for the same, and what must be done at least: bytes moved, and
    multiplications and additions on bf16 tensor cores.

    Both functions take the number of the repetition, to go round several inputs that together exceed the cache.
    """

    name: str
    kernel: Callable[[int], object]
    torch: Callable[[int], object]
    least_bytes: int
    least_flops: int = 0


class Rates(NamedTuple):
    """What a device does in a microsecond."""

    bytes: float
    flops: float

    def floor(self, case: Case) -> float:
        """Returns the microseconds below which no kernel can do `case`."""
        return max(case.least_bytes / self.bytes, case.least_flops / self.flops)


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


def rates(device: torch.device) -> Rates:
    """Returns the bandwidth of a large copy, and what a large product of bf16 matrices reaches."""
    size = 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return Rates(bytes_per_microsecond(device), 2 * size**3 / microseconds(lambda _: left @ right))


def _mark() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
