"""The reference of acceptance against decoding token by token; the kernel is held to the same judge."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels import dispatch
from magnitude_kernels.verify.reference import lay_out
from testkit.accepting import complaints, step

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(8))
def test_what_is_accepted_is_what_decoding_says(seed: int) -> None:
    given = step([0, 1, 2, 5, 17, 0, 63, 64], seed)
    accepted = dispatch.verify(given.trees, given.drawn)
    assert complaints(given, accepted) == []
    # The judge sees a path cut short, another path of the same length, and another token behind it.
    some = int((accepted.counts > 0).sum())
    assert some > 0
    assert len(complaints(given, accepted._replace(counts=(accepted.counts - 1).clamp(min=0)))) == some
    assert len(complaints(given, accepted._replace(nodes=accepted.nodes + (accepted.nodes >= 0)))) == some
    assert len(complaints(given, accepted._replace(following=accepted.following + 1))) == 8


def test_steps_without_drafts_give_what_was_drawn() -> None:
    accepted = dispatch.verify(lay_out([([], [])] * 3, CPU), torch.tensor([5, -1, 7]))
    assert (accepted.nodes.shape, accepted.counts.tolist()) == ((3, 0), [0, 0, 0])
    assert accepted.following.tolist() == [5, -1, 7]
    nobody = dispatch.verify(lay_out([], CPU), torch.tensor([], dtype=torch.int64))
    assert nobody.following.shape == (0,)


def test_what_is_no_tree_is_refused() -> None:
    for draft, message in (
        (([1, 2], [-1]), "2 tokens but 1 parents"),
        (([1, 2], [1, -1]), "node 0 names node 1"),
        (([1, 2], [-1, -2]), "node 1 names node -2"),
        (([1, 2, 1], [-1, -1, -1]), "same token"),
    ):
        with pytest.raises(ValueError, match=message):
            lay_out([draft], CPU)
    with pytest.raises(ValueError, match=r"each of \(2,\) rows"):
        dispatch.verify(lay_out([([1], [-1])], CPU), torch.tensor([1]))
