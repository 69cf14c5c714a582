"""Causal attention over pages, in several forms behind one call.

`GroupedAttention` serves the fast profiles off the CPU (on it `fused.py` does): the query heads that share a key
head are laid out as query rows, so that torch's fused kernel reads each key once. `SplitAttention` serves
`reference`: tiles and splits of fixed sizes at absolute positions, so that a row's bits depend on neither chunking
nor neighbours.

Pages that lie in a run are read where they are; others are gathered once per layer.

A node of a draft tree sees the known tokens and the nodes above it. Where attention takes a mask, `hidden` says so;
`SplitAttention` reads the keys of each path through the tree as if they were the only ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.batch import SequenceRows, StepBatch

_SPLIT_KEYS = 128
_SPLIT_ROWS = 8
# torch splits larger element-wise work over threads, which moves the seams between vector and scalar code.
_SERIAL_ELEMENTS = 32_768

_Splits = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """What one sequence of a step reads, the same for every layer.

    Attributes:
        start, count: its rows in the step.
        context: number of keys.
        first: slot of its first key where its pages lie in a run, else None.
        pages: int64 page ids where they do not.
        mask: additive mask [count * group, context], None where every row sees every key.
    """

    start: int
    count: int
    context: int
    first: int | None
    pages: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The spans of a step and the position of each row."""

    spans: tuple[Span, ...]
    positions: torch.Tensor


