"""The compaction kernel: one launch moves slots of every layer, one program per sequence and tensor.

It computes what `compact.reference` defines, to the bit. A program carries its moves out in order, because a slot may
be read by one move and written by a later one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from magnitude_kernels.compact.reference import SlotMoves, slot_words
from magnitude_kernels.kv_copy.reference import PageTensors
from magnitude_kernels.kv_copy.triton import NUM_WARPS, base_of, block_size


def compact(cache: PageTensors, moves: SlotMoves, page_tokens: int) -> None:
    """Carries out `moves` on a GPU; see `reference.compact`. Slots are not checked, that would wait for the device."""
    words = slot_words(cache, moves, page_tokens)
    sequences, width = moves.sources.shape
    if sequences and width:
        compact_kernel[(sequences, len(cache.words))](
            cache.table,
            moves.sources,
            moves.targets,
            moves.counts,
            width,
            WORDS=words,
            BLOCK=block_size(words),
            num_warps=NUM_WARPS,
        )


@triton.jit  # type: ignore[untyped-decorator]
def compact_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    sources_ptr,
    targets_ptr,
    counts_ptr,
    width,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Carries out the moves of sequence `program_id(0)` in tensor `program_id(1)`, of WORDS words each."""
    sequence = tl.program_id(0).to(tl.int64)
    base = base_of(table_ptr, tl.program_id(1))
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
