"""Rounds keys or values to eight bits in plain torch: the definition of the operation, and its path on CPU.

A row is the last axis: the head_dim numbers of one token and head. All arithmetic is float32, rounding is to even:

    scale = max |x| / 127, within LEAST_SCALE..LARGEST_SCALE      code = round(x / scale)      y = code * scale

so that |x - y| <= (1/2 + 2**-16) scale for every finite x: half a step, and the rounding of the float32 arithmetic.
`dequantise` to another dtype adds that dtype's own rounding. A row of zeros stays zeros. A row that holds NaN or an
infinity is marked by a scale of NaN, with codes of 0, and comes back as NaN throughout: never as plausible numbers.

The result is not the cache's content: whoever stores pages so changes what the model says, and must have been asked
to. Scales are float32 because a scale in half precision would overflow or vanish on numbers that bfloat16 can hold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST_CODE = 127
# The smallest normal float32: below it the quotient would lose its precision, or divide by zero.
LEAST_SCALE = torch.finfo(torch.float32).tiny
# Above it, a code of 127 would come back as an infinity.
LARGEST_SCALE = float(torch.tensor(torch.finfo(torch.float32).max / LARGEST_CODE).nextafter(torch.tensor(0.0)))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Quantised(NamedTuple):
    """Rounded rows.

    Attributes:
        codes: int8 [..., n], -127..127.
        scales: float32 [...], NaN where the row was not finite.
    """

    codes: torch.Tensor
    scales: torch.Tensor


def quantise(x: torch.Tensor) -> Quantised:
    """Rounds rows of float32, float16 or bfloat16, contiguous [..., n]; raises ValueError for others."""
    check_rows(x)
    wide = x.float()
    peak = wide.abs().amax(-1)
    finite = peak < torch.inf
    scales = torch.where(finite, (peak / LARGEST_CODE).clamp(LEAST_SCALE, LARGEST_SCALE), torch.nan)
    quotient = torch.where(finite[..., None], wide / scales[..., None], 0.0)
    return Quantised(quotient.round_().to(torch.int8), scales)


def dequantise(rows: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Returns codes times scales, in `dtype`, [..., n]."""
    check_quantised(rows, dtype)
    return (rows.codes.float() * rows.scales[..., None]).to(dtype)


def check_rows(x: torch.Tensor) -> None:
    """Raises ValueError where `x` cannot be quantised."""
    if x.dtype not in DTYPES or x.dim() < 1 or x.shape[-1] < 1 or not x.is_contiguous():
        raise ValueError(
            f"quantise needs contiguous rows of float32, float16 or bfloat16, not {x.dtype} {tuple(x.shape)} with "
            f"strides {x.stride()}"
        )


def check_quantised(rows: Quantised, dtype: torch.dtype) -> None:
    """Raises ValueError where codes and scales do not belong together, or `dtype` is no target."""
    codes, scales = rows
    fits = codes.shape[:-1] == scales.shape and codes.device == scales.device
    typed = codes.dtype == torch.int8 and scales.dtype == torch.float32 and dtype in DTYPES
    if not (fits and typed and codes.is_contiguous() and scales.is_contiguous()):
        raise ValueError(
            f"dequantise needs contiguous int8 codes and a float32 scale per row, not {codes.dtype} "
            f"{tuple(codes.shape)} and {scales.dtype} {tuple(scales.shape)} to {dtype}"
        )
