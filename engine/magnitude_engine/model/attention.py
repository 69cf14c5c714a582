"""Causal attention over pages, in several forms behind one call.

`GroupedAttention` serves the fast profiles off the CPU (on it `fused.py` does): the query heads that share a key
head are laid out as query rows, so that torch's fused kernel reads each key once. `SplitAttention` serves
`reference`: tiles and splits of fixed sizes at absolute positions, so that a row's bits depend on neither chunking
nor neighbours.

Pages that lie in a run are read where they are; others are gathered once per layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.batch import SequenceRows, StepBatch

_SPLIT_KEYS = 128
_SPLIT_ROWS = 8
# torch splits larger element-wise work over threads, which moves the seams between vector and scalar code.
_SERIAL_ELEMENTS = 32_768


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
        spans = tuple(_span(s, self._mask(s, batch.positions, dtype), batch.ids.device) for s in batch.sequences)
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

    def _mask(self, rows: SequenceRows, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        if rows.count == 1:
            return None
        own = positions[rows.start : rows.start + rows.count].repeat_interleave(self.group)
        hidden = torch.arange(rows.context, device=positions.device)[None] > own[:, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))


@dataclass(frozen=True, slots=True)
class SplitAttention:
    """Attention whose bits per row are fixed.

    Queries go in tiles of `rows` positions, keys in splits of `_SPLIT_KEYS` from position 0. The exact
    maximum over all splits comes first, then the splits are added in order; a split that a row cannot see adds
    exact zeros, so a tile may reach further than one of its rows.

        keys      |-- split 0 --|-- split 1 --|-- split 2 --|
        row 130   |xxxxxxxxxxxxx|xxx          |             |
        row 270   |xxxxxxxxxxxxx|xxxxxxxxxxxxx|xxx          |
    """

    group: int
    rows: int

    @classmethod
    def build(cls, heads: int, kv_heads: int) -> SplitAttention:
        """Returns the form for a model; more heads mean smaller tiles."""
        return cls(heads // kv_heads, max(1, min(_SPLIT_ROWS, _SERIAL_ELEMENTS // (heads * _SPLIT_KEYS))))

    def plan(self, batch: StepBatch, dtype: torch.dtype) -> AttentionPlan:
        """Returns the spans; masks follow from the positions."""
        spans = tuple(_span(s, None, batch.ids.device) for s in batch.sequences)
        return AttentionPlan(spans, batch.positions)

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Returns the attended values in float32."""
        results = []
        for span in plan.spans:
            key_splits, value_splits = _splits(read(keys, span)), _splits(read(values, span))
            for start in range(span.start, span.start + span.count, self.rows):
                end = min(start + self.rows, span.start + span.count)
                positions = plan.positions[start:end]
                needed = int(positions.max()) // _SPLIT_KEYS + 1
                results.append(self._tile(q[start:end], positions, key_splits[:needed], value_splits[:needed]))
        return torch.cat(results)

    def _tile(self, q: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns one tile; keys and values are [splits, kv_heads, _SPLIT_KEYS, head_dim]."""
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


def read(cache: torch.Tensor, span: Span) -> torch.Tensor:
    """Returns a span's keys or values, [context, kv_heads, head_dim]; a view where its pages lie in a run."""
    if span.pages is None:
        return cache.flatten(0, 1)[span.first : (span.first or 0) + span.context]
    return cache.index_select(0, span.pages).flatten(0, 1)[: span.context]


def _splits(tokens: torch.Tensor) -> torch.Tensor:
    """Returns [splits, kv_heads, _SPLIT_KEYS, head_dim], contiguous, the end filled with zeros."""
    tokens = functional.pad(tokens, (0, 0, 0, 0, 0, -tokens.shape[0] % _SPLIT_KEYS))
    return tokens.view(-1, _SPLIT_KEYS, *tokens.shape[1:]).transpose(1, 2).contiguous()


def _span(rows: SequenceRows, mask: torch.Tensor | None, device: torch.device) -> Span:
    used = rows.pages[: -(-rows.context // PAGE_TOKENS)]
    run = all(page == used[0] + index for index, page in enumerate(used))
    first = used[0] * PAGE_TOKENS if run else None
    pages = None if run else torch.tensor(used, dtype=torch.int64, device=device)
    return Span(rows.start, rows.count, rows.context, first, pages, mask)
