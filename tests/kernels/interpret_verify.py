"""The acceptance kernel under Triton's interpreter; `test_speculation_kernels.py` runs this with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels.verify.reference import Accepted
from magnitude_kernels.verify.triton import launch, verify
from testkit.accepting import complaints, step

UNWRITTEN = -77


@pytest.mark.parametrize("sizes", [[0], [0, 0, 0], [1], [16], [17, 3], [0, 1, 2, 5, 0, 33, 64]], ids=str)
def test_kernel_accepts_what_decoding_says(sizes: list[int]) -> None:
    for seed in range(6):
        given = step(sizes, seed)
        # One sequence more than there are: it must keep its mark.
        width = given.trees.most_nodes
        nodes = torch.full((len(sizes) + 1, width), UNWRITTEN)
        counts, following = torch.full((2, len(sizes) + 1), UNWRITTEN)
        launch(given.trees, given.drawn, Accepted(nodes[:-1], counts[:-1], following[:-1]))
        assert complaints(given, Accepted(nodes[:-1], counts[:-1], following[:-1])) == []
        assert nodes[-1].tolist() == [UNWRITTEN] * width
        assert (counts[-1], following[-1]) == (UNWRITTEN, UNWRITTEN)


def test_whole_operation() -> None:
    given = step([7, 0, 20], 3)
    assert complaints(given, verify(given.trees, given.drawn)) == []
    assert verify(*step([], 0)[1:]).counts.shape == (0,)
