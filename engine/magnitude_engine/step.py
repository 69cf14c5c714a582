"""Turns a plan into the tensors of one forward pass and into the rows to draw tokens from."""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from typing import NamedTuple

import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.decode.sample import RowSpec
from magnitude_engine.kv.manager import Lease
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.request import Sequence


class Work(NamedTuple):
    """`rows` tokens of a sequence, computed in this step after the `lease.length` that are in the cache.

    The lease has pages for them; it is carried along because the sequence may lose its own before the step ends.
    """

    sequence: Sequence
    lease: Lease
    rows: int

    @property
    def draws(self) -> bool:
        """Whether the step reaches the sequence's last token, so that its next one can be drawn."""
        return self.rows == self.sequence.missing


def build_batch(work: Sequences[Work], device: torch.device) -> StepBatch:
    """Returns the forward pass for `work`; logits are wanted for the last row of each sequence that draws."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[SequenceRows] = []
    logit_rows: list[int] = []
    for sequence, lease, rows in work:
        first, last = lease.length, lease.length + rows
        spans.append(SequenceRows(start=len(ids), count=rows, context=last, pages=tuple(lease.pages)))
        ids += sequence.tokens[first:last]
        positions += range(first, last)
        slots += [lease.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(first, last)]
        if last == len(sequence.tokens):
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
