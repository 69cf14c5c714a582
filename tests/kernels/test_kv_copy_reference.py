"""Page moves in plain torch against bytes moved by Python, and what the checksum promises."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_kernels import dispatch
from magnitude_kernels.kv_copy.reference import ZEROS, PageMove, PageTensors, checksums, rounds
from testkit.paging import checksum, moved, page_bytes, random_cache, raw

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Fewer moves than this could not make a chain, a swap and a zeroing in one list.
MOVES = st.lists(st.tuples(st.integers(ZEROS, 5), st.integers(0, 5)).map(lambda m: PageMove(*m)), max_size=12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_apply_one_after_the_other(dtype: torch.dtype) -> None:
    tensors = random_cache(6, 7, (3, 80), dtype, seed=1)
    chain = [PageMove(0, 1), PageMove(1, 2), PageMove(ZEROS, 0), PageMove(5, 1), PageMove(3, 3)]
    expected = moved(tensors, chain)
    dispatch.copy_pages(PageTensors.of(tensors), chain)
    assert raw(tensors) == expected


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(MOVES)
def test_rounds_need_no_order_inside(moves: list[PageMove]) -> None:
    tensors = random_cache(1, 6, (1, 2), torch.float32, seed=2)
    expected = moved(tensors, moves)
    content = {page: page_bytes(tensors, page) for page in range(6)} | {ZEROS: bytes(128)}
    assert [move for batch in rounds(moves) for move in batch] == moves
    for batch in rounds(moves):
        # All of a round is read before any of it is written, and after all of it was: both must be the same.
        before = {target: content[source] for source, target in batch}
        content |= before
        assert {target: content[source] for source, target in batch} == before
    assert b"".join(content[page] for page in range(6)) == expected[0]


@pytest.mark.parametrize("pages", [[], [3], [6, 0, 2, 0]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_and_back(dtype: torch.dtype, pages: list[int]) -> None:
    tensors = random_cache(6, 7, (3, 80), dtype, seed=3)
    cache = PageTensors.of(tensors)
    staging = cache.staging(len(pages)).fill_(0xFF)
    sums = dispatch.gather_pages(cache, pages, staging)
    assert staging.numpy().tobytes() == b"".join(page_bytes(tensors, page) for page in pages)
    assert sums.tolist() == [checksum(page_bytes(tensors, page)) for page in pages]
    assert checksums(staging).tolist() == sums.tolist()

    others = random_cache(6, 9, (3, 80), dtype, seed=4)
    targets = [8, 1, 5, 0][: len(pages)]
    untouched = {page: page_bytes(others, page) for page in range(9) if page not in targets}
    assert dispatch.scatter_pages(PageTensors.of(others), targets, staging).tolist() == sums.tolist()
    assert [page_bytes(others, t) for t in targets] == [page_bytes(tensors, p) for p in pages]
    assert {page: page_bytes(others, page) for page in untouched} == untouched


@pytest.mark.thorough
def test_every_bit_and_every_swap_changes_the_checksum() -> None:
    tensors = random_cache(2, 1, (1, 2), torch.float32, seed=5)
    staging = PageTensors.of(tensors).staging(1)
    (expected,) = dispatch.gather_pages(PageTensors.of(tensors), [0], staging).tolist()
    flipped = staging.repeat(staging.numel() * 8, 1, 1).flatten(1)
    for bit in range(flipped.shape[0]):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    sums = checksums(flipped[:, None])
    assert expected not in sums.tolist()
    # Two flipped bits would agree where one flip moves the sum as far as another.
    moves = (sums - expected).tolist()
    assert len({abs(move) for move in moves}) == len(moves)

    words = staging.flatten().view(torch.int32)
    pairs = [(i, j) for i in range(words.numel()) for j in range(i)]
    swapped = words.repeat(len(pairs), 1)
    for row, (i, j) in zip(swapped, pairs, strict=True):
        row[[i, j]] = row[[j, i]]
    assert expected not in checksums(swapped.view(torch.uint8)[:, None]).tolist()
    assert checksums(torch.zeros_like(staging)).tolist() != [0]


def test_what_does_not_fit_is_refused() -> None:
    tensors = random_cache(2, 4, (1, 2), torch.float32, seed=6)
    cache = PageTensors.of(tensors)
    before = raw(tensors)
    with pytest.raises(ValueError, match="page 4 to 0"):
        dispatch.copy_pages(cache, [PageMove(ZEROS, 1), PageMove(4, 0)])
    with pytest.raises(ValueError, match="no page -1"):
        dispatch.gather_pages(cache, [-1], cache.staging(1))
    with pytest.raises(ValueError, match="staging buffer"):
        dispatch.gather_pages(cache, [1], cache.staging(2))
    with pytest.raises(ValueError, match=r"\[2\] are to be filled more than once"):
        dispatch.scatter_pages(cache, [2, 1, 2], cache.staging(3))
    with pytest.raises(ValueError, match="alike"):
        PageTensors.of([tensors[0], tensors[1].half()])
    with pytest.raises(ValueError, match="contiguous"):
        PageTensors.of([tensors[0].transpose(1, 3)])
    assert raw(tensors) == before
