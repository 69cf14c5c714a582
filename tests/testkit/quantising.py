"""Rows that are hard to round, and a judge of rounded rows in double precision."""

from __future__ import annotations

import math

import torch

from magnitude_kernels.kv_quantise.reference import Quantised

# Half a step, and the rounding of float32 arithmetic.
BOUND = 0.5 + 2.0**-16
TINY = 2.0**-126


def rows(number: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Returns [number, columns]: plain, zeros, ties, one outlier, the largest, denormal, NaN, infinite, small rows."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(number, columns, generator=draw)
    limits = torch.finfo(dtype)
    for row, values in enumerate(x):
        kind = (row + seed) % 9
        if kind == 1:
            values.zero_()
        elif kind == 2:
            values.copy_(torch.arange(columns) % 8 / 2 - 1.75)
        elif kind == 3:
            values[columns // 2] = 1e4
        elif kind == 4:
            values.copy_((values.sign() * limits.max).float())
        elif kind == 5:
            values.mul_(limits.tiny / 64)
        elif kind == 6:
            values[-1] = math.nan
        elif kind == 7:
            values[0] = -math.inf
        elif kind == 8:
            values.mul_(1e-30 if limits.max > 1e30 else 1e-6)
    return x.to(dtype)


def complaints(x: torch.Tensor, found: Quantised, back: torch.Tensor) -> list[str]:
    """Returns what is wrong with the codes and scales of `x`, and with what they come `back` as."""
    wrong = []
    dtype = back.dtype
    x, codes, scales, back = (t.cpu() for t in (x, found.codes, found.scales, back))
    broken = ~x.double().isfinite().all(-1)
    if not torch.equal(scales.isnan(), broken) or bool(codes[broken].any()) or not bool(back[broken].isnan().all()):
        wrong.append("rows that are not finite are marked otherwise")
    exact, codes, back = x[~broken].double(), codes[~broken].double(), back[~broken].double()
    scale = scales[~broken].double()[:, None]
    wanted = (exact.abs().amax(-1, keepdim=True) / 127).clamp(min=TINY)
    if bool(((scale - wanted).abs() > wanted * 2.0**-23).any()):
        wrong.append("a scale is not the largest number over 127")
    if bool((codes.abs() > 127).any()) or bool(((exact - codes * scale).abs() > BOUND * scale).any()):
        wrong.append("a code is further than half a step from its number")
    slack = torch.finfo(dtype).eps / 2 * codes.abs() * scale * (1 + 2.0**-20) + torch.finfo(dtype).smallest_normal
    if bool(((back - codes * scale).abs() > slack).any()) or not bool(back.isfinite().all()):
        wrong.append("a row does not come back as its codes times its scale")
    return wrong
