"""The compaction kernel under Triton's interpreter; `test_speculation_kernels.py` runs this with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels.compact.reference import SlotMoves, lay_out
from magnitude_kernels.compact.triton import compact
from testkit.paging import compacted, random_cache, raw

CPU = torch.device("cpu")
FALLING = [(70, 70), (33, 71), (34, 33), (2, 34), (3, 2)]
# Named behind the counted moves: a slot that no cache has.
NOWHERE = 1 << 40


@pytest.mark.parametrize(
    ("heads", "dtype"), [((1, 2), torch.float16), ((3, 80), torch.bfloat16), ((3, 64), torch.float32)]
)
@pytest.mark.parametrize("moves", [[FALLING, [], [(20, 17)]], [[]], [], [[(1, 1)]]], ids=lambda moves: str(len(moves)))
def test_moves(moves: list[list[tuple[int, int]]], heads: tuple[int, int], dtype: torch.dtype) -> None:
    pages = torch.stack(random_cache(4, 5, heads, dtype, seed=len(moves)))
    expected = compacted(pages, [move for own in moves for move in own])
    laid_out = lay_out(moves, CPU)
    behind = torch.arange(laid_out.sources.shape[1]) >= laid_out.counts[:, None]
    poisoned = (column.masked_fill(behind, NOWHERE + i) for i, column in enumerate(laid_out[:2]))
    compact(pages, SlotMoves(*poisoned, laid_out.counts))
    assert raw(tuple(pages)) == expected


def test_slots_of_more_words_than_a_program_moves_at_once() -> None:
    pages = torch.stack(random_cache(2, 2, (33, 64), torch.float32, seed=1))
    expected = compacted(pages, [(3, 1), (4, 3)])
    compact(pages, lay_out([[(3, 1), (4, 3)]], CPU))
    assert raw(tuple(pages)) == expected
