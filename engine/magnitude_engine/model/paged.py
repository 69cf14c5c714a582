"""Causal attention over pages by the kernels' paged attention: one call per layer for a whole step, whatever its mix.

Draft trees that fork go to the kernels' tree attention in a second call. The lengths and page tables of a step go to
the device once, in `plan`; no context is gathered. It is meant for GPUs: without one the same calls take the
operations' plain definitions, which are slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.attention import AttentionPlan, hidden
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_kernels import dispatch
from magnitude_kernels.paged_attention.ragged import Cache, Ragged, lay_out
from magnitude_kernels.tree_attention.reference import MOST_NODES


@dataclass(frozen=True, slots=True)
class Trees:
    """The rows of a step that belong to draft trees; tensors lie on its device.

    Attributes:
        rows: int64, where they stand in the step; `chains` has the others.
        ragged: the trees, their rows one after the other.
        ancestors: int64 per row, a bit for each row of its tree that it sees.
    """

    rows: torch.Tensor
    chains: torch.Tensor
    ragged: Ragged
    ancestors: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedPlan(AttentionPlan):
    """The lengths and page tables of a step, on its device: `ragged` for the rows that `trees` has not."""

    ragged: Ragged
    trees: Trees | None = None


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention by `dispatch.paged_attention` and `dispatch.tree_attention`, in float32 from the cache's dtype."""

    def plan(self, batch: StepBatch, dtype: torch.dtype) -> PagedPlan:
        """Returns the step's lengths and pages; `dtype` does not matter."""
        device = batch.ids.device
        parts = [part for rows in batch.sequences for part in _parts(rows)]
        chains, trees = [p for p in parts if not p.parents], [p for p in parts if p.parents]
        ragged = _ragged(chains, device)
        if not trees:
            return PagedPlan((), batch.positions, ragged)
        ancestors = torch.from_numpy(np.concatenate([_ancestors(tree) for tree in trees])).to(device)
        found = Trees(_rows(trees).to(device), _rows(chains).to(device), _ragged(trees, device), ancestors)
        return PagedPlan((), batch.positions, ragged, found)

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Returns the attended values in the cache's dtype, [rows, heads * head_dim]; zeros for rows of padding."""
        if not isinstance(plan, PagedPlan):
            raise TypeError(f"paged attention takes its own plans, not {type(plan).__name__}")
        cache, q, scale, trees = Cache(keys, values), q.to(keys.dtype), q.shape[-1] ** -0.5, plan.trees
        if trees is None:
            return dispatch.paged_attention(q, cache, plan.ragged, scale).flatten(1)
        found = torch.empty_like(q, memory_format=torch.contiguous_format)
        if len(trees.chains):
            found[trees.chains] = dispatch.paged_attention(q[trees.chains], cache, plan.ragged, scale)
        found[trees.rows] = dispatch.tree_attention(q[trees.rows], cache, trees.ragged, trees.ancestors, scale)
        return found.flatten(1)


def _parts(rows: SequenceRows) -> Iterator[SequenceRows]:
    """Yields what goes to one call: a sequence, or its known rows and its tree where both are too much for one."""
    nodes = len(rows.parents)
    if not nodes or rows.count <= MOST_NODES:
        yield rows
        return
    known = rows.count - nodes
    yield replace(rows, count=known, context=rows.context - nodes, parents=())
    yield replace(rows, start=rows.start + known, count=nodes)


def _ancestors(rows: SequenceRows) -> NDArray[np.int64]:
    """Returns the bits of the rows that each row of a tree sees, int64 [count]."""
    seen = np.zeros((rows.count, MOST_NODES), dtype=np.bool_)
    seen[:, : rows.count] = ~hidden(rows)[:, -rows.count :].numpy()
    return np.packbits(seen, axis=1, bitorder="little").view("<i8")[:, 0]


def _ragged(parts: Sequence[SequenceRows], device: torch.device) -> Ragged:
    pages = [p.pages[: -(-p.context // PAGE_TOKENS)] for p in parts]
    return lay_out([p.count for p in parts], [p.context for p in parts], pages, device)


def _rows(parts: Sequence[SequenceRows]) -> torch.Tensor:
    return torch.tensor([row for p in parts for row in range(p.start, p.start + p.count)], dtype=torch.int64)
