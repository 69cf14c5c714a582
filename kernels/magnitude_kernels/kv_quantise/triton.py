"""The kernels that round keys and values to eight bits and back: one program per block of rows.

They compute what `kv_quantise.reference` defines, to the bit: the same float32 operations in an order that does not
matter to a maximum, with a division that rounds as IEEE 754 says.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from magnitude_kernels.kv_quantise.reference import (
    LARGEST_CODE,
    LARGEST_SCALE,
    LEAST_SCALE,
    Quantised,
    check_quantised,
    check_rows,
)

# Numbers that a program holds at once.
BLOCK_ELEMENTS = 4096
MOST_COLUMNS = 4096
NUM_WARPS = 4

_LARGEST_CODE = tl.constexpr(float(LARGEST_CODE))
_LEAST_SCALE = tl.constexpr(LEAST_SCALE)
_LARGEST_SCALE = tl.constexpr(LARGEST_SCALE)
_INFINITY = tl.constexpr(float("inf"))
# Added to and taken from a float32 below 2**22, it leaves the nearest whole number, the even one of two.
_ROUND = tl.constexpr(1.5 * 2.0**23)


def quantise(x: torch.Tensor) -> Quantised:
    """Rounds contiguous rows [..., n] on a GPU; see `kv_quantise.reference`."""
    check_rows(x)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    launch_quantise(x, codes, scales)
    return Quantised(codes, scales)


def dequantise(rows: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Returns codes times scales, in `dtype`, [..., n]."""
    check_quantised(rows, dtype)
    y = torch.empty(rows.codes.shape, dtype=dtype, device=rows.codes.device)
    launch_dequantise(rows, y)
    return y


def launch_quantise(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Runs the kernel into `codes` and `scales`."""
    rows, columns = scales.numel(), x.shape[-1]
    block, padded = block_shape(columns)
    if x.numel():
        quantise_kernel[(triton.cdiv(rows, block),)](
            x, codes, scales, rows, COLUMNS=columns, BLOCK=block, PADDED=padded, num_warps=NUM_WARPS
        )


def launch_dequantise(quantised: Quantised, y: torch.Tensor) -> None:
    """Runs the kernel into `y`."""
    rows, columns = quantised.scales.numel(), y.shape[-1]
    block, padded = block_shape(columns)
    if y.numel():
        dequantise_kernel[(triton.cdiv(rows, block),)](
            quantised.codes,
            quantised.scales,
            y,
            rows,
            COLUMNS=columns,
            BLOCK=block,
            PADDED=padded,
            num_warps=NUM_WARPS,
        )


def block_shape(columns: int) -> tuple[int, int]:
    """Returns rows per program, and the columns rounded up to a power of two."""
    if columns > MOST_COLUMNS:
        raise ValueError(f"rows may have {MOST_COLUMNS} numbers, not {columns}: quantise each head by itself")
    padded = max(16, 1 << (columns - 1).bit_length())
    return BLOCK_ELEMENTS // padded, padded


@triton.jit  # type: ignore[untyped-decorator]
def quantise_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scales_ptr,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Rounds rows `program_id(0) * BLOCK ...` of [rows, COLUMNS]."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    at = row[:, None] * COLUMNS + column[None, :]
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    size = tl.abs(x)
    # A comparison with NaN is false, and a maximum may drop it.
    peak = tl.max(tl.where(size < _INFINITY, size, _INFINITY), 1)
    finite = peak < _INFINITY
    scale = tl.div_rn(tl.where(finite, peak, 0.0), _LARGEST_CODE)
    scale = tl.minimum(tl.maximum(scale, _LEAST_SCALE), _LARGEST_SCALE)
    quotient = tl.div_rn(tl.where(finite[:, None], x, 0.0), scale[:, None])
    codes = (quotient + _ROUND) - _ROUND
    tl.store(codes_ptr + at, codes.to(tl.int8), mask=inside)
    tl.store(scales_ptr + row, tl.where(finite, scale, float("nan")), mask=row < rows)


@triton.jit  # type: ignore[untyped-decorator]
def dequantise_kernel(  # type: ignore[no-untyped-def]
    codes_ptr,
    scales_ptr,
    y_ptr,
    rows,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Multiplies rows `program_id(0) * BLOCK ...` of [rows, COLUMNS] by their scales."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, PADDED)
    at = row[:, None] * COLUMNS + column[None, :]
    inside = (row < rows)[:, None] & (column < COLUMNS)[None, :]
    codes = tl.load(codes_ptr + at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales_ptr + row, mask=row < rows, other=0.0)[:, None]
    tl.store(y_ptr + at, (codes * scale).to(y_ptr.dtype.element_ty), mask=inside)
