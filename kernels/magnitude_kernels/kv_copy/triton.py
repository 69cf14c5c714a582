"""The page kernels: one launch moves the listed pages of every layer, one program per page and tensor.

They compute what `kv_copy.reference` defines, to the bit: integers only. Programs find their tensor through a table
of addresses, because a page of one layer is a few KB: a launch per tensor would cost more than the bytes it moves.

Checksums of the programs of one page meet in an atomic addition, whose order does not matter to integers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from magnitude_kernels.kv_copy.reference import (
    START,
    PageMove,
    PageTensors,
    check_distinct,
    check_moves,
    rounds,
    staging_words,
)

MAX_BLOCK = 2048
NUM_WARPS = 4


def copy(cache: PageTensors, moves: Sequence[PageMove]) -> None:
    """Carries out `moves` as if one after the other; see `kv_copy.reference`."""
    check_moves(cache, moves)
    for batch in rounds(moves):
        copy_kernel[(len(batch), len(cache.words))](
            cache.table,
            to_device([number for move in batch for number in move], cache.table.device),
            WORDS=cache.page_words,
            BLOCK=block_size(cache.page_words),
            num_warps=NUM_WARPS,
        )


def gather(cache: PageTensors, pages: Sequence[int], staging: torch.Tensor) -> torch.Tensor:
    """Fills `staging` with the contents of `pages`; returns their checksums, int64 [pages]."""
    return _stage(cache, pages, staging, scatter=False)


def scatter(cache: PageTensors, pages: Sequence[int], staging: torch.Tensor) -> torch.Tensor:
    """Fills `pages`, each named once, from `staging`; returns the checksums of what was written, int64 [pages]."""
    check_distinct(pages)
    return _stage(cache, pages, staging, scatter=True)


def _stage(cache: PageTensors, pages: Sequence[int], staging: torch.Tensor, scatter: bool) -> torch.Tensor:
    buffer = staging_words(cache, pages, staging)
    sums = torch.full((len(pages),), START, dtype=torch.int64, device=buffer.device)
    if pages:
        stage_kernel[(len(pages), len(cache.words))](
            cache.table,
            to_device(pages, buffer.device),
            buffer,
            sums,
            WORDS=cache.page_words,
            SCATTER=scatter,
            BLOCK=block_size(cache.page_words),
            num_warps=NUM_WARPS,
        )
    return sums


def block_size(words: int) -> int:
    """Returns how many words a program moves at once."""
    return min(MAX_BLOCK, max(16, 1 << (words - 1).bit_length()))


def to_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Returns `numbers` as int64 on `device`, without waiting for what the device is doing."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int64)
    return torch.tensor(numbers, dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)


@triton.jit
def _base(table_ptr, tensor):  # type: ignore[no-untyped-def]
    """Returns the address of a tensor's words; `PageTensors` has checked that it is a multiple of 16."""
    return tl.multiple_of(tl.load(table_ptr + tensor).to(tl.pointer_type(tl.int32)), 16)


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(table_ptr, moves_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Carries out move `program_id(0)` (int64 [moves, 2], a negative source is zeros) in tensor `program_id(1)`."""
    move = tl.program_id(0)
    base = _base(table_ptr, tl.program_id(1))
    source = tl.load(moves_ptr + 2 * move)
    target = tl.load(moves_ptr + 2 * move + 1)
    given = tl.where(source < 0, 0, WORDS)
    for start in range(0, WORDS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        words = tl.load(base + source * WORDS + at, mask=at < given, other=0)
        tl.store(base + target * WORDS + at, words, mask=at < WORDS)


@triton.jit  # type: ignore[untyped-decorator]
def stage_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    pages_ptr,
    staging_ptr,
    sums_ptr,
    WORDS: tl.constexpr,
    SCATTER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Moves page number `program_id(0)` of the list between tensor `program_id(1)` and its place in the buffer."""
    number = tl.program_id(0).to(tl.int64)
    tensor = tl.program_id(1)
    before = tensor * WORDS
    page_ptr = _base(table_ptr, tensor) + tl.load(pages_ptr + number) * WORDS
    place_ptr = staging_ptr + (number * tl.num_programs(1) + tensor) * WORDS
    sums = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, WORDS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < WORDS
        if SCATTER:
            words = tl.load(place_ptr + at, mask=inside, other=0)
            tl.store(page_ptr + at, words, mask=inside)
        else:
            words = tl.load(page_ptr + at, mask=inside, other=0)
            tl.store(place_ptr + at, words, mask=inside)
        weights = (2 * (before + at) + 1).to(tl.int64)
        sums += words.to(tl.uint32, bitcast=True).to(tl.int64) * weights
    tl.atomic_add(sums_ptr + number, tl.sum(sums, 0), sem="relaxed")
