"""Tree attention under Triton's interpreter; `test_attention_kernels.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels.paged_attention.launch import Partials, workspace
from magnitude_kernels.paged_attention.triton import TOLERANCE
from magnitude_kernels.tree_attention.triton import launch, tree_attention
from testkit.attention import Heads, complaints, given, random_trees


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "lengths", [[(1, 1), (5, 5), (1, 17), (7, 15)], [(16, 32), (3, 257), (6, 260)], [(63, 70), (64, 64)]], ids=str
)
def test_random_trees(lengths: list[tuple[int, int]], dtype: torch.dtype) -> None:
    step = given(lengths, Heads(3, 1, 64), dtype, seed=len(lengths))
    parents, bits = random_trees([count for count, _ in lengths], seed=len(lengths))
    nan = float("nan")
    out = torch.full(step.queries.shape, nan, dtype=dtype)
    partials = Partials(*(tensor.fill_(nan) for tensor in workspace(step.queries, step.cache, step.ragged)))
    launch(step.queries, step.cache, step.ragged, bits, step.scale, out, partials)
    assert complaints(step, out, TOLERANCE[dtype], parents) == []


def test_too_large_a_tree_is_refused() -> None:
    step = given([(65, 100)], Heads(1, 1, 16), torch.float32, seed=1)
    with pytest.raises(ValueError, match="at most 64 nodes, not 65"):
        tree_attention(step.queries, step.cache, step.ragged, torch.zeros(65, dtype=torch.int64), step.scale)
