"""How likely the next token is guessed before anything is computed to guess it, and what a guess is worth.

What is free to know, the signs, falls into buckets: the kind of text, how narrow the grammar is, and how sure the
model was of the last token (entropy, and the margin between its two likeliest). A table counts for each bucket and
proposer how often the next token was guessed, and where a bucket has seen little, what the proposer did at all
stands in. A second table of the same kind turns the probability that a proposer gives its own guess into how often
such guesses are right: noise that is keyed makes a sampled guess right more often than its probability says.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Literal, NamedTuple

StepKind = Literal["call", "code", "text"]
Grip = Literal["free", "open", "narrow"]

# Cases that what stands in for a bucket counts as, and after which older ones fade.
PRIOR_CASES = 8.0
MEMORY_CASES = 256.0
_ENTROPIES = (0.1, 0.5, 1.5)
_MARGINS = (0.2, 0.8)
# Allowed tokens up to which a grammar leaves little to guess.
_NARROW = 64


class Signs(NamedTuple):
    """What is known before a token is guessed.

    Attributes:
        kind: what is being written.
        grip: how much the grammar leaves open.
        confidence: how sure the model was of the last token: entropy in nats, and by how much the likeliest token led,
            as probability; None where nothing was drawn yet.
    """

    kind: StepKind
    grip: Grip
    confidence: tuple[float, float] | None

    @property
    def bucket(self) -> tuple[Hashable, ...]:
        """Returns the bucket that it falls into."""
        if self.confidence is None:
            return self.kind, self.grip, -1, -1
        entropy, margin = self.confidence
        return self.kind, self.grip, _level(entropy, _ENTROPIES), _level(margin, _MARGINS)


class Odds:
    """How often something is right, by bucket; older cases fade."""

    def __init__(self) -> None:
        self._cases: dict[Hashable, tuple[float, float]] = {}

    def of(self, bucket: Hashable, prior: float) -> float:
        """Returns the share, 0..1; `prior` counts as `PRIOR_CASES` cases."""
        cases, right = self._cases.get(bucket, (0.0, 0.0))
        return (right + PRIOR_CASES * prior) / (cases + PRIOR_CASES)

    def learn(self, bucket: Hashable, right: bool) -> None:
        """Takes in a case."""
        cases, rights = self._cases.get(bucket, (0.0, 0.0))
        if cases >= MEMORY_CASES:
            cases, rights = cases / 2, rights / 2
        self._cases[bucket] = cases + 1, rights + right


class Need:
    """The two tables; owned by the controller.

    Args:
        hope: the chance of a proposer of which nothing is known.
    """

    def __init__(self, hope: float = 0.7) -> None:
        self._hope = hope
        self._chances = Odds()
        self._worth = Odds()

    def chance(self, proposer: str, signs: Signs) -> float:
        """Returns how likely the proposer's next guess is right."""
        return self._chances.of((proposer, signs.bucket), self._chances.of(proposer, self._hope))

    def worth(self, proposer: str, stated: float, sampled: bool) -> float:
        """Returns how likely a guess is right that its proposer gives the probability `stated`.

        `sampled` guesses are drawn with the noise with which the model draws, others are the likeliest.
        """
        prior = math.sqrt(stated) if sampled else stated
        return self._worth.of((proposer, sampled, _tenth(stated)), prior)

    def learn(self, proposer: str, signs: Signs, right: bool) -> None:
        """Takes in whether a guess that `chance` was asked of was right."""
        self._chances.learn((proposer, signs.bucket), right)
        self._chances.learn(proposer, right)

    def learn_worth(self, proposer: str, stated: float, sampled: bool, right: bool) -> None:
        """Takes in whether a guess that `worth` was asked of was right."""
        self._worth.learn((proposer, sampled, _tenth(stated)), right)


def grip(allowed: int | None) -> Grip:
    """Returns how much a grammar leaves open that allows so many tokens; None allows all."""
    if allowed is None:
        return "free"
    return "narrow" if allowed <= _NARROW else "open"


def _level(value: float, bounds: tuple[float, ...]) -> int:
    return sum(value >= bound for bound in bounds)


def _tenth(probability: float) -> int:
    return min(int(probability * 10), 9)
