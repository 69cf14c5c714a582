"""The kernels of `norm_rope_write` under Triton's interpreter; `test_norm_rope_write_kernel.py` runs this file."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from magnitude_kernels.norm_rope_write import triton as kernels
from testkit.norming import EPSILON, SHAPES, Shape, normed_wrongly, stream, turned_wrongly, turning

# The interpreter cuts bfloat16 off where GPUs round.
ULPS = {torch.float32: 0.5, torch.float16: 0.5, torch.bfloat16: 1.0}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ULPS, ids=str)
def test_turning(dtype: torch.dtype, shape: Shape, normed: bool) -> None:
    given = turning(shape, dtype, normed, seed=shape.rows)
    # One row more than is written: it must keep its mark.
    q = torch.full((shape.rows + 1, shape.heads, shape.head_dim), math.nan, dtype=dtype)
    kernels.launch_rope_write(*given, q[: shape.rows])
    assert turned_wrongly(given, q[: shape.rows], ULPS[dtype]) == []
    assert bool(q[shape.rows].isnan().all())


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (1, 1), (5, 80), (3, 576), (2, 5000)])
@pytest.mark.parametrize("dtype", ULPS, ids=str)
def test_streams(dtype: torch.dtype, rows: int, columns: int, added: bool) -> None:
    given = stream(rows, columns, dtype, added, seed=columns)
    h = torch.cat([given.h, torch.full((1, columns), math.nan)])
    y = torch.full((rows + 1, columns), math.nan, dtype=dtype)
    kernels.launch_add_norm(h[:rows], given.x, given.weight, EPSILON, y[:rows])
    assert normed_wrongly(given, h[:rows], y[:rows], ULPS[dtype]) == []
    assert bool(h[rows].isnan().all())
    assert bool(y[rows].isnan().all())


def test_rows_do_not_depend_on_each_other() -> None:
    given = turning(Shape(5, 9, 3, 64), torch.float32, normed=True, seed=3)
    together = kernels.rope_write(*given)
    for row in range(5):
        one = slice(row, row + 1)
        places = replace(given.places, positions=given.places.positions[one], slots=given.places.slots[one])
        alone = kernels.rope_write(given.qkv[one], places, given.keys, given.values, given.norms)
        assert torch.equal(alone[0], together[row])


def test_too_wide_a_row_is_refused() -> None:
    h = torch.zeros(1, kernels.MOST_COLUMNS + 1)
    with pytest.raises(ValueError, match="at most 16384"):
        kernels.add_norm(h, None, h[0], EPSILON, torch.float32)
