"""Causal attention over pages by the kernels' paged attention: one call per layer for a whole step, whatever its mix.

The lengths and page tables of a step go to the device once, in `plan`; no context is gathered. It is meant for GPUs:
without one the same calls take the operation's plain definition, which is slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.attention import AttentionPlan
from magnitude_engine.model.batch import StepBatch
from magnitude_kernels import dispatch
from magnitude_kernels.paged_attention.ragged import Cache, Ragged, lay_out


@dataclass(frozen=True, slots=True)
class PagedPlan(AttentionPlan):
    """The lengths and page tables of a step, on its device."""

    ragged: Ragged


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Attention by `dispatch.paged_attention`, computed in float32 from the cache's dtype."""

    def plan(self, batch: StepBatch, dtype: torch.dtype) -> PagedPlan:
        """Returns the step's lengths and pages; `dtype` does not matter."""
        sequences = batch.sequences
        pages = [s.pages[: -(-s.context // PAGE_TOKENS)] for s in sequences]
        counts, contexts = [s.count for s in sequences], [s.context for s in sequences]
        return PagedPlan((), batch.positions, lay_out(counts, contexts, pages, batch.ids.device))

    def __call__(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Returns the attended values in the cache's dtype, [rows, heads * head_dim]; zeros for rows of padding."""
        if not isinstance(plan, PagedPlan):
            raise TypeError(f"paged attention takes its own plans, not {type(plan).__name__}")
        cache = Cache(keys, values)
        return dispatch.paged_attention(q.to(keys.dtype), cache, plan.ragged, q.shape[-1] ** -0.5).flatten(1)
