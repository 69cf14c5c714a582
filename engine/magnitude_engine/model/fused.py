"""Attention on CPU for the fast profiles: torch's fused kernel, called as few times and on as few keys as can be.

- A prefix that several sequences share is read once, with their queries stacked as rows of one call.
- Short sequences go through one padded call, since a call costs more to start than they cost to compute.
- Many query rows are computed in float32 where this processor is faster so (it has no bfloat16 instructions).
- Keys in a run of pages are read where they are; only what lies scattered is gathered.

`cascade.py` decides the parts. Each returns its log-sum-exp, by which it is merged: of two parts with log-sum-exps
a and b, the second one's share is sigmoid(b - a).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.attention import AttentionPlan, above
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.model.cascade import Arrangement, Rules, arrange, runs

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
# The kernel is a quarter slower with 3 query rows, and twice with 1, than with 4.
_LEAST_ROWS = 4
# From so many query rows per key head on, converting the keys once may pay.
_MANY_ROWS = 24
# Copying a run costs about as much to start as gathering so many tokens costs more.
_RUN_TOKENS = 256
_PROBE_ROWS = 96
_PROBE_KEYS = 512
_PROBE_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Source:
    """Where a call's keys lie.

    Attributes:
        runs: (first slot, tokens) of each run; empty where the tokens are gathered one by one.
        slots: int64 [batch * tokens], where they are gathered; padding repeats a slot of the sequence.
        tokens: keys per sequence, padding included.
    """

    runs: tuple[tuple[int, int], ...]
    slots: torch.Tensor | None
    tokens: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the kernel.

    Attributes:
        rows: the step's rows it computes, sequence after sequence: a slice, or int64 indices.
        batch: sequences, each with `count` rows.
        count: rows of each.
        source: their keys.
        mask: additive float32 [batch, 1, query rows or 1, tokens], None where all is seen.
    """

    rows: slice | torch.Tensor
    batch: int
    count: int
    source: Source
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class CallPlan(AttentionPlan):
    """The calls of a step.

    Attributes:
        own: calls that hold each row once.
        merged: calls whose results are merged into those.
        padded: zeros [rows, kv_heads, at least group, head_dim] in the cache's dtype, for each layer's queries.
    """

    own: tuple[Call, ...]
    merged: tuple[Call, ...]
    padded: torch.Tensor


class Queries(NamedTuple):
    """A layer's queries: as they are, [rows, kv_heads, group, head_dim], and padded in the cache's dtype."""

    exact: torch.Tensor
    padded: torch.Tensor


