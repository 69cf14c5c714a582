"""Engines whose drafts a test writes, and a model that is a Markov chain."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch

from magnitude_engine.draft.controller import FixedRule
from magnitude_engine.draft.proposer import DEFAULT_LIMITS, Proposer
from magnitude_engine.draft.runs import PastRuns
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.draft.vote import Limits
from magnitude_engine.engine import Engine
from magnitude_engine.model.batch import KeyValueCache, StepBatch, StepOutput
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.request import Sequence as Choice
from magnitude_engine.speculation import Speculation

Drafter = Callable[[Choice], Sequence[int]]


class _Written:
    """Proposes what it is told to, as all but certain."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tuple(tokens)

    def propose(self, context: Sequence[int], limits: Limits = DEFAULT_LIMITS) -> DraftTree:
        count = len(self._tokens)
        return DraftTree(self._tokens, tuple(range(-1, count - 1)), (0.99,) * count)

    def observe(self, accepted: int, proposed: int) -> None:
        """Learns nothing."""


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
    """Writes drafts from the answers that will be given: right, wrong everywhere, or right up to a random place.

    Args:
        answers: output ids by prompt and choice, as far as the drafts may reach.
        errors: probability that a token is replaced by another.
    """

    def __init__(self, answers: dict[tuple[tuple[int, ...], int], list[int]], errors: float) -> None:
        self._answers = answers
        self._errors = errors

    def __call__(self, sequence: Choice) -> list[int]:
        at = len(sequence.output)
        draw = random.Random(len(sequence.tokens))
        known = self._answers[sequence.prepared.prompt, sequence.choice][at : at + draw.randint(1, 9)]
        return [token if draw.random() >= self._errors else token ^ 1 for token in known]


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
