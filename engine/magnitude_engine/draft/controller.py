"""How many drafted tokens a step verifies: as many as make it give the most tokens per second.

A step of `base` rows that gives `sequences` tokens takes `cost(base)` seconds. Every drafted token adds a row, and is
accepted with the probability that its proposer states:

    tokens per second with k drafted tokens = (sequences + p₁ + … + p_k) / cost(base + k)

The likeliest tokens come first; a token's probability includes those of all before it in its draft, so that no order
can break a draft. Zero is always a choice. Two guards keep a promise that does not hold from costing anything: stated
probabilities are corrected by what was accepted, and where steps with drafts give less than steps without would have,
drafting stops. Either way it is tried again after a pause that doubles, so that what has become true is noticed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORTH = 1.03
LEAST_RATIO = 0.99
SMOOTHING = 0.1
ENOUGH = 24
FIRST_PAUSE = 32
LONGEST_PAUSE = 2048
# Tokens that are verified to see whether promises hold again.
TRIAL = 2


class StepCosts:
    """Seconds of a step by its number of rows: measured at start, then followed as they drift."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """`measured` has the seconds of at least two numbers of rows, the first of them 1."""
        self._rows = sorted(measured)
        self._seconds = [measured[rows] for rows in self._rows]
        # More rows never take less: what is measured otherwise is noise.
        for at in range(1, len(self._seconds)):
            self._seconds[at] = max(self._seconds[at], self._seconds[at - 1])
        self._drift = 1.0

    def of(self, rows: int) -> float:
        """Returns the seconds of a step, between and beyond what was measured along straight lines."""
        at = min(max(bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        left, right = self._rows[at - 1], self._rows[at]
        slope = (self._seconds[at] - self._seconds[at - 1]) / (right - left)
        return self._drift * (self._seconds[at - 1] + slope * (rows - left))

    def note(self, rows: int, seconds: float) -> None:
        """Takes in a step: all costs drift with it (longer contexts, other load), the nearest measured one most."""
        ratio = min(2.0, max(0.5, seconds / self.of(rows)))
        self._drift *= ratio**SMOOTHING
        nearest = min(range(len(self._rows)), key=lambda at: abs(self._rows[at] - rows))
        self._seconds[nearest] *= ratio ** (SMOOTHING / 2)


@dataclass(slots=True)
class _Rate:
    """Tokens that were promised and that came, fading."""

    promised: float = 1.0
    came: float = 1.0

    @property
    def correction(self) -> float:
        return min(1.25, self.came / self.promised)

    def note(self, promised: float, came: int) -> None:
        self.promised += promised
        self.came += came
        if self.promised > ENOUGH:
            self.promised *= 0.75
            self.came *= 0.75


class Controller:
    """Decides for each step; owned by the engine's thread."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._rate = _Rate()
        self._gain = 1.0
        self._seen = 0
        self._paused = 0
        self._pause = FIRST_PAUSE
        self._held = 0
        self._trying = False

    def choose(self, drafts: Sequence[Sequence[float]], base: int) -> list[int]:
        """Returns how many tokens of each draft are verified.

        Args:
            drafts: for each sequence that gives a token in this step, the probabilities of its drafted tokens, each
                with all before it; they never rise.
            base: rows of the step without drafts.
        """
        chosen = [0] * len(drafts)
        self._trying = False
        if self._paused > 0:
            self._paused -= 1
            return chosen
        ranked = sorted(((p, at) for at, draft in enumerate(drafts) for p in draft), key=lambda each: -each[0])
        stated = [p for p, _ in ranked]
        correction = self._rate.correction
        best = self._best([p * correction for p in stated], len(drafts), base)
        if not best and correction < 1:
            best = self._trial(self._best(stated, len(drafts), base))
        for _, at in ranked[:best]:
            chosen[at] += 1
        return chosen

    def observe(self, outcome: Outcome) -> None:
        """Takes in what a step gave."""
        self.costs.note(outcome.rows + outcome.drafted, outcome.seconds)
        if not outcome.drafted:
            return
        if self._trying:
            self._judge(outcome)
            return
        self._rate.note(outcome.promised, outcome.accepted)
        plain = outcome.sequences / self.costs.of(outcome.rows)
        rate = (outcome.sequences + outcome.accepted) / outcome.seconds
        self._gain += SMOOTHING * (min(rate / plain, 4.0) - self._gain)
        self._seen += 1
        if self._gain < LEAST_RATIO and self._seen >= 8:
            self._paused, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
            self._gain, self._seen = 1.0, 0
        elif self._seen % ENOUGH == 0:
            self._pause = max(FIRST_PAUSE, self._pause // 2)

    def _best(self, probabilities: Sequence[float], sequences: int, base: int) -> int:
        """Returns how many of the likeliest tokens give the most per second; 0 where it is not worth the change."""
        best, best_rate = 0, WORTH * sequences / self.costs.of(base)
        expected = float(sequences)
        for count, probability in enumerate(probabilities, 1):
            expected += probability
            rate = expected / self.costs.of(base + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _trial(self, stated: int) -> int:
        """Returns how many tokens are tried, where `stated` of them would be if promises held: mostly none."""
        self._held += stated > 0
        if self._held < self._pause:
            return 0
        self._held = 0
        self._trying = True
        return min(stated, TRIAL)

    def _judge(self, outcome: Outcome) -> None:
        """Begins anew after a trial that kept its promise, and waits longer for the next after one that did not."""
        if 2 * outcome.accepted >= outcome.promised:
            self._rate, self._pause = _Rate(), FIRST_PAUSE
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A decode step.

    Attributes:
        rows: without drafts, `drafted` more with them.
        sequences: that gave a token at least.
        promised: sum of the probabilities that were stated for the drafted tokens, `accepted` of which were right.
    """

    rows: int
    sequences: int
    seconds: float
    drafted: int = 0
    promised: float = 0.0
    accepted: int = 0


class FixedDepth:
    """Verifies every token that is likelier than not, whatever it costs: for runs that must not depend on time."""

    def choose(self, drafts: Sequence[Sequence[float]], base: int) -> list[int]:
        """Returns how many tokens of each draft are verified."""
        return [sum(1 for p in draft if p >= 0.5) for draft in drafts]

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


def is_sane(measured: Mapping[int, float]) -> bool:
    """Returns whether measured costs can be used."""
    return len(measured) > 1 and 1 in measured and all(math.isfinite(s) and s > 0 for s in measured.values())
