"""Sizes at which the page kernels are compiled ahead of time."""

from __future__ import annotations

from magnitude_kernels.kv_copy import triton as kernels
from testkit.triton_runs import Build

POINTERS = {"table_ptr": "*i64", "moves_ptr": "*i64", "pages_ptr": "*i64", "staging_ptr": "*i32", "sums_ptr": "*i64"}


def _copy(words: int) -> Build:
    types = {name: POINTERS.get(name, "constexpr") for name in ("table_ptr", "moves_ptr", "WORDS", "BLOCK")}
    constants = {"WORDS": words, "BLOCK": kernels.block_size(words)}
    return Build(f"copy, {words:,} words", kernels.copy_kernel, types, constants, kernels.NUM_WARPS)


def _stage(name: str, scatter: bool, words: int) -> Build:
    names = ("table_ptr", "pages_ptr", "staging_ptr", "sums_ptr", "WORDS", "SCATTER", "BLOCK")
    types = {each: POINTERS.get(each, "constexpr") for each in names}
    constants = {"WORDS": words, "SCATTER": scatter, "BLOCK": kernels.block_size(words)}
    return Build(f"{name}, {words:,} words", kernels.stage_kernel, types, constants, kernels.NUM_WARPS)


# A page of one tensor in bfloat16: 3 key heads of 64 (SmolLM2), 8 of 128 (Llama 3).
BUILDS = tuple(
    build
    for words in (1_536, 8_192)
    for build in (_copy(words), _stage("gather", False, words), _stage("scatter", True, words))
)
