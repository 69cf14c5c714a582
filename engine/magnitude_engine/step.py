"""Turns a plan into the tensors of one forward pass and into the rows to draw tokens from."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.decode.sample import Drawn, RowSpec
from magnitude_engine.kv.lease import Lease
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.request import Sequence


class Rows(NamedTuple):
    """Tokens to compute in this step after the `lease.length` that are in the cache.

    Attributes:
        lease: has pages for them.
        wanted: of how many of the last ones the logits are needed.
    """

    tokens: Sequences[int]
    lease: Lease
    wanted: int = 0


class Work(NamedTuple):
    """Rows of a sequence that runs; its lease is carried along because it may lose it before the step ends.

    Attributes:
        rows: how many of its known tokens are computed.
        draft: tokens that may follow the last of them, computed behind it.
    """

    sequence: Sequence
    lease: Lease
    rows: int
    draft: tuple[int, ...] = ()

    def share(self) -> Rows:
        """Returns what the model computes.

        Tokens can be drawn where the sequence's last one is reached: one after it, and one after each of the draft.
        """
        first = self.lease.length
        tokens = [*self.sequence.tokens[first : first + self.rows], *self.draft]
        return Rows(tokens, self.lease, 1 + len(self.draft) if self.rows == self.sequence.missing else 0)


class Verified(NamedTuple):
    """What was drawn after a sequence's last token, and after each token of its draft."""

    sequence: Sequence
    draft: tuple[int, ...]
    drawn: tuple[Drawn, ...]


def build_batch(shares: Iterable[Rows], device: torch.device) -> StepBatch:
    """Returns the forward pass for `shares`."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[SequenceRows] = []
    logit_rows: list[int] = []
    for tokens, lease, wanted in shares:
        first, last = lease.length, lease.length + len(tokens)
        spans.append(SequenceRows(start=len(ids), count=len(tokens), context=last, pages=tuple(lease.pages)))
        ids += tokens
        positions += range(first, last)
        slots += [lease.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in range(first, last)]
        logit_rows += range(len(ids) - wanted, len(ids))

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return StepBatch(column(ids), column(positions), column(slots), tuple(spans), column(logit_rows))


def row_specs(sequence: Sequence, draft: Sequences[int]) -> list[RowSpec]:
    """Returns how the next token of `sequence` is drawn, and the one after each token of `draft`."""
    generate, masks = sequence.prepared.generate, sequence.masks(draft)
    return [
        RowSpec(
            sampling=generate.sampling,
            choice=sequence.choice,
            position=len(sequence.tokens) + ahead,
            path=[*sequence.output, *draft[:ahead]] if ahead else sequence.output,
            mask=masks[ahead] if masks is not None else None,
            logprobs=generate.logprobs,
        )
        for ahead in range(len(draft) + 1)
    ]


def rows_to_draw(groups: Sequences[tuple[Sequences[Sequence], tuple[int, ...]]]) -> tuple[list[int], list[RowSpec]]:
    """Returns the row of the logits for each token to draw, and how it is drawn.

    `groups` has, in the order of the rows, the choices that share the rows of a sequence and the draft behind it.
    """
    rows: list[int] = []
    specs: list[RowSpec] = []
    at = 0
    for choices, draft in groups:
        end = at + 1 + len(draft)
        for choice in choices:
            rows += range(at, end)
            specs += row_specs(choice, draft)
        at = end
    return rows, specs
