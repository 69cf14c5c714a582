"""What drafting knows of one sequence, and what it did for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from magnitude_engine.draft.need import StepKind

Reason = Literal["drafted", "not worth it", "nothing known"]

FENCE = "```"


class Decision(NamedTuple):
    """What was decided about a sequence in a step, and why.

    Attributes:
        proposers: whose tokens are verified.
        nodes: how many.
        expected: how many of them are expected to be right.
        reason: `drafted` where it is worth its cost; `not worth it` where what was proposed, or would have been, is
            less likely than it costs; `nothing known` where nobody had anything to propose.
    """

    proposers: tuple[str, ...]
    nodes: int
    expected: float
    reason: Reason


@dataclass(slots=True)
class Use:
    """Tokens of one proposer that were verified, and those of them that were right."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DraftRecord:
    """Of one sequence, from its first step to its end.

    Attributes:
        uses: by proposer; a token that two proposed counts for both.
        reasons: in how many steps was decided what.
        watched: whether the model's confidence is wanted with each token.
        confidence: how sure the model was of the last token that was drawn (`Signs.confidence`).
    """

    uses: dict[str, Use] = field(default_factory=dict)
    reasons: dict[Reason, int] = field(default_factory=dict)
    watched: bool = False
    confidence: tuple[float, float] | None = None
    _fences: int = 0
    _held: str = ""

    def decided(self, decision: Decision) -> None:
        """Takes note of a step's decision."""
        self.reasons[decision.reason] = self.reasons.get(decision.reason, 0) + 1

    def settled(self, proposer: str, drafted: int, accepted: int) -> None:
        """Takes note of what became of a proposer's tokens."""
        use = self.uses.setdefault(proposer, Use())
        use.drafted += drafted
        use.accepted += accepted

    def heard(self, text: str) -> None:
        """Takes note of plain text that the sequence has written."""
        text = self._held + text
        self._fences += text.count(FENCE)
        # A fence may come in pieces; what was counted must not be counted again.
        self._held = text[len(text.rstrip(FENCE[0])) :] if not text.endswith(FENCE) else ""

    def kind(self, in_call: bool) -> StepKind:
        """Returns what is being written."""
        if in_call:
            return "call"
        return "code" if self._fences % 2 else "text"


def total(records: Iterable[DraftRecord]) -> dict[str, Use]:
    """Returns the tokens of each proposer in all records."""
    sums: dict[str, Use] = {}
    for record in records:
        for name, use in record.uses.items():
            whole = sums.setdefault(name, Use())
            whole.drafted += use.drafted
            whole.accepted += use.accepted
    return sums


def decided(records: Iterable[DraftRecord]) -> dict[str, int]:
    """Returns in how many steps was decided what, in all records."""
    sums: dict[str, int] = {}
    for record in records:
        for reason, steps in record.reasons.items():
            sums[reason] = sums.get(reason, 0) + steps
    return sums
