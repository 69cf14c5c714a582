"""Sizes at which the kernels of `norm_rope_write` are compiled ahead of time."""

from __future__ import annotations

from magnitude_kernels.norm_rope_write import triton as kernels
from testkit.triton_runs import Build


def _turn(heads: int, kv_heads: int, head_dim: int, normed: bool) -> Build:
    types = {
        "qkv_ptr": "*bf16",
        "qkv_stride": "i64",
        "positions_ptr": "*i64",
        "slots_ptr": "*i64",
        "cosine_ptr": "*fp32",
        "sine_ptr": "*fp32",
        "q_norm_ptr": "*fp32",
        "k_norm_ptr": "*fp32",
        "epsilon": "fp32",
        "q_ptr": "*bf16",
        "keys_ptr": "*bf16",
        "values_ptr": "*bf16",
        "HEADS": "constexpr",
        "KV_HEADS": "constexpr",
        "HALF": "constexpr",
        "HAS_NORMS": "constexpr",
        "HEAD_BLOCK": "constexpr",
        "PADDED": "constexpr",
    }
    constants = {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": head_dim // 2,
        "HAS_NORMS": normed,
        "HEAD_BLOCK": kernels.HEAD_BLOCK,
        "PADDED": kernels.half_block(head_dim),
    }
    name = f"rope_write, {heads} + {kv_heads} heads of {head_dim}{', normed' if normed else ''}"
    return Build(name, kernels.rope_write_kernel, types, constants, kernels.NUM_WARPS)


def _norm(columns: int) -> Build:
    types = {
        "h_ptr": "*fp32",
        "x_ptr": "*bf16",
        "weight_ptr": "*fp32",
        "epsilon": "fp32",
        "y_ptr": "*bf16",
        "COLUMNS": "constexpr",
        "HAS_X": "constexpr",
        "PADDED": "constexpr",
    }
    padded, warps = kernels.row_block(columns)
    constants = {"COLUMNS": columns, "HAS_X": True, "PADDED": padded}
    return Build(f"add_norm, {columns:,} wide", kernels.add_norm_kernel, types, constants, warps)


# SmolLM2, Llama 3 8B and 70B, Qwen 3 (normed heads), and a head that is no power of two.
BUILDS = (
    _turn(9, 3, 64, normed=False),
    _turn(64, 8, 128, normed=False),
    _turn(32, 8, 128, normed=True),
    _turn(32, 32, 80, normed=False),
    _norm(576),
    _norm(4_096),
    _norm(8_192),
    _norm(16_384),
)
