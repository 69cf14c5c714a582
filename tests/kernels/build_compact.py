"""The sizes at which the compaction kernel is compiled ahead of time."""

from __future__ import annotations

from magnitude_kernels.compact.triton import NUM_WARPS, block_size, compact_kernel
from testkit.triton_runs import Build


def _compact(words: int) -> Build:
    types = {"pages_ptr": "*i32", **dict.fromkeys(("sources_ptr", "targets_ptr", "counts_ptr"), "*i64")}
    types |= {"width": "i32", "slots": "i32", "WORDS": "constexpr", "BLOCK": "constexpr"}
    constants = {"WORDS": words, "BLOCK": block_size(words)}
    return Build(f"slots of {words} words", compact_kernel, types, constants, NUM_WARPS, aligned=("slots",))


# A token's keys in one layer in bfloat16: 3 heads of 64 (SmolLM2), 8 of 128 (Llama 3).
BUILDS = (_compact(96), _compact(512))
