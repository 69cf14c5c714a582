"""Multiplies few rows with packed weights in plain torch: the definition of the operation, and its path on CPU.

Weights are whole numbers in groups of GROUP along the input, as GGUF's Q4_0, Q4_1 and Q8_0 have them:

    weight[o, i] = (code[o, i] - zero) * scale[o, i // 32] + minimum[o, i // 32]

    Q4_1    codes 0 .. 15, zero 0           Q4_0    codes 0 .. 15, zero 8, no minimum
    Q8_0    codes -128 .. 127, zero 0, no minimum

Scales and minima are float16, which is exact for those types. They and the codes stand group by group, so that the
programs of a kernel, each with some outputs and some groups, read whole stretches of memory. A byte of 4-bit codes
holds input j of its group in the low half and input j + 16 in the high one.

    y = x @ weight.T    in float32 throughout, at last rounded to the type of x
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

GROUP = 32
MOST_ROWS = 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_HALF = GROUP // 2
_ZERO = 8


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight of [outputs, inputs]; build it with `pack`.

    Attributes:
        codes: uint8 [groups, outputs, 16] for 4 bits, int8 [groups, outputs, 32] for 8.
        scale: float16 [groups, outputs].
        minimum: the same, or None where it is 0 throughout.
        bits: 4 or 8.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None
    bits: int

    @property
    def outputs(self) -> int:
        """How many numbers a product has."""
        return self.codes.shape[1]

    @property
    def inputs(self) -> int:
        """How many numbers a row of the input has."""
        return self.codes.shape[0] * GROUP

    def dense(self) -> torch.Tensor:
        """Returns the weights, float32 [outputs, inputs]."""
        codes = self.codes
        if self.bits == 4:
            zero = _ZERO if self.minimum is None else 0
            codes = torch.cat([codes & 15, codes >> 4], -1).to(torch.int8) - zero
        weight = codes.float() * self.scale.float()[..., None]
        if self.minimum is not None:
            weight += self.minimum.float()[..., None]
        return weight.transpose(0, 1).reshape(self.outputs, self.inputs)


def pack(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int) -> Packed:
    """Packs weight[o, i] = codes[o, i] * scale[o, i // 32] + minimum[o, i // 32].

    `codes` is int8 [outputs, inputs], -8..7 where `bits` is 4; `scale` and `minimum` are [outputs, inputs / 32] and
    are rounded to float16.

    Raises:
        ValueError: the shapes do not fit, `bits` is neither 4 nor 8, codes have more bits, or a scale or minimum is
            beyond float16.
    """
    _check(codes, scale, minimum, bits)
    outputs, groups = scale.shape
    grouped = codes.view(outputs, groups, GROUP).transpose(0, 1)
    kept = minimum if bool(minimum.any()) else None
    if bits == 4:
        unsigned = (grouped + _ZERO).to(torch.uint8)
        grouped = unsigned[..., :_HALF] | (unsigned[..., _HALF:] << 4)
        kept = None if kept is None else kept - _ZERO * scale
    return Packed(grouped.contiguous(), _half(scale), None if kept is None else _half(kept), bits)


def gemv(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Returns x @ weight.T, [rows, outputs] in the type of `x` ([rows, inputs], at most MOST_ROWS rows)."""
    check_product(x, weight)
    return functional.linear(x.float(), weight.dense()).to(x.dtype)


def check_product(x: torch.Tensor, weight: Packed) -> None:
    """Raises ValueError where `x` cannot be multiplied."""
    if x.dim() != 2 or x.shape[1] != weight.inputs or x.stride(1) != 1 or x.dtype not in DTYPES:
        raise ValueError(
            f"gemv needs float rows of {weight.inputs} numbers without gaps, not {x.dtype} {tuple(x.shape)} "
            f"with strides {x.stride()}"
        )
    if x.shape[0] > MOST_ROWS:
        raise ValueError(f"gemv takes at most {MOST_ROWS} rows, not {x.shape[0]}: multiply with dense weights")


def _check(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, bits: int) -> None:
    grouped = codes.dim() == 2 and codes.shape[1] % GROUP == 0
    if not grouped or not scale.shape == minimum.shape == (codes.shape[0], codes.shape[1] // GROUP):
        shapes = [tuple(t.shape) for t in (codes, scale, minimum)]
        raise ValueError(f"codes need groups of {GROUP} with a scale and a minimum each, not {shapes}")
    if bits not in (4, 8) or codes.dtype != torch.int8:
        raise ValueError(f"codes are int8 of 4 or 8 bits, not {codes.dtype} of {bits}")
    if bits == 4 and codes.numel() and not (codes.min() >= -_ZERO and codes.max() < _ZERO):
        raise ValueError(f"4-bit codes are -8 to 7, not {int(codes.min())} to {int(codes.max())}")


def _half(numbers: torch.Tensor) -> torch.Tensor:
    """Returns [outputs, groups] as float16 [groups, outputs]."""
    rounded = numbers.transpose(0, 1).to(torch.float16).contiguous()
    if not bool(rounded.isfinite().all()):
        raise ValueError("a scale or minimum is beyond float16 (65,504): keep such weights dense")
    return rounded
