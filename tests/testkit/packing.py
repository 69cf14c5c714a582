"""Packed weights of every kind with awkward inputs, and a judge of their products in double precision."""

from __future__ import annotations

from typing import NamedTuple

import torch

from magnitude_kernels.gemv.reference import GROUP, Packed, pack

KINDS = ("Q4_0", "Q4_1", "Q8_0", "8 bits with a minimum")


class Product(NamedTuple):
    """A product to compute, and its weight in float64, [outputs, inputs], its minimum apart."""

    x: torch.Tensor
    packed: Packed
    scaled: torch.Tensor
    minimum: torch.Tensor


def product(kind: str, size: tuple[int, int, int], dtype: torch.dtype, seed: int) -> Product:
    """Returns a product of `size` (rows, inputs, outputs) with scales of all signs and sizes, some of them 0."""
    rows, inputs, outputs = size
    generator = torch.Generator().manual_seed(seed)

    def numbers() -> torch.Tensor:
        return torch.randn(outputs, inputs // GROUP, generator=generator)

    least, end = (-8, 8) if kind.startswith("Q4") else (-128, 128)
    codes = torch.randint(least, end, (outputs, inputs), generator=generator, dtype=torch.int8)
    codes[0, 0], codes[-1, -1] = least, end - 1
    scale, minimum = (numbers() * 0.4 / end).half().float(), (numbers() * 0.4).half().float()
    # By a power of two, which float16 takes without rounding.
    scale[::7] *= 16
    scale[:, ::5] = 0
    minimum[::3] = 0
    if kind in ("Q4_0", "Q8_0"):
        minimum.zero_()
    # As GGUF stores Q4_1: codes from 0 on above the minimum.
    shift = 8 if kind == "Q4_1" else 0
    x = torch.randn(rows, inputs, generator=generator)
    x[:, ::11] *= 8
    scaled = (codes.double() + shift) * scale.double().repeat_interleave(GROUP, 1)
    packed = pack(codes, scale, minimum + shift * scale, 4 if kind.startswith("Q4") else 8)
    return Product(x.to(dtype), packed, scaled, minimum.double().repeat_interleave(GROUP, 1))


def complaints(given: Product, y: torch.Tensor, tolerance: float, rounding: float) -> list[str]:
    """Returns the numbers that are off by more than `tolerance` of what was added up and `rounding` of themselves."""
    x = given.x.cpu().double()
    exact = x @ (given.scaled + given.minimum).T
    bound = tolerance * (x.abs() @ (given.scaled.abs() + given.minimum.abs()).T) + rounding * exact.abs()
    error = (y.cpu().double() - exact).abs()
    wrong = (~(error <= bound)).nonzero().tolist()
    return [f"y[{row}, {output}] is off by {float(error[row, output]):.2e}" for row, output in wrong]
