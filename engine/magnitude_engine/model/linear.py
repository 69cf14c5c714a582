"""The forms in which a matrix multiplies: dense, and dense in fixed tiles of rows.

Every form maps [rows, in] to [rows, out] in its own dtype. Only `Tiled` promises that a row's result does not
depend on the rows beside it. (Packed weights: `packed.py`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from magnitude_engine.model.weights import Matrix, dense

TILE_ROWS = 16


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


def in_tiles(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Applies a row-wise function to `TILE_ROWS` rows at a time, the last tile padded with zeros."""
    rows = x.shape[0]
    results = []
    for start in range(0, rows, TILE_ROWS):
        tile = x[start : start + TILE_ROWS]
        missing = TILE_ROWS - tile.shape[0]
        results.append(function(functional.pad(tile, (0, 0, 0, missing)) if missing else tile))
    return torch.cat(results)[:rows] if len(results) != 1 else results[0][:rows]


def stack_dense(matrices: Sequence[Matrix], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns the matrices one above the other in one dense tensor."""
    parts = [dense(m).to(dtype) for m in matrices]
    return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(device)
