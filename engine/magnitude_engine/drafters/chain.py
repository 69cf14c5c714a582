"""Chains of drafted tokens that grow pass by pass, as long as the rule finds one more worth its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from magnitude_engine.decode.sample import RowSpec, draw
from magnitude_engine.draft.controller import Rule, Stage
from magnitude_engine.draft.need import Signs
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.kv.lease import Lease
from magnitude_engine.model.batch import KeyValueCache
from magnitude_engine.model.runner import Runner
from magnitude_engine.request import Sequence as Choice
from magnitude_engine.step import row_specs


class Guess(NamedTuple):
    """A token, and the probability that its proposer gives it."""

    token: int
    stated: float


@dataclass(slots=True)
class Chain:
    """A draft of one sequence that grows.

    Attributes:
        lease: of the sequence.
        signs: what is known before its first token.
        room: tokens that it may have at most.
        covered: how likely what others proposed holds the token at each depth, from 1 on.
        guesses: tokens so far.
        scores: how likely each is right together with all before it.
    """

    sequence: Choice
    lease: Lease
    signs: Signs
    room: int
    covered: Sequence[float]
    guesses: list[Guess] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The drafted tokens."""
        return [guess.token for guess in self.guesses]

    @property
    def sampled(self) -> bool:
        """Whether its tokens are drawn."""
        return self.sequence.prepared.generate.sampling.temperature > 0

    def tree(self) -> DraftTree:
        """Returns the draft."""
        count = len(self.guesses)
        return DraftTree(tuple(self.tokens), tuple(range(-1, count - 1)), tuple(self.scores))

    def gain(self, chance: float) -> float:
        """Returns how likely one more token is right and was not proposed by others."""
        depth = len(self.guesses)
        covered = self.covered[depth] if depth < len(self.covered) else 0.0
        return max((self.scores[-1] if self.scores else 1.0) * chance - covered, 0.0)

    def spec(self) -> RowSpec:
        """Returns how the model would draw what comes next, with the probability of what is drawn."""
        return replace(row_specs(self.sequence, self.tree())[-1], logprobs=0)


class Pass(NamedTuple):
    """What a forward pass computes, for measuring it: in a cache whose first `pages` pages nobody uses yet."""

    runner: Runner
    tensors: KeyValueCache
    pages: int
    layers: tuple[int, ...] | None = None


class Drafter(Protocol):
    """A proposer that computes.

    Attributes:
        name: as in usage.
    """

    name: str

    def a_pass(self, unused: int) -> Pass:
        """Returns what its passes compute; `unused` pages of the model's own cache are."""

    def begin(self, chains: Sequence[Chain]) -> list[Chain]:
        """Makes room for the longest chains; returns those that there is room for."""

    def behind(self, chain: Chain) -> int:
        """Returns how many rows must be computed before it can guess, the guessing one not counted."""

    def catch_up(self, chain: Chain) -> int:
        """Computes a part of what it is behind; returns how many rows."""

    def guess(self, chains: Sequence[Chain]) -> tuple[list[Guess], int]:
        """Computes one token behind each chain, in one pass; returns how many rows that had, too."""

    def leave(self, sequence: Choice) -> None:
        """The sequence has ended or lost its seat."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What decides how far chains grow, and by which clock passes are measured."""

    rule: Rule
    stage: Stage
    clock: Callable[[], float]


# A chain that is further behind catches up in a pass of its own.
FEW_ROWS = 16


def grow(drafter: Drafter, chains: Sequence[Chain], pace: Pace) -> float:
    """Lets chains grow; returns the seconds that it took. One that is far behind catches up by a part instead."""
    rule = pace.rule
    hopes = {id(chain): rule.chance(drafter.name, chain.signs) for chain in chains}
    hopeful = [chain for chain in chains if chain.room > 0 and chain.gain(hopes[id(chain)]) > 0]
    if not rule.goes_on(drafter.name, 0, [chain.gain(hopes[id(chain)]) for chain in hopeful], pace.stage):
        return 0.0
    began = pace.clock()
    placed = drafter.begin(hopeful)
    for chain in placed:
        if (behind := drafter.behind(chain)) > FEW_ROWS and rule.affords(drafter.name, behind):
            drafter.catch_up(chain)
    live = [chain for chain in placed if drafter.behind(chain) <= FEW_ROWS]
    depth, stage = 0, pace.stage
    while live and (depth == 0 or rule.goes_on(drafter.name, depth, _gains(live, hopes), stage)):
        passed = pace.clock()
        guesses, rows = drafter.guess(live)
        rule.passed(drafter.name, rows, pace.clock() - passed)
        for chain, guess in zip(live, guesses, strict=True):
            _add(chain, guess, rule.worth(drafter.name, guess.stated, chain.sampled))
        depth += 1
        stage = stage._replace(drafted=stage.drafted + len(live))
        live = [chain for chain in live if depth < chain.room and chain.guesses[-1].token >= 0]
    return pace.clock() - began


def drawn(logits: torch.Tensor, specs: Sequence[RowSpec]) -> list[Guess]:
    """Returns what is drawn from each row of `logits`; token -1 with probability 0 where they are not finite."""
    return [
        Guess(each.token, 0.0 if each.logprobs is None else min(torch.tensor(each.logprobs.logprob).exp().item(), 1.0))
        for each in draw(logits, specs)
    ]


def _gains(chains: Sequence[Chain], hopes: dict[int, float]) -> list[float]:
    return [chain.gain(hopes[id(chain)]) for chain in chains]


def _add(chain: Chain, guess: Guess, worth: float) -> None:
    if guess.token >= 0:
        chain.guesses.append(guess)
        chain.scores.append((chain.scores[-1] if chain.scores else 1.0) * worth)
