"""Turns a plan into the tensors of one forward pass and into the rows to draw tokens from."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np
import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.decode.sample import Drawn, RowSpec
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.kv.lease import Lease
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.request import Sequence

# What a step verifies where nothing is drafted.
NO_DRAFT = DraftTree()


class Rows(NamedTuple):
    """Tokens to compute in this step after the `lease.length` that are in the cache.

    Attributes:
        tokens: those that are known.
        lease: has pages for them and for the draft.
        wanted: of how many of the last rows the logits are needed.
        draft: computed behind them.
    """

    tokens: Sequences[int]
    lease: Lease
    wanted: int = 0
    draft: DraftTree = NO_DRAFT


class Work(NamedTuple):
    """Rows of a sequence that runs; its lease is carried along because it may lose it before the step ends.

    Attributes:
        rows: how many of its known tokens are computed.
        draft: tokens that may follow the last of them, computed behind it.
    """

    sequence: Sequence
    lease: Lease
    rows: int
    draft: DraftTree = NO_DRAFT

    def share(self) -> Rows:
        """Returns what the model computes.

        Tokens can be drawn where the sequence's last one is reached: one after it, and one after each of the draft.
        """
        first = self.lease.length
        tokens = self.sequence.tokens[first : first + self.rows]
        wanted = 1 + len(self.draft) if self.rows == self.sequence.missing else 0
        return Rows(tokens, self.lease, wanted, self.draft)


class Verified(NamedTuple):
    """What was drawn after a sequence's last token, and after each node of its draft."""

    sequence: Sequence
    draft: DraftTree
    drawn: Sequences[Drawn]


def build_batch(shares: Iterable[Rows], device: torch.device) -> StepBatch:
    """Returns the forward pass for `shares`."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[SequenceRows] = []
    logit_rows: list[int] = []
    for tokens, lease, wanted, draft in shares:
        first, known = lease.length, lease.length + len(tokens)
        last = known + len(draft)
        spans.append(SequenceRows(len(ids), last - first, last, tuple(lease.pages), forks(draft)))
        ids += [*tokens, *draft.tokens]
        positions += [*range(first, known), *(known - 1 + depth for depth in draft.depths)]
        slots += [slot(lease, index) for index in range(first, last)]
        logit_rows += range(len(ids) - wanted, len(ids))

    def column(values: list[int]) -> torch.Tensor:
        # Several times as fast as torch.tensor for a few numbers.
        return torch.from_numpy(np.array(values, np.int64)).to(device)

    return StepBatch(column(ids), column(positions), column(slots), tuple(spans), column(logit_rows))


def child(draft: DraftTree, node: int, token: int) -> int:
    """Returns which node right below `node` (-1: the last known token) has this token; -1 where none has."""
    nodes = range(node + 1, len(draft))
    return next((at for at in nodes if draft.parents[at] == node and draft.tokens[at] == token), -1)


def slot(lease: Lease, index: int) -> int:
    """Returns where the key and value number `index` of a sequence lie: page * PAGE_TOKENS + offset."""
    return lease.pages[index // PAGE_TOKENS] * PAGE_TOKENS + index % PAGE_TOKENS


def forks(draft: DraftTree) -> tuple[int, ...]:
    """Returns the parents of a draft's nodes; nothing for a chain, which needs no tree to be computed."""
    return () if draft.parents == tuple(range(-1, len(draft) - 1)) else draft.parents


def row_specs(sequence: Sequence, draft: DraftTree) -> list[RowSpec]:
    """Returns how the next token of `sequence` is drawn, and the one after each node of `draft`."""
    generate, masks = sequence.prepared.generate, sequence.masks(draft)
    return [
        RowSpec(
            sampling=generate.sampling,
            choice=sequence.choice,
            position=len(sequence.tokens) + depth,
            path=[*sequence.output, *(draft.tokens[above] for above in draft.path(node))] if depth else sequence.output,
            mask=masks[node + 1] if masks is not None else None,
            logprobs=generate.logprobs,
            confidence=sequence.drafting.watched,
        )
        for node, depth in enumerate((0, *draft.depths), -1)
    ]


def rows_to_draw(groups: Sequences[tuple[Sequences[Sequence], DraftTree]]) -> tuple[list[int], list[RowSpec]]:
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
