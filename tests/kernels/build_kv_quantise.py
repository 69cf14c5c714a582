"""Sizes at which the rounding kernels are compiled ahead of time."""

from __future__ import annotations

from magnitude_kernels.kv_quantise import triton as kernels
from testkit.triton_runs import Build


def _quantise(columns: int) -> Build:
    types = {
        "x_ptr": "*bf16",
        "codes_ptr": "*i8",
        "scales_ptr": "*fp32",
        "rows": "i32",
        "COLUMNS": "constexpr",
        "BLOCK": "constexpr",
        "PADDED": "constexpr",
    }
    block, padded = kernels.block_shape(columns)
    constants = {"COLUMNS": columns, "BLOCK": block, "PADDED": padded}
    return Build(f"quantise, head of {columns}", kernels.quantise_kernel, types, constants, kernels.NUM_WARPS)


def _dequantise(columns: int) -> Build:
    types = {
        "codes_ptr": "*i8",
        "scales_ptr": "*fp32",
        "y_ptr": "*bf16",
        "rows": "i32",
        "COLUMNS": "constexpr",
        "BLOCK": "constexpr",
        "PADDED": "constexpr",
    }
    block, padded = kernels.block_shape(columns)
    constants = {"COLUMNS": columns, "BLOCK": block, "PADDED": padded}
    return Build(f"dequantise, head of {columns}", kernels.dequantise_kernel, types, constants, kernels.NUM_WARPS)


BUILDS = (_quantise(64), _quantise(80), _quantise(128), _dequantise(64), _dequantise(80), _dequantise(128))
