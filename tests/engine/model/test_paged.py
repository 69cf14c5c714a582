"""Paged attention against the grouped attention of torch's own kernel."""

from __future__ import annotations

import pytest
import torch

from magnitude_engine.model.attention import AttentionPlan, GroupedAttention
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.model.paged import PagedAttention

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
PAGES = 40
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def mixed_step(draw: torch.Generator) -> StepBatch:
    """Returns decode rows, chunks and a whole prompt, their pages in random order."""
    pages = iter(torch.randperm(PAGES, generator=draw).tolist())
    sequences: list[SequenceRows] = []
    positions: list[int] = []
    for count, context in ((1, 1), (1, 33), (5, 5), (17, 100), (1, 16), (3, 17)):
        own = tuple(next(pages) for _ in range(-(-context // 16) + 1))
        sequences.append(SequenceRows(len(positions), count, context, own))
        positions += range(context - count, context)
    rows = torch.arange(len(positions))
    return StepBatch(rows, torch.tensor(positions), rows, tuple(sequences), rows)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_grouped_attention(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(3)
    batch = mixed_step(draw)
    keys, values = torch.randn(2, PAGES, 16, KV_HEADS, HEAD_DIM, generator=draw).to(dtype)
    q = torch.randn(batch.ids.shape[0], HEADS, HEAD_DIM, generator=draw)
    paged, grouped = PagedAttention(), GroupedAttention(HEADS // KV_HEADS)
    found = paged(q, keys, values, paged.plan(batch, dtype))
    expected = grouped(q, keys, values, grouped.plan(batch, dtype))
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    assert torch.allclose(found, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_plan_of_another_attention_is_refused() -> None:
    nothing = torch.zeros(0, 1, 2)
    with pytest.raises(TypeError, match="AttentionPlan"):
        PagedAttention()(nothing, nothing, nothing, AttentionPlan((), nothing))