class Attention(Protocol):
    """One way to attend."""

    def plan(self, batch: StepBatch, dtype: torch.dtype) -> AttentionPlan:
        """Returns what all layers of this step share; `dtype` is the cache's."""

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Returns [rows, heads * head_dim] for queries [rows, heads, head_dim] over one layer's cache."""


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Fused attention with grouped query rows; `group` query heads share a key head."""

    group: int

    def plan(self, batch: StepBatch, dtype: torch.dtype) -> AttentionPlan:
        """Returns the spans with their masks."""
        device = batch.ids.device
        spans = tuple(_span(s, self._mask(s, dtype, device), device) for s in batch.sequences)
        return AttentionPlan(spans, batch.positions)

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Returns the attended values in the cache's dtype."""
        _, heads, head_dim = q.shape
        kv_heads = heads // self.group
        q = q.to(keys.dtype)
        results = []
        for span in plan.spans:
            query = q[span.start : span.start + span.count].view(span.count, kv_heads, self.group, head_dim)
            query = query.transpose(0, 1).reshape(1, kv_heads, span.count * self.group, head_dim)
            key = read(keys, span).transpose(0, 1)[None]
            value = read(values, span).transpose(0, 1)[None]
            found = functional.scaled_dot_product_attention(query, key, value, attn_mask=span.mask)
            found = found.view(kv_heads, span.count, self.group, head_dim).transpose(0, 1)
            results.append(found.reshape(span.count, heads * head_dim))
        return results[0] if len(results) == 1 else torch.cat(results)

    def _mask(self, rows: SequenceRows, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
        if rows.count == 1:
            return None
        unseen = hidden(rows).repeat_interleave(self.group, 0).to(device)
        return torch.zeros(unseen.shape, dtype=dtype, device=device).masked_fill_(unseen, float("-inf"))


class Branch(NamedTuple):
    """A path through a draft tree, from the known tokens down to a leaf.

    Attributes:
        rows: int64, the step's rows of its nodes that stand on no branch before it.
        splits: how many whole splits of known keys come first.
        slots: int64, where the keys behind those lie: the other known ones, then the path's.
    """

    rows: torch.Tensor
    splits: int
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class SplitPlan(AttentionPlan):
    """The spans of the known rows, and for each the branches of its draft."""

    branches: tuple[tuple[Branch, ...], ...]


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """Attention whose bits per row are fixed.

    Queries go in tiles of `rows` positions, keys in splits of `_SPLIT_KEYS` from position 0. The exact
    maximum over all splits comes first, then the splits are added in order; a split that a row cannot see adds
    exact zeros, so a tile may reach further than one of its rows.

        keys      |-- split 0 --|-- split 1 --|-- split 2 --|
        row 130   |xxxxxxxxxxxxx|xxx          |             |
        row 270   |xxxxxxxxxxxxx|xxxxxxxxxxxxx|xxx          |

    The keys of a draft tree lie in slots in the order of its nodes. For each path they are brought into the order of
    their positions, where they will be when the path is accepted.
    """

    group: int
    rows: int

    @classmethod
    def build(cls, heads: int, kv_heads: int) -> SplitAttention:
        """Returns the form for a model; more heads mean smaller tiles."""
        return cls(heads // kv_heads, max(1, min(_SPLIT_ROWS, _SERIAL_ELEMENTS // (heads * _SPLIT_KEYS))))

    def plan(self, batch: StepBatch, dtype: torch.dtype) -> SplitPlan:
        """Returns the spans and branches; masks follow from the positions."""
        known = (
            replace(s, count=s.count - len(s.parents), context=s.context - len(s.parents)) for s in batch.sequences
        )
        spans = tuple(_span(s, None, batch.ids.device) for s in known)
        branches = tuple(tuple(_branches(s, batch)) for s in batch.sequences)
        return SplitPlan(spans, batch.positions, branches)

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Returns the attended values in float32."""
        if not isinstance(plan, SplitPlan):
            raise TypeError(f"SplitAttention takes its own plan, not {type(plan).__name__}")
        result = torch.empty(q.shape[0], q.shape[1] * q.shape[2])

        def put(rows: torch.Tensor, key_splits: _Splits, value_splits: _Splits) -> None:
            for start in range(0, rows.shape[0], self.rows):
                tile = rows[start : start + self.rows]
                positions = plan.positions[tile]
                needed = int(positions.max()) // _SPLIT_KEYS + 1
                result[tile] = self._tile(q[tile], positions, key_splits[:needed], value_splits[:needed])

        for span, branches in zip(plan.spans, plan.branches, strict=True):
            key_splits, value_splits = _splits(read(keys, span)), _splits(read(values, span))
            put(torch.arange(span.start, span.start + span.count), key_splits, value_splits)
            for rows, splits, slots in branches:
                path_keys, path_values = (_splits(cache.flatten(0, 1)[slots]) for cache in (keys, values))
                put(rows, key_splits[:splits] + path_keys, value_splits[:splits] + path_values)
        return result

    def _tile(self, q: torch.Tensor, positions: torch.Tensor, keys: _Splits, values: _Splits) -> torch.Tensor:
        """Returns one tile."""
        count, heads, head_dim = q.shape
        missing = self.rows - count
        q = functional.pad(q, (0, 0, 0, 0, 0, missing)) * head_dim**-0.5
        limits = functional.pad(positions, (0, missing)).repeat_interleave(self.group)[:, None]
        kv_heads = heads // self.group
        query = q.view(self.rows, kv_heads, self.group, head_dim).transpose(0, 1)
        query = query.reshape(kv_heads, self.rows * self.group, head_dim)
        scores = []
        for index, split in enumerate(keys):
            columns = torch.arange(index * _SPLIT_KEYS, (index + 1) * _SPLIT_KEYS)
            score = torch.bmm(query, split.transpose(1, 2))
            scores.append(score.masked_fill_(columns[None] > limits, float("-inf")))
        peak = torch.stack([s.amax(-1, keepdim=True) for s in scores]).amax(0)
        total = torch.zeros_like(peak)
        result = torch.zeros_like(query)
        for score, split in zip(scores, values, strict=True):
            weight = score.sub_(peak).exp_()
            total += weight.sum(-1, keepdim=True)
            result += torch.bmm(weight, split)
        result = (result / total).view(kv_heads, self.rows, self.group, head_dim).transpose(0, 1)
        return result.reshape(self.rows, heads * head_dim)[:count]


def hidden(rows: SequenceRows) -> torch.Tensor:
    """Returns which keys a row does not see: those past its own slot, and in a draft tree those not above its node.

    bool [count, context] on the CPU.
    """
    known, nodes = rows.context - rows.count, len(rows.parents)
    unseen = np.arange(rows.context)[None] > np.arange(known, rows.context)[:, None]
    if nodes:
        unseen[-nodes:, -nodes:] = ~above(rows.parents)
    return torch.from_numpy(unseen)


def above(parents: Sequence[int]) -> NDArray[np.bool_]:
    """Returns for each node of a tree which nodes are above it or itself, bool [nodes, nodes]."""
    seen = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def read(cache: torch.Tensor, span: Span) -> torch.Tensor:
    """Returns a span's keys or values, [context, kv_heads, head_dim]; a view where its pages lie in a run."""
    if span.pages is None:
        return cache.flatten(0, 1)[span.first : (span.first or 0) + span.context]
    return cache.index_select(0, span.pages).flatten(0, 1)[: span.context]


def _splits(tokens: torch.Tensor) -> _Splits:
    """Returns contiguous splits [kv_heads, _SPLIT_KEYS, head_dim], the end of the last filled with zeros."""
    tokens = functional.pad(tokens, (0, 0, 0, 0, 0, -tokens.shape[0] % _SPLIT_KEYS))
    return tuple(tokens.view(-1, _SPLIT_KEYS, *tokens.shape[1:]).transpose(1, 2).contiguous())


def _branches(rows: SequenceRows, batch: StepBatch) -> Iterator[Branch]:
    """Yields the branches of a sequence's draft tree, each of its nodes on the first that it stands on."""
    nodes = len(rows.parents)
    known, first = rows.context - nodes, rows.start + rows.count - nodes
    if not nodes:
        return
    splits = known // _SPLIT_KEYS
    positions = range(splits * _SPLIT_KEYS, known)
    before = [rows.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in positions]
    seen, placed = above(rows.parents), np.zeros(nodes, dtype=np.bool_)
    for leaf in sorted(set(range(nodes)) - set(rows.parents)):
        path = torch.from_numpy(np.flatnonzero(seen[leaf]) + first)
        own = torch.from_numpy(np.flatnonzero(seen[leaf] & ~placed) + first)
        placed |= seen[leaf]
        yield Branch(own, splits, torch.cat([torch.tensor(before, dtype=torch.int64), batch.slots[path]]))


def _span(rows: SequenceRows, mask: torch.Tensor | None, device: torch.device) -> Span:
    used = rows.pages[: -(-rows.context // PAGE_TOKENS)]
    run = all(page == used[0] + index for index, page in enumerate(used))
    first = used[0] * PAGE_TOKENS if run else None
    pages = None if run else torch.tensor(used, dtype=torch.int64, device=device)
    return Span(rows.start, rows.count, rows.context, first, pages, mask)
