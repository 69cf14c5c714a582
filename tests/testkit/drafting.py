"""Engines whose drafts a test writes, and a model that is a Markov chain."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch

from magnitude_engine.draft.controller import FixedRule
from magnitude_engine.draft.proposer import DEFAULT_LIMITS, Proposer
from magnitude_engine.draft.runs import PastRuns
from magnitude_engine.draft.tree import DraftTree, merge
from magnitude_engine.draft.vote import Limits
from magnitude_engine.engine import Engine
from magnitude_engine.model.batch import KeyValueCache, StepBatch, StepOutput
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.request import Sequence as Choice
from magnitude_engine.speculation import Speculation

Drafter = Callable[[Choice], DraftTree]


SURE = 0.99


def chain(tokens: Sequence[int]) -> DraftTree:
    """Returns a draft without forks, all but certain."""
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)), (SURE,) * len(tokens))


class _Written:
    """Proposes what it is told to."""

    def __init__(self, tree: DraftTree) -> None:
        self._tree = tree

    def propose(self, context: Sequence[int], limits: Limits = DEFAULT_LIMITS) -> DraftTree:
        return self._tree


class _Speculation(Speculation):
    def __init__(self, context: int, drafter: Drafter) -> None:
        super().__init__(FixedRule(), context, PastRuns(None, time.monotonic), time.monotonic)
        self._drafter = drafter

    def _proposers(self, sequence: Choice) -> list[tuple[str, Proposer]]:
        return [("written", _Written(self._drafter(sequence)))]


def drafted_by(drafter: Drafter, engine: Engine) -> Engine:
    """Returns the engine with its drafts written by `drafter`, which sees the sequence."""
    stepper = engine._stepper
    stepper.speculation = _Speculation(stepper._runner.shape.context, drafter)
    return engine


class Oracle:
    """Writes drafts from the answers that will be given, with paths beside them that are wrong.

    Args:
        answers: output ids by prompt and choice, as far as the drafts may reach.
        errors: probability that a token of the answer is replaced by another.
    """

    def __init__(self, answers: dict[tuple[tuple[int, ...], int], list[int]], errors: float) -> None:
        self._answers = answers
        self._errors = errors

    def __call__(self, sequence: Choice) -> DraftTree:
        at = len(sequence.output)
        draw = random.Random(len(sequence.tokens))
        known = self._answers[sequence.prepared.prompt, sequence.choice][at : at + draw.randint(1, 9)]
        return _beset([token if draw.random() >= self._errors else token ^ 1 for token in known], draw)


def _beset(path: Sequence[int], draw: random.Random) -> DraftTree:
    """Returns a draft with this path and others, which leave it at random and may go on as it does.

    Nodes of one depth stand in random order.
    """
    forks = draw.random() < 0.75
    tree = chain(path)
    for depth in range(len(path)):
        if forks and draw.random() < 0.6:
            tree = merge(tree, chain([*path[:depth], (path[depth] + 2) % 256, *path[depth + 1 : depth + 2]]))
    order = sorted(range(len(tree)), key=lambda node: (tree.depths[node], draw.random()))
    place = {-1: -1} | {node: at for at, node in enumerate(order)}
    parents = tuple(place[tree.parents[node]] for node in order)
    return DraftTree(tuple(tree.tokens[node] for node in order), parents, (SURE,) * len(order))


class _Chain:
    """A runner whose logits depend on the last token alone."""

    def __init__(self, model: LoadedModel, table: torch.Tensor) -> None:
        self._runner = model.runner
        self._table = table

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def forward(self, batch: StepBatch, cache: KeyValueCache) -> StepOutput:
        logits = self._table[batch.ids[batch.logit_rows]]
        return StepOutput(logits, torch.zeros(len(logits), 1))


def markov(model: LoadedModel, table: torch.Tensor) -> LoadedModel:
    """Returns the model with the logits `table[last token]`; it computes no keys and values."""
    return model._replace(runner=_Chain(model, table))  # type: ignore[arg-type]
