"""Who drafts for a step, and how much of it is verified: whatever makes the step give the most tokens per second.

A step of `base` rows that gives `sequences` tokens takes `cost(base)` seconds. Every drafted token adds a row, and is
accepted with the probability that its proposer states:

    tokens per second with k drafted tokens = (sequences + p₁ + … + p_k) / cost(base + k)

The likeliest tokens come first; a token's probability includes those of all above it in its draft, so that any number
of the likeliest is a tree. Zero is always a choice.

A proposer that computes (a draft model, a part of the model itself) drafts token by token, for all sequences at once,
as long as one more pass is worth its cost: before the first by what is known without computing anything (`need.py`),
later by what it thinks of its own tokens. What others proposed already is worth nothing a second time.

Each proposer has an account that stops it where it does not pay (`guard.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from magnitude_engine.draft.costs import SMOOTHING, StepCosts, bounded
from magnitude_engine.draft.guard import GRANT, MOST, Guard
from magnitude_engine.draft.need import Need, Signs
from magnitude_engine.draft.tree import DraftTree

WORTH = 1.03
# A pass that drafts must promise more: what is expected of it is known less well.
PASS_WORTH = 1.1
# Tokens that a proposer which computes may draft in a row.
LONGEST_CHAIN = 8
# A draft model must first compute the context, which is paid back over many steps.
MODEL_GRANT, MODEL_MOST = 64.0, 256.0
# How far the cost of drafted rows may depart from that of a chain as measured at the start.
_MOST_DEARER = 32.0
# After so many steps with drafts one goes without: under other load, what drafts cost shows only beside it.
_MOST_IN_A_ROW = 32
# How sure a guess must be in steps that do not depend on time.
LIKELY = 0.5
# Small drafts take in less likely tokens, too, which is where they fork.
SMALL, POSSIBLE = 8, 0.15


class Stage(NamedTuple):
    """A step whose drafts are being made.

    Attributes:
        base: its rows without drafts, and `sequences` how many tokens it gives at least.
        drafted: tokens that were proposed for it so far.
    """

    base: int
    sequences: int
    drafted: int = 0


class Share(NamedTuple):
    """What one proposer had in a step.

    Attributes:
        drafted: its tokens that were verified.
        promised: sum of the probabilities that it stated for them, `accepted` of which were right.
        seconds: that it took to draft.
    """

    proposer: str
    drafted: int
    promised: float
    accepted: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """A decode step.

    Attributes:
        rows: without drafts, `drafted` more with them.
        sequences: that gave a token at least.
        seconds: of the pass that verifies.
        shares: by proposer; a token that two proposed is in both.
    """

    rows: int
    sequences: int
    seconds: float
    drafted: int = 0
    shares: tuple[Share, ...] = ()


class Rule(Protocol):
    """Decides for each step."""

    def begin(self) -> None:
        """A step begins."""

    def asks(self, proposer: str) -> bool:
        """Returns whether the proposer is asked in this step."""

    def offer(self, proposer: str, tree: DraftTree) -> DraftTree:
        """Returns a proposer's draft with the probabilities that it deserves."""

    def choose(self, drafts: Sequence[Sequence[float]], base: int) -> list[int]:
        """Returns how many tokens of each draft are verified.

        Args:
            drafts: for each sequence that gives a token in this step, the probabilities of its drafted tokens, each
                with all above it, the likeliest first.
            base: rows of the step without drafts.
        """

    def chance(self, proposer: str, signs: Signs) -> float:
        """Returns how likely a proposer that computes guesses the next token."""

    def worth(self, proposer: str, stated: float, sampled: bool) -> float:
        """Returns how likely its guess is right to which it gives the probability `stated`."""

    def affords(self, proposer: str, rows: int) -> bool:
        """Returns whether it may compute so many rows that draft nothing yet."""

    def goes_on(self, proposer: str, depth: int, gains: Sequence[float], stage: Stage) -> bool:
        """Returns whether it computes one more token for each sequence in `gains`.

        Args:
            depth: tokens that it has drafted in this step for each of them.
            gains: how likely each such token is accepted and was not proposed by others.
        """

    def passed(self, proposer: str, rows: int, seconds: float) -> None:
        """Takes in what a pass of a proposer that computes took."""

    def learn(self, proposer: str, signs: Signs | None, stated: float, sampled: bool, right: bool) -> None:
        """Takes in whether a guess was right that followed right ones only; `signs` those of a first guess."""

    def observe(self, outcome: Outcome) -> None:
        """Takes in what a step gave."""


