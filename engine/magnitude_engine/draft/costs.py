"""Seconds of a forward pass by its number of rows: measured at start, then followed as they drift."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping

SMOOTHING = 0.1


class StepCosts:
    """What a pass of so many rows takes."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """`measured` has the seconds of at least two numbers of rows, the first of them 1."""
        self._rows = sorted(measured)
        self._seconds = [measured[rows] for rows in self._rows]
        # More rows never take less, and other work can only slow a pass down: the larger figure is the wrong one.
        for at in range(len(self._seconds) - 2, -1, -1):
            self._seconds[at] = min(self._seconds[at], self._seconds[at + 1])
        self._drift = 1.0

    def of(self, rows: int) -> float:
        """Returns the seconds of a pass, between and beyond what was measured along straight lines."""
        at = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        left, right = self._rows[at - 1], self._rows[at]
        slope = (self._seconds[at] - self._seconds[at - 1]) / (right - left)
        return self._drift * (self._seconds[at - 1] + slope * (rows - left))

    def note(self, rows: int, seconds: float) -> None:
        """Takes in a pass: all costs drift with it (longer contexts, other load)."""
        self._drift *= bounded(seconds / self.of(rows)) ** SMOOTHING


def bounded(ratio: float) -> float:
    """Returns a ratio within what one pass may teach: what is outside is an interruption."""
    return min(2.0, max(0.5, ratio))


def is_sane(measured: Mapping[int, float]) -> bool:
    """Returns whether measured costs can be used."""
    return len(measured) > 1 and 1 in measured and all(math.isfinite(s) and s > 0 for s in measured.values())
