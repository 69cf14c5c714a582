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
from torch.nn import functional

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.attention import AttentionPlan
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.model.cascade import Arrangement, Rules, arrange, runs

# The kernel is a quarter slower with 3 query rows, and twice with 1, than with 4.
_LEAST_ROWS = 4
# From so many query rows per key head on, converting the keys once may pay.
_MANY_ROWS = 16
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
    """The calls of a step: first those that hold each row once, then those merged into them."""

    own: tuple[Call, ...]
    merged: tuple[Call, ...]


class Merged(NamedTuple):
    """What parts add up to: values [rows, kv_heads, group, head_dim], log-sum-exps [..., 1], float32."""

    result: torch.Tensor
    total: torch.Tensor


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
        convert: whether many rows over bfloat16 or float16 keys are computed in float32.
        rules: when a part of its own pays.
        workspace: memory for converted and joined keys.
    """

    group: int
    convert: bool
    rules: Rules
    workspace: Workspace

    @classmethod
    def build(cls, heads: int, kv_heads: int, head_dim: int) -> FusedAttention:
        """Returns the form for a model; measures whether this processor computes bfloat16 keys faster converted."""
        return cls(heads // kv_heads, _converting_pays(kv_heads, head_dim), Rules(), Workspace())

    def plan(self, batch: StepBatch, dtype: torch.dtype) -> CallPlan:
        """Returns the calls."""
        parts = arrange(batch.sequences, self.rules)
        own = tuple(self._own(members, parts, batch) for members in parts.own)
        merged = []
        for members, first, last in parts.common:
            sequences = [batch.sequences[i] for i in members]
            source = _source([sequences[0].pages], [(first, last)])
            merged.append(Call(_rows(sequences), 1, sum(s.count for s in sequences), source, None))
        return CallPlan((), batch.positions, own, tuple(merged))

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Returns the attended values in float32, or in the cache's dtype where one call computed them."""
        if not isinstance(plan, CallPlan):
            raise TypeError(f"FusedAttention takes its own plan, not {type(plan).__name__}")
        rows, heads, head_dim = q.shape
        grouped = q.reshape(rows, heads // self.group, self.group, head_dim)
        if self.group < _LEAST_ROWS:
            grouped = functional.pad(grouped, (0, 0, 0, _LEAST_ROWS - self.group))
        cache = (keys, values)
        if len(plan.own) == 1 and not plan.merged:
            return self._attend(grouped, cache, plan.own[0]).result.reshape(rows, heads * head_dim)
        size = (rows, heads // self.group, self.group)
        state = Merged(torch.empty(*size, head_dim), torch.empty(*size, 1))
        for call in plan.own:
            found = self._attend(grouped, cache, call)
            state.result[call.rows] = found.result.float()
            if plan.merged:
                state.total[call.rows] = found.total
        for call in plan.merged:
            _merge(state, call.rows, self._attend(grouped, cache, call))
        return state.result.view(rows, heads * head_dim)

    def _own(self, members: Sequence[int], parts: Arrangement, batch: StepBatch) -> Call:
        """Returns the call in which these sequences attend to their own keys."""
        sequences = [batch.sequences[i] for i in members]
        spans = [(parts.starts[i], batch.sequences[i].context) for i in members]
        source = _source([s.pages for s in sequences], spans)
        rows, count = _rows(sequences), sequences[0].count
        lengths = {last - first for first, last in spans}
        if count == 1 and len(lengths) == 1:
            return Call(rows, len(members), count, source, None)
        own = batch.positions[rows].view(len(members), count)
        seen = own - torch.tensor([first for first, _ in spans])[:, None]
        hidden = torch.arange(source.tokens) > seen[..., None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
        if count > 1:
            mask = mask.repeat_interleave(self.group, 1)
        return Call(rows, len(members), count, source, mask[:, None])

    def _attend(self, grouped: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], call: Call) -> Merged:
        """Computes one call; `grouped` is [rows, kv_heads, at least group, head_dim] with zeros past the group."""
        kv_heads, head_dim = grouped.shape[1], grouped.shape[3]
        query = grouped[call.rows]
        if call.count > 1:
            query = query[:, :, : self.group].view(call.batch, call.count, kv_heads, self.group, head_dim)
            query = query.transpose(1, 2).reshape(call.batch, kv_heads, call.count * self.group, head_dim)
        wide = self.convert and call.count * self.group >= _MANY_ROWS
        dtype = torch.float32 if wide else cache[0].dtype
        key, value = (self._read(index, tensor, call, dtype) for index, tensor in enumerate(cache))
        found, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query.to(dtype), key, value, attn_mask=call.mask
        )
        total = total[..., None]
        if call.count == 1:
            return Merged(found[:, :, : self.group], total[:, :, : self.group])
        size = (call.batch, kv_heads, call.count, self.group)
        found, total = found.view(*size, head_dim), total.view(*size, 1)
        return Merged(found.transpose(1, 2).flatten(0, 1), total.transpose(1, 2).flatten(0, 1))

    def _read(self, index: int, cache: torch.Tensor, call: Call, dtype: torch.dtype) -> torch.Tensor:
        """Returns a call's keys or values, [batch, kv_heads, tokens, head_dim]; a view of the cache where it can be."""
        source, (kv_heads, head_dim) = call.source, cache.shape[2:]
        flat = cache.view(-1, kv_heads * head_dim)
        if source.slots is not None:
            found = flat.index_select(0, source.slots)
            if found.dtype != dtype:
                found = self.workspace.take(index, found.shape, dtype).copy_(found)
        elif len(source.runs) == 1 and cache.dtype == dtype:
            first, tokens = source.runs[0]
            found = flat[first : first + tokens]
        else:
            found = self.workspace.take(index, torch.Size((source.tokens, flat.shape[1])), dtype)
            start = 0
            for first, tokens in source.runs:
                found[start : start + tokens].copy_(flat[first : first + tokens])
                start += tokens
        return found.view(call.batch, source.tokens, kv_heads, head_dim).transpose(1, 2)


def _source(tables: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]]) -> Source:
    """Returns where the positions `first..last` of each sequence lie, given its pages."""
    tokens = max(last - first for first, last in spans)
    if len(tables) == 1:
        found = runs(tables[0], *spans[0])
        if len(found) == 1 or len(found) * _RUN_TOKENS <= tokens:
            return Source(tuple(found), None, tokens)
    slots = []
    for pages, (first, last) in zip(tables, spans, strict=True):
        positions = torch.arange(first, first + tokens).clamp_(max=last - 1)
        table = torch.tensor(pages[: -(-last // PAGE_TOKENS)], dtype=torch.int64)
        slots.append(table[positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS)
    return Source((), torch.cat(slots), tokens)


def _rows(sequences: Sequence[SequenceRows]) -> slice | torch.Tensor:
    """Returns the rows of these sequences, as a slice where they stand together in order."""
    if all(a.start + a.count == b.start for a, b in itertools.pairwise(sequences)):
        return slice(sequences[0].start, sequences[-1].start + sequences[-1].count)
    return torch.cat([torch.arange(s.start, s.start + s.count) for s in sequences])


def _merge(state: Merged, rows: slice | torch.Tensor, part: Merged) -> None:
    """Adds a part to these rows of `state`."""
    before = state.total[rows]
    share = (part.total - before).sigmoid_()
    state.result[rows] = state.result[rows].lerp(part.result.float(), share)
    state.total[rows] = torch.logaddexp(before, part.total)


def _converting_pays(kv_heads: int, head_dim: int) -> bool:
    """Returns whether many rows over bfloat16 keys take less time when these are converted to float32 first."""
    keys = torch.ones(1, _PROBE_KEYS, kv_heads, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    wide = torch.empty(1, _PROBE_KEYS, kv_heads, head_dim).transpose(1, 2)
    query = torch.ones(1, kv_heads, _PROBE_ROWS, head_dim)
    narrow = query.bfloat16()

    def direct() -> None:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(narrow, keys, keys)

    def converted() -> None:
        wide.copy_(keys)
        wide.copy_(keys)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, wide, wide)

    best = [float("inf"), float("inf")]
    with torch.inference_mode():
        for _ in range(_PROBE_ROUNDS):
            for index, function in enumerate((direct, converted)):
                began = time.thread_time()
                function()
                best[index] = min(best[index], time.thread_time() - began)
    return best[1] < best[0]
