"""The page kernels under Triton's interpreter; `test_kv_copy_kernel.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels.kv_copy import triton as kernels
from magnitude_kernels.kv_copy.reference import ZEROS, PageMove, PageTensors
from testkit.paging import checksum, moved, page_bytes, random_cache, raw

SHAPES = [(1, 1, (1, 2), torch.float32), (6, 7, (3, 80), torch.bfloat16), (2, 5, (3, 64), torch.float32)]


@pytest.mark.parametrize(("tensors", "pages", "heads", "dtype"), SHAPES, ids=str)
def test_moves(tensors: int, pages: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    last = pages - 1
    for moves in (
        [],
        [PageMove(ZEROS, 0)],
        [PageMove(0, last), PageMove(last, pages // 2), PageMove(ZEROS, 0), PageMove(last, 0)],
    ):
        cache = random_cache(tensors, pages, heads, dtype, seed=len(moves))
        expected = moved(cache, moves)
        kernels.copy(PageTensors.of(cache), moves)
        assert raw(cache) == expected


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize(("tensors", "pages", "heads", "dtype"), SHAPES, ids=str)
def test_gather_and_back(tensors: int, pages: int, heads: tuple[int, int], dtype: torch.dtype, number: int) -> None:
    source = random_cache(tensors, pages, heads, dtype, seed=7)
    target = random_cache(tensors, pages, heads, dtype, seed=8)
    listed = [(3 * i + 1) % pages for i in range(number)] if pages > 1 else [0] * number
    # The buffer lies between guards that the kernels must leave alone.
    row = PageTensors.of(source).staging(1).numel()
    guarded = torch.full(((number + 2) * row,), 0xA5, dtype=torch.uint8)
    staging = guarded[row : (number + 1) * row].view(number, tensors, -1 if number else row // tensors)
    sums = kernels.gather(PageTensors.of(source), listed, staging)
    wanted = [page_bytes(source, page) for page in listed]
    assert staging.numpy().tobytes() == b"".join(wanted)
    assert sums.tolist() == [checksum(content) for content in wanted]

    distinct = listed if len(set(listed)) == number else listed[:1]
    untouched = {page: page_bytes(target, page) for page in range(pages) if page not in distinct}
    part = staging[: len(distinct)]
    assert kernels.scatter(PageTensors.of(target), distinct, part).tolist() == sums[: len(distinct)].tolist()
    assert [page_bytes(target, page) for page in distinct] == wanted[: len(distinct)]
    assert {page: page_bytes(target, page) for page in untouched} == untouched
    assert set(guarded[:row].tolist()) | set(guarded[(number + 1) * row :].tolist()) == {0xA5}
