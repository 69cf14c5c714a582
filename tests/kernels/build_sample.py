"""The sizes at which the sampling kernel is compiled ahead of time."""

from __future__ import annotations

from magnitude_kernels.sample.triton import NUM_WARPS, block_size, sample_kernel
from testkit.triton_runs import Build


def _sample(vocab: int) -> Build:
    types = {
        "logits_ptr": "*fp32",
        "logits_stride": "i64",
        "temperature_ptr": "*fp32",
        "top_k_ptr": "*i32",
        "top_p_ptr": "*fp32",
        "min_p_ptr": "*fp32",
        "keys_ptr": "*i64",
        "mask_ptr": "*i32",
        "ids_ptr": "*i64",
        "finite_ptr": "*i8",
        "VOCAB": "constexpr",
        "HAS_MASK": "constexpr",
        "BLOCK": "constexpr",
    }
    constants = {"VOCAB": vocab, "HAS_MASK": True, "BLOCK": block_size(vocab)}
    return Build(f"vocabulary {vocab:,}", sample_kernel, types, constants, NUM_WARPS)


BUILDS = (_sample(49_152), _sample(128_256))
