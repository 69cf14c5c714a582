"""The compaction kernel: one launch moves slots of every layer, one program per sequence and tensor.

It computes what `compact.reference` defines, to the bit. A program carries its moves out in order, because a slot may
be read by one move and written by a later one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from magnitude_kernels.compact.reference import SlotMoves, check_moves

MAX_BLOCK = 2048
NUM_WARPS = 4
_WORD_BYTES = 4


def compact(pages: torch.Tensor, moves: SlotMoves) -> None:
    """Carries out `moves` on a GPU; see `reference.compact`. Slots are not checked, that would wait for the device."""
    check_moves(pages, moves)
    tensors, slots = pages.shape[0], pages.shape[1] * pages.shape[2]
    words, rest = divmod(pages[0, 0, 0].numel() * pages.itemsize, _WORD_BYTES)
    if rest:
        raise ValueError(f"a slot must have a multiple of {_WORD_BYTES} bytes, not {_WORD_BYTES * words + rest}")
    sequences, width = moves.sources.shape
    if sequences and width:
        compact_kernel[(sequences, tensors)](
            pages.view(-1).view(torch.int32),
            moves.sources,
            moves.targets,
            moves.counts,
            width,
            slots,
            WORDS=words,
            BLOCK=block_size(words),
            num_warps=NUM_WARPS,
        )


def block_size(words: int) -> int:
    """Returns how many words a program moves at once."""
    return min(MAX_BLOCK, max(16, 1 << (words - 1).bit_length()))


@triton.jit  # type: ignore[untyped-decorator]
def compact_kernel(  # type: ignore[no-untyped-def]
    pages_ptr,
    sources_ptr,
    targets_ptr,
    counts_ptr,
    width,
    slots,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Carries out the moves of sequence `program_id(0)` in tensor `program_id(1)`, of `slots` slots of WORDS words."""
    sequence = tl.program_id(0).to(tl.int64)
    base = pages_ptr + tl.program_id(1).to(tl.int64) * slots * WORDS
    count = tl.load(counts_ptr + sequence)
    sources_ptr += sequence * width
    targets_ptr += sequence * width
    for start in range(0, WORDS, BLOCK):
        at = start + tl.arange(0, BLOCK)
        index = tl.full((), 0, tl.int64)
        while index < count:
            source = tl.load(sources_ptr + index)
            target = tl.load(targets_ptr + index)
            moved = at < tl.where(source == target, 0, WORDS)
            words = tl.load(base + source * WORDS + at, mask=moved, other=0)
            tl.store(base + target * WORDS + at, words, mask=moved)
            # The next move may write what this one has read.
            tl.debug_barrier()
            index += 1