class Controller:
    """Decides by measured costs; owned by the engine's thread.

    Args:
        costs: of the model's passes.
        passes: of the passes of each proposer that computes.
    """

    def __init__(self, costs: StepCosts, passes: Mapping[str, StepCosts] | None = None) -> None:
        self.costs = costs
        self.passes = dict(passes or {})
        # What drafted rows take by what was measured for as many rows of a chain at the start.
        self._dearer = 1.0
        self._drafted_in_a_row = 0
        self._need = Need()
        self._guards: dict[str, Guard] = {}

    def begin(self) -> None:
        """A step begins."""
        for guard in self._guards.values():
            guard.begin()

    def asks(self, proposer: str) -> bool:
        """Returns whether it has credit."""
        return self._guard(proposer).affords(0.0)

    def offer(self, proposer: str, tree: DraftTree) -> DraftTree:
        """Returns the draft as its guard offers it."""
        return self._guard(proposer).offer(tree)

    def choose(self, drafts: Sequence[Sequence[float]], base: int) -> list[int]:
        """Returns how many tokens of each draft are verified."""
        if self._drafted_in_a_row >= _MOST_IN_A_ROW:
            return [0] * len(drafts)
        ranked = sorted(((p, at) for at, draft in enumerate(drafts) for p in draft), key=lambda each: -each[0])
        best, best_rate = 0, WORTH * len(drafts) / self.costs.of(base)
        expected = float(len(drafts))
        for count, (probability, _) in enumerate(ranked, 1):
            expected += probability
            rate = expected / self._cost(base, count)
            if rate > best_rate:
                best, best_rate = count, rate
        chosen = [0] * len(drafts)
        for _, at in ranked[:best]:
            chosen[at] += 1
        return chosen

    def chance(self, proposer: str, signs: Signs) -> float:
        """Returns what the table says."""
        return self._need.chance(proposer, signs)

    def worth(self, proposer: str, stated: float, sampled: bool) -> float:
        """Returns what the table says."""
        return self._need.worth(proposer, stated, sampled)

    def affords(self, proposer: str, rows: int) -> bool:
        """Returns whether its credit is enough for so many rows."""
        return self._guard(proposer).affords(self.passes[proposer].of(rows) / self.costs.of(1))

    def goes_on(self, proposer: str, depth: int, gains: Sequence[float], stage: Stage) -> bool:
        """Returns whether a pass is worth it, or is due as a trial."""
        if depth >= LONGEST_CHAIN or not gains:
            return False
        token = self.costs.of(stage.base) / stage.sequences
        more = stage.drafted + len(gains)
        verifying = self._cost(stage.base, more) - self._cost(stage.base, stage.drafted)
        price = self.passes[proposer].of(len(gains)) + verifying
        guard = self._guard(proposer)
        if PASS_WORTH * price >= token * len(gains) or not guard.affords(price / self.costs.of(1)):
            return False
        return sum(gains) * token > PASS_WORTH * price or (depth == 0 and guard.trial_due())

    def passed(self, proposer: str, rows: int, seconds: float) -> None:
        """Follows the cost of its passes."""
        self.passes[proposer].note(rows, seconds)

    def learn(self, proposer: str, signs: Signs | None, stated: float, sampled: bool, right: bool) -> None:
        """Fills the tables."""
        self._need.learn_worth(proposer, stated, sampled, right)
        if signs is not None:
            self._need.learn(proposer, signs, right)

    def observe(self, outcome: Outcome) -> None:
        """Takes in costs, and settles the accounts."""
        # A step with drafts says nothing of one without, or what makes drafts dear would make them look worth it.
        if not outcome.drafted:
            self.costs.note(outcome.rows, outcome.seconds)
        self._drafted_in_a_row = self._drafted_in_a_row + 1 if outcome.drafted else 0
        plain = self.costs.of(outcome.rows)
        extra = self._cost(outcome.rows, outcome.drafted) - plain
        if outcome.drafted:
            ratio = (outcome.seconds - plain) / max(extra, 0.01 * plain)
            dearer = self._dearer * bounded(ratio) ** SMOOTHING
            self._dearer = min(_MOST_DEARER, max(1 / _MOST_DEARER, dearer))
        for share in outcome.shares:
            spent = share.seconds + (extra * share.drafted / outcome.drafted if outcome.drafted else 0.0)
            balance = share.accepted / outcome.sequences - spent / plain
            self._guard(share.proposer).settle(share.promised, share.accepted, balance)

    def _cost(self, base: int, drafted: int) -> float:
        """Returns the seconds of a step of `base` rows with so many drafted ones."""
        plain = self.costs.of(base)
        return plain + self._dearer * (self.costs.of(base + drafted) - plain)

    def _guard(self, proposer: str) -> Guard:
        guard = self._guards.get(proposer)
        if guard is None:
            credit = (MODEL_GRANT, MODEL_MOST) if proposer == "model" else (GRANT, MOST)
            guard = self._guards[proposer] = Guard(*credit)
        return guard


class FixedRule:
    """Verifies every token that is likelier than not, and of small drafts more: for runs that must not depend on time.

    Args:
        depths: how many tokens each proposer that computes drafts where others know nothing likely; what it drafts is
            verified.
    """

    def __init__(self, depths: Mapping[str, int] | None = None) -> None:
        self._depths = dict(depths or {"model": 4})

    def begin(self) -> None:
        """Nothing is kept."""

    def asks(self, proposer: str) -> bool:
        """Returns True."""
        return True

    def offer(self, proposer: str, tree: DraftTree) -> DraftTree:
        """Returns the draft as it is."""
        return tree

    def choose(self, drafts: Sequence[Sequence[float]], base: int) -> list[int]:
        """Returns how many tokens are likelier than not, or are among the first few and possible."""
        return [sum(1 for at, p in enumerate(draft) if p >= (POSSIBLE if at < SMALL else LIKELY)) for draft in drafts]

    def chance(self, proposer: str, signs: Signs) -> float:
        """Returns 1: a guess is all but certain, so that those of a whole chain are verified."""
        return 1.0

    def worth(self, proposer: str, stated: float, sampled: bool) -> float:
        """Returns 1, as `chance` does."""
        return 1.0

    def affords(self, proposer: str, rows: int) -> bool:
        """Returns whether it drafts at all."""
        return self._depths.get(proposer, 0) > 0

    def goes_on(self, proposer: str, depth: int, gains: Sequence[float], stage: Stage) -> bool:
        """Returns whether its depth is not reached and anybody gains."""
        return depth < self._depths.get(proposer, 0) and any(gain > LIKELY for gain in gains)

    def passed(self, proposer: str, rows: int, seconds: float) -> None:
        """Learns nothing."""

    def learn(self, proposer: str, signs: Signs | None, stated: float, sampled: bool, right: bool) -> None:
        """Learns nothing."""

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""