@dataclass(slots=True)
class Workspace:
    """Memory for converted keys and values, kept between layers and steps; grows to the largest call."""

    kept: dict[int, torch.Tensor] = field(default_factory=dict)

    def take(self, index: int, size: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Returns uninitialised memory; the next call with this index takes it again."""
        needed = size.numel()
        kept = self.kept.get(index)
        if kept is None or kept.numel() < needed or kept.dtype != dtype:
            kept = self.kept[index] = torch.empty(needed, dtype=dtype)
        return kept[:needed].view(size)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """Attention for few and many rows.

    Attributes:
        group: query heads per key head.
        kv_heads, head_dim: the cache's sizes.
        convert: whether many rows over bfloat16 or float16 keys are computed in float32.
        rules: when a part of its own pays.
        workspace: memory for converted and joined keys.
    """

    group: int
    kv_heads: int
    head_dim: int
    convert: bool
    rules: Rules
    workspace: Workspace

    @classmethod
    def build(cls, heads: int, kv_heads: int, head_dim: int) -> FusedAttention:
        """Returns the form for a model; measures whether this processor computes bfloat16 keys faster converted."""
        convert = _converting_pays(kv_heads, head_dim)
        return cls(heads // kv_heads, kv_heads, head_dim, convert, Rules(), Workspace())

    def plan(self, batch: StepBatch, dtype: torch.dtype) -> CallPlan:
        """Returns the calls."""
        parts = arrange(batch.sequences, self.rules)
        own = tuple(self._own(members, parts, batch) for members in parts.own)
        merged = []
        for members, first, last in parts.common:
            sequences = [batch.sequences[i] for i in members]
            source = _source([sequences[0].pages], [(first, last)])
            merged.append(Call(_rows(sequences), 1, sum(s.count for s in sequences), source, None))
        size = (batch.ids.shape[0], self.kv_heads, max(self.group, _LEAST_ROWS), self.head_dim)
        return CallPlan((), batch.positions, own, tuple(merged), torch.zeros(size, dtype=dtype))

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Returns the attended values in float32, or in the cache's dtype where one call computed them."""
        if not isinstance(plan, CallPlan):
            raise TypeError(f"FusedAttention takes its own plan, not {type(plan).__name__}")
        rows = q.shape[0]
        size = (rows, self.kv_heads, self.group)
        grouped = q.reshape(*size, self.head_dim)
        plan.padded[:, :, : self.group].copy_(grouped)
        queries, cache = Queries(grouped, plan.padded), (keys, values)
        if len(plan.own) == 1 and not plan.merged and isinstance(plan.own[0].rows, slice):
            return self._attend(queries, cache, plan.own[0])[0].reshape(rows, -1)
        result, total = torch.empty(*size, self.head_dim), torch.empty(*size)
        for call in plan.own:
            found, weight = self._attend(queries, cache, call)
            _put(result, call.rows, found)
            if plan.merged:
                _put(total, call.rows, weight)
        for call in plan.merged:
            found, weight = self._attend(queries, cache, call)
            before = total[call.rows]
            share = (weight - before).sigmoid_().unsqueeze(-1)
            _put(result, call.rows, result[call.rows].lerp(found.float(), share))
            _put(total, call.rows, torch.logaddexp(before, weight))
        return result.view(rows, -1)

    def _own(self, members: Sequence[int], parts: Arrangement, batch: StepBatch) -> Call:
        """Returns the call in which these sequences attend to their own keys."""
        sequences = [batch.sequences[i] for i in members]
        spans = [(parts.starts[i], batch.sequences[i].context) for i in members]
        source = _source([s.pages for s in sequences], spans)
        rows, count = _rows(sequences), sequences[0].count
        lengths = {last - first for first, last in spans}
        if count == 1 and len(lengths) == 1:
            return Call(rows, len(members), count, source, None)
        own = torch.tensor([last - first - count for first, last in spans])[:, None] + torch.arange(count)
        hidden = torch.arange(source.tokens) > own[..., None]
        for unseen, (first, last), each in zip(hidden, spans, sequences, strict=True):
            if nodes := len(each.parents):
                unseen[-nodes:, last - first - nodes : last - first] = torch.from_numpy(~above(each.parents))
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        if count > 1:
            mask = mask.repeat_interleave(self.group, 1)
        return Call(rows, len(members), count, source, mask[:, None])

    def _attend(
        self, queries: Queries, cache: tuple[torch.Tensor, torch.Tensor], call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a call's values [rows, kv_heads, group, head_dim] and log-sum-exps [rows, kv_heads, group]."""
        wide = self.convert and call.count * self.group >= _MANY_ROWS
        dtype = torch.float32 if wide else cache[0].dtype
        key, value = self._read(0, cache[0], call, dtype), self._read(1, cache[1], call, dtype)
        if call.count == 1 and not wide:
            found, total = _FUSED(queries.padded[call.rows], key, value, attn_mask=call.mask)
            return found[:, :, : self.group], total[:, :, : self.group]
        size = (call.batch, call.count, self.kv_heads, self.group, self.head_dim)
        query = queries.exact[call.rows].view(size).transpose(1, 2).flatten(2, 3)
        found, total = _FUSED(query.to(dtype), key, value, attn_mask=call.mask)
        size = (call.batch, self.kv_heads, call.count, self.group, self.head_dim)
        return found.view(size).transpose(1, 2).flatten(0, 1), total.view(size[:4]).transpose(1, 2).flatten(0, 1)

    def _read(self, index: int, cache: torch.Tensor, call: Call, dtype: torch.dtype) -> torch.Tensor:
        """Returns a call's keys or values, [batch, kv_heads, tokens, head_dim]; a view of the cache where it can be."""
        source, width = call.source, self.kv_heads * self.head_dim
        if len(source.runs) == 1 and cache.dtype == dtype:
            first, tokens = source.runs[0]
            size, strides = (1, self.kv_heads, tokens, self.head_dim), (tokens * width, self.head_dim, width, 1)
            return cache.as_strided(size, strides, cache.storage_offset() + first * width)
        flat = cache.view(-1, width)
        if source.slots is not None:
            found = flat.index_select(0, source.slots)
            if found.dtype != dtype:
                found = self.workspace.take(index, found.shape, dtype).copy_(found)
        else:
            found = self.workspace.take(index, torch.Size((source.tokens, width)), dtype)
            start = 0
            for first, tokens in source.runs:
                found[start : start + tokens].copy_(flat[first : first + tokens])
                start += tokens
        return found.view(call.batch, source.tokens, self.kv_heads, self.head_dim).transpose(1, 2)


def _source(tables: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]]) -> Source:
    """Returns where the positions `first..last` of each sequence lie, given its pages."""
    tokens = max(last - first for first, last in spans)
    if len(tables) == 1:
        found = runs(tables[0], *spans[0])
        if len(found) == 1 or len(found) * _RUN_TOKENS <= tokens:
            return Source(tuple(found), None, tokens)
    width = max(last for _, last in spans) // PAGE_TOKENS + 1
    table = torch.tensor([[*pages[:width], *[0] * (width - len(pages))] for pages in tables])
    firsts, lasts = torch.tensor(spans).T[:, :, None]
    positions = torch.minimum(firsts + torch.arange(tokens), lasts - 1)
    slots = table.gather(1, positions // PAGE_TOKENS).mul_(PAGE_TOKENS).add_(positions % PAGE_TOKENS)
    return Source((), slots.flatten(), tokens)


def _rows(sequences: Sequence[SequenceRows]) -> slice | torch.Tensor:
    """Returns the rows of these sequences, as a slice where they stand together in order."""
    if all(a.start + a.count == b.start for a, b in itertools.pairwise(sequences)):
        return slice(sequences[0].start, sequences[-1].start + sequences[-1].count)
    return torch.cat([torch.arange(s.start, s.start + s.count) for s in sequences])


def _put(target: torch.Tensor, rows: slice | torch.Tensor, found: torch.Tensor) -> None:
    """Writes these rows, whatever the dtype of `found`."""
    if isinstance(rows, slice):
        target[rows] = found
    else:
        target.index_copy_(0, rows, found.to(target.dtype))


def _converting_pays(kv_heads: int, head_dim: int) -> bool:
    """Returns whether many rows over bfloat16 keys take less time when these are converted to float32 first."""
    keys = torch.ones(1, _PROBE_KEYS, kv_heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    wide = torch.empty(1, _PROBE_KEYS, kv_heads, head_dim).transpose(1, 2)
    query = torch.ones(1, kv_heads, _PROBE_ROWS, head_dim)
    narrow = query.bfloat16()

    def direct() -> None:
        _FUSED(narrow, keys, keys)

    def converted() -> None:
        wide.copy_(keys)
        wide.copy_(keys)
        _FUSED(query, wide, wide)

    best = [float("inf"), float("inf")]
    with torch.inference_mode():
        for _ in range(_PROBE_ROUNDS):
            for index, function in enumerate((direct, converted)):
                began = time.thread_time()
                function()
                best[index] = min(best[index], time.thread_time() - began)
    return best[1] < best[0]
