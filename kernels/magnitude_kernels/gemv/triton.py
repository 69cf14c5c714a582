"""The kernels of products with packed weights: one program per tile of outputs and stretch of groups.

A program multiplies codes, which are exact in every type of x, and applies scale and minimum to the sums of a group:

    y = sum over groups of  scale * (x @ codes)  +  minimum * sum(x)

So weights are never rounded. Stretches are added up by a second kernel in a fixed order; tiles and stretches depend on
the weight alone, and a row's bits do not depend on the rows beside it.

Tolerance: with b = sum of |x| * (|(code - zero) * scale| + |minimum|), a result is within TOLERANCE * b of the
definition in float64, and then rounded to the type of x.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from magnitude_kernels.gemv.reference import GROUP, MOST_ROWS, Packed, check_product

TOLERANCE = 2.0**-19
BLOCK_N = 64
NUM_WARPS = 4
STAGES = 4
# Triton 3.6 fails to compile four for AMD.
AMD_STAGES = 2
COMBINED = 1024
# Enough programs for every part of the largest GPUs; a stretch below LEAST_GROUPS costs more to add up than it gives.
_PROGRAMS = 1024
_LEAST_GROUPS = 8

_ROWS = tl.constexpr(MOST_ROWS)
_GROUP = tl.constexpr(GROUP)
_HALF = tl.constexpr(GROUP // 2)


class Stretches(NamedTuple):
    """How the groups of a weight are shared out: `number` stretches of `groups` each, the last one perhaps shorter."""

    number: int
    groups: int


def gemv(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Returns x @ weight.T on a GPU; see `reference.gemv`."""
    check_product(x, weight)
    y = torch.empty((x.shape[0], weight.outputs), dtype=x.dtype, device=x.device)
    launch(x, weight, y, workspace(y, weight))
    return y


def workspace(y: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Returns where stretches put their sums: `y` itself where there is but one, else float32 [stretches, *y.shape]."""
    number = stretches(weight.inputs // GROUP, weight.outputs).number
    return y if number == 1 else torch.empty((number, *y.shape), dtype=torch.float32, device=y.device)


def launch(x: torch.Tensor, weight: Packed, y: torch.Tensor, sums: torch.Tensor) -> None:
    """Runs the kernels into `y`, contiguous, by way of `sums` (from `workspace`)."""
    if not y.numel():
        return
    groups, outputs = weight.scale.shape
    shared = stretches(groups, outputs)
    product_kernel[(triton.cdiv(outputs, BLOCK_N), shared.number)](
        x,
        weight.codes,
        weight.scale,
        weight.minimum,
        sums,
        x.shape[0],
        x.stride(0),
        outputs,
        groups,
        GROUPS=shared.groups,
        BITS=weight.bits,
        HAS_MINIMUM=weight.minimum is not None,
        # The interpreter multiplies bf16 wrongly.
        WIDE=triton.knobs.runtime.interpret and x.dtype == torch.bfloat16,
        PRECISION="ieee" if torch.version.hip else "tf32x3",
        BLOCK=BLOCK_N,
        num_warps=NUM_WARPS,
        num_stages=AMD_STAGES if torch.version.hip else STAGES,
    )
    if shared.number > 1:
        add_kernel[(triton.cdiv(y.numel(), COMBINED),)](
            sums, y, y.numel(), COUNT=shared.number, BLOCK=COMBINED, num_warps=NUM_WARPS
        )


def stretches(groups: int, outputs: int) -> Stretches:
    """Returns how the programs share a weight's groups."""
    wanted = triton.cdiv(_PROGRAMS, triton.cdiv(outputs, BLOCK_N))
    each = max(_LEAST_GROUPS, triton.cdiv(groups, wanted))
    # A power of two: each size is compiled by itself.
    each = 1 << (each - 1).bit_length()
    return Stretches(max(1, triton.cdiv(groups, each)), each)


@triton.jit  # type: ignore[untyped-decorator]
def _nibble(codes, HAS_MINIMUM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns 4-bit codes as they are multiplied: without a minimum their zero is 8."""
    numbers = codes.to(tl.int32)
    if not HAS_MINIMUM:
        numbers -= 8
    return numbers


@triton.jit  # type: ignore[untyped-decorator]
def product_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scale_ptr,
    minimum_ptr,
    sums_ptr,
    rows,
    x_stride,
    outputs,
    groups,
    GROUPS: tl.constexpr,
    BITS: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiplies GROUPS groups from `program_id(1) * GROUPS` on into outputs `program_id(0) * BLOCK ...`."""
    stretch = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, _ROWS)
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    within = tl.arange(0, _HALF)
    x_ptr += row[:, None].to(tl.int64) * x_stride + within[None, :]
    sums = tl.zeros((_ROWS, BLOCK), tl.float32)
    for step in range(0, GROUPS):
        group = stretch * GROUPS + step
        given = output < tl.where(group < groups, outputs, 0)
        read = (row < tl.where(group < groups, rows, 0))[:, None]
        x_low = tl.load(x_ptr + group * _GROUP, mask=read, other=0.0)
        x_high = tl.load(x_ptr + group * _GROUP + _HALF, mask=read, other=0.0)
        if WIDE:
            x_low, x_high = x_low.to(tl.float32), x_high.to(tl.float32)
        at = group * outputs + output
        if BITS == 4:
            codes = tl.load(codes_ptr + at[None, :] * _HALF + within[:, None], mask=given[None, :], other=0)
            low, high = _nibble(codes & 15, HAS_MINIMUM), _nibble(codes >> 4, HAS_MINIMUM)
        else:
            code_ptr = codes_ptr + at[None, :] * _GROUP + within[:, None]
            low = tl.load(code_ptr, mask=given[None, :], other=0)
            high = tl.load(code_ptr + _HALF, mask=given[None, :], other=0)
        product = tl.dot(x_low, low.to(x_low.dtype), input_precision=PRECISION)
        product = tl.dot(x_high, high.to(x_high.dtype), product, input_precision=PRECISION)
        sums += product * tl.load(scale_ptr + at, mask=given, other=0.0).to(tl.float32)[None, :]
        if HAS_MINIMUM:
            total = tl.sum(x_low.to(tl.float32), 1) + tl.sum(x_high.to(tl.float32), 1)
            minimum = tl.load(minimum_ptr + at, mask=given, other=0.0).to(tl.float32)
            sums += total[:, None] * minimum[None, :]
    place = (stretch * rows + row[:, None]) * outputs + output[None, :]
    inside = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(sums_ptr + place, sums.to(sums_ptr.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def add_kernel(sums_ptr, y_ptr, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds up COUNT stretches of `size` numbers, in their order."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for _ in range(0, COUNT):
        total += tl.load(sums_ptr + at, mask=at < size, other=0.0)
        sums_ptr += size
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=at < size)
