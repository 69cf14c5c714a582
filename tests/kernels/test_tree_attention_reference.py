"""The reference of tree attention against its definition in double precision; the kernel is held to the same judge."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels import dispatch
from magnitude_kernels.paged_attention.triton import TOLERANCE
from magnitude_kernels.tree_attention.reference import MOST_NODES
from testkit.attention import Heads, complaints, given, random_trees

AWKWARD = [(1, 1), (5, 5), (1, 17), (7, 15), (16, 32), (3, 257), (63, 70), (64, 90)]
LIMIT = TOLERANCE[torch.float32]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_random_trees(seed: int) -> None:
    step = given(AWKWARD, Heads(9, 3, 64), torch.float32, seed)
    parents, bits = random_trees([count for count, _ in AWKWARD], seed)
    out = dispatch.tree_attention(step.queries, step.cache, step.ragged, bits, step.scale)
    assert complaints(step, out, LIMIT, parents) == []
    # The judge sees who is no ancestor: causal attention is right for few of these rows.
    assert len(complaints(step, dispatch.paged_attention(*step), LIMIT, parents)) > step.queries.shape[0] // 2


@pytest.mark.slow
def test_a_chain_is_causal() -> None:
    step = given([(6, 40)], Heads(4, 2, 32), torch.float32, seed=9)
    chain = torch.tensor([(2 << node) - 1 for node in range(6)])
    out = dispatch.tree_attention(step.queries, step.cache, step.ragged, chain, step.scale)
    torch.testing.assert_close(out, dispatch.paged_attention(*step), rtol=0, atol=0)


def test_too_large_a_tree_is_refused() -> None:
    step = given([(MOST_NODES + 1, 100)], Heads(1, 1, 16), torch.float32, seed=1)
    bits = torch.zeros(MOST_NODES + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 64 nodes, not 65"):
        dispatch.tree_attention(step.queries, step.cache, step.ragged, bits, step.scale)
