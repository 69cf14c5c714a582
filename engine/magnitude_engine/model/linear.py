"""The forms in which a matrix multiplies: dense, dense in fixed tiles of rows, packed 4-bit, 8-bit rows.

Every form maps [rows, in] to [rows, out] in its own dtype. Only `Tiled` promises that a row's result does not
depend on the rows beside it; the others choose speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from magnitude_engine.model.gguf import GROUP, Blocks
from magnitude_engine.model.weights import Matrix, dense

TILE_ROWS = 16
_PACK_ROWS = 16


class Linear(Protocol):
    """A matrix that multiplies rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x @ weight.T."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight [out, in] in the dtype of its input."""

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x @ weight.T."""
        return functional.linear(x, self.weight)


@dataclass(frozen=True, slots=True)
class Tiled:
    """A float32 weight that always multiplies `TILE_ROWS` rows at once, padded with zeros.

    A matrix library picks its order of additions by the number of rows; with one size there is one order.
    """

    weight: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x @ weight.T."""
        return in_tiles(lambda tile: functional.linear(tile, self.weight), x)


@dataclass(frozen=True, slots=True)
class Packed4:
    """4-bit codes in groups of 32 along the input, in the layout of torch's CPU kernel; input bfloat16.

    Attributes:
        codes: the kernel's own layout.
        scale_zero: bfloat16 [in / 32, out, 2].
    """

    codes: torch.Tensor
    scale_zero: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x @ weight.T."""
        result: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.codes, GROUP, self.scale_zero)
        return result


@dataclass(frozen=True, slots=True)
class Rows8:
    """8-bit codes with one scale per output row; input bfloat16.

    Attributes:
        codes: int8 [out, in].
        scale: bfloat16 [out].
    """

    codes: torch.Tensor
    scale: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x @ weight.T."""
        return torch._weight_int8pack_mm(x, self.codes, self.scale)


def in_tiles(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Applies a row-wise function to `TILE_ROWS` rows at a time, the last tile padded with zeros."""
    rows = x.shape[0]
    results = []
    for start in range(0, rows, TILE_ROWS):
        tile = x[start : start + TILE_ROWS]
        missing = TILE_ROWS - tile.shape[0]
        results.append(function(functional.pad(tile, (0, 0, 0, missing)) if missing else tile))
    return torch.cat(results)[:rows] if len(results) != 1 else results[0][:rows]


def packable(matrices: Sequence[Matrix]) -> bool:
    """True where the 4-bit kernel can hold these matrices stacked."""
    fits = all(isinstance(m, Blocks) and m.bits == 4 for m in matrices)
    return fits and sum(dense_rows(m) for m in matrices) % _PACK_ROWS == 0


def dense_rows(matrix: Matrix) -> int:
    """Returns the number of output rows."""
    return (matrix.codes if isinstance(matrix, Blocks) else matrix).shape[0]


def stack_dense(matrices: Sequence[Matrix], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the matrices one above the other in one dense tensor."""
    parts = [dense(m).to(dtype) for m in matrices]
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(device)


def pack4(matrices: Sequence[Matrix]) -> Packed4:
    """Packs 4-bit matrices stacked one above the other (see `packable`).

    The kernel computes (code - 8) * scale + zero with codes 0..15, so a group's minimum is its zero. Scales and
    zeros become bfloat16, a relative weight error of 2e-3 at most.
    """
    blocks = [m for m in matrices if isinstance(m, Blocks)]
    codes = torch.cat([b.codes for b in blocks]).int() + 8
    scale = torch.cat([b.scale for b in blocks])
    zero = torch.cat([b.minimum for b in blocks])
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return Packed4(packed, torch.stack([scale, zero], -1).transpose(0, 1).contiguous().bfloat16())


def quantise_rows(matrix: Matrix) -> Rows8:
    """Rounds a matrix to 8 bits with one scale per row (relative error about 7e-3 of a weight)."""
    weight = dense(matrix)
    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp_min_(1e-12).bfloat16()
    codes = (weight / scale.float()).round_().clamp_(-128, 127).to(torch.int8)
    return Rows8(codes, scale[:, 0].contiguous())
