"""Moves of slots in plain torch against bytes moved by Python; the kernel is held to the same."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels import dispatch
from magnitude_kernels.compact.reference import lay_out, path_moves
from testkit.accepting import step
from testkit.paging import PAGE_TOKENS, compacted, random_cache, raw

CPU = torch.device("cpu")
# Slots are read by one move and written by a later one, across pages whose numbers fall; one move changes nothing.
FALLING = [(70, 70), (33, 71), (34, 33), (2, 34), (3, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_moves_apply_one_after_the_other(dtype: torch.dtype) -> None:
    pages = torch.stack(random_cache(6, 5, (3, 80), dtype, seed=1))
    moves = [FALLING, [], [(20, 17)]]
    expected = compacted(pages, [move for own in moves for move in own])
    dispatch.compact(pages, lay_out(moves, CPU))
    assert raw(tuple(pages)) == expected
    dispatch.compact(pages, lay_out([], CPU))
    assert raw(tuple(pages)) == expected


@pytest.mark.parametrize("seed", range(4))
def test_an_accepted_path_is_brought_together(seed: int) -> None:
    given = step([17, 0, 5, 1, 30], seed)
    pages = torch.stack(random_cache(2, 6, (1, 2), torch.float32, seed))
    slots = torch.randperm(6 * PAGE_TOKENS, generator=torch.Generator().manual_seed(seed))[: given.drawn.numel()]
    before = pages[1].flatten(0, 1).clone().view(torch.int32)
    accepted = dispatch.verify(given.trees, given.drawn)
    dispatch.compact(pages, path_moves(slots, given.trees, accepted))
    after = pages[1].flatten(0, 1).view(torch.int32)

    moved = 0
    for first, nodes, count in zip(given.trees.starts.tolist(), *map(torch.Tensor.tolist, accepted[:2]), strict=False):
        path = [slots[first + 1 + node] for node in nodes[:count]]
        places = [slots[first + 1 + place] for place in range(count)]
        assert torch.equal(
            after[torch.tensor(places, dtype=torch.int64)], before[torch.tensor(path, dtype=torch.int64)]
        )
        assert torch.equal(after[slots[first]], before[slots[first]])
        moved += nodes[:count] != list(range(count))
    assert moved > 0


def test_what_does_not_fit_is_refused() -> None:
    for moves, message in (
        ([[(3, 2), (2, 1)]], "slot 2 to 1: one of them was written"),
        ([[(3, 2), (4, 2)]], "slot 4 to 2: one of them was written"),
        ([[(-1, 2)]], "not negative"),
        ([[(3, 2)], [(5, 3)]], "slot 3 is moved for sequences 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            lay_out(moves, CPU)
    pages = torch.stack(random_cache(2, 3, (1, 2), torch.float32, seed=2))
    with pytest.raises(ValueError, match="contiguous tensor"):
        dispatch.compact(pages.transpose(1, 2), lay_out([[(1, 0)]], CPU))
    with pytest.raises(ValueError, match="of the same sequences"):
        dispatch.compact(pages, lay_out([[(1, 0)]], CPU)._replace(counts=torch.tensor([1, 1])))
