"""Turns a plan into the tensors of one forward pass and into the rows to draw tokens from."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.decode.sample import RowSpec
from magnitude_engine.kv.lease import Lease
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.request import Sequence


class Rows(NamedTuple):
    """`rows` tokens of `tokens`, computed in this step after the `lease.length` that are in the cache.

    Attributes:
        lease: has pages for them.
        wanted: whether the logits of the last one are.
    """

    tokens: Sequences[int]
    lease: Lease
    rows: int
    wanted: bool = False


class Work(NamedTuple):
    """Rows of a sequence that runs; its lease is carried along because it may lose it before the step ends."""

    sequence: Sequence
    lease: Lease
    rows: int

    def share(self) -> Rows:
        """Returns what the model computes; the next token can be drawn where the sequence's last one is reached."""
        return Rows(self.sequence.tokens, self.lease, self.rows, self.rows == self.sequence.missing)


def build_batch(shares: Iterable[Rows], device: torch.device) -> StepBatch:
    """Returns the forward pass for `shares`."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[SequenceRows] = []
    logit_rows: list[int] = []
    for tokens, lease, rows, wanted in shares:
        first, last = lease.length, lease.length + rows
        spans.append(SequenceRows(start=len(ids), count=rows, context=last, pages=tuple(lease.pages)))
        ids += tokens[first:last]
        positions += range(first, last)
        slots += [lease.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(first, last)]
        if wanted:
            logit_rows.append(len(ids) - 1)

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return StepBatch(column(ids), column(positions), column(slots), tuple(spans), column(logit_rows))


def row_spec(sequence: Sequence) -> RowSpec:
    """Returns how the next token of `sequence` is drawn."""
    generate = sequence.prepared.generate
    return RowSpec(
        sampling=generate.sampling,
        choice=sequence.choice,
        position=len(sequence.tokens),
        path=sequence.output,
        mask=None,
        logprobs=generate.logprobs,
    )
