"""Rotary, cache writes and norms in plain torch against the judges in double precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magnitude_kernels import dispatch
from testkit.norming import EPSILON, SHAPES, Shape, normed_wrongly, stream, turned_wrongly, turning

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_turning(dtype: torch.dtype, shape: Shape, normed: bool) -> None:
    given = turning(shape, dtype, normed, seed=shape.rows)
    q = dispatch.rope_write(*given)
    assert (q.shape, q.dtype) == ((shape.rows, shape.heads, shape.head_dim), dtype)
    assert turned_wrongly(given, q) == []


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (1, 1), (5, 80), (9, 576)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_streams(dtype: torch.dtype, rows: int, columns: int, added: bool) -> None:
    given = stream(rows, columns, dtype, added, seed=columns)
    h = given.h.clone()
    y = dispatch.add_norm(h, given.x, given.weight, EPSILON, dtype)
    assert y.dtype == dtype
    assert normed_wrongly(given, h, y) == []


def test_the_judges_see_what_is_wrong() -> None:
    given = turning(Shape(5, 9, 3, 64), torch.float32, normed=False, seed=1)
    q = dispatch.rope_write(*given)
    assert turned_wrongly(given, q * (1 + 1e-5)) == ["queries"]
    free = next(slot for slot in range(16) if slot not in given.places.slots.tolist())
    given.values.flatten(0, 1)[free, 0, 0] = 0.0
    assert turned_wrongly(given, q) == ["values that no row owns were written"]
    given.keys.flatten(0, 1)[given.places.slots[0], 2, 63] += 1e-3
    assert turned_wrongly(given, q)[0] == "keys"
    before = stream(5, 80, torch.float32, True, seed=1)
    y = dispatch.add_norm(before.h.clone(), before.x, before.weight, EPSILON, torch.float32)
    assert normed_wrongly(before, before.h, y * (1 + 1e-5)) == ["sums", "norms"]


def test_what_does_not_fit_is_refused() -> None:
    qkv, places, keys, values, _ = turning(Shape(3, 4, 2, 8), torch.float32, normed=False, seed=2)
    with pytest.raises(ValueError, match="width 32"):
        dispatch.rope_write(qkv[:, :32], places, keys, values)
    with pytest.raises(ValueError, match="alike"):
        dispatch.rope_write(qkv, places, keys, values.half())
    with pytest.raises(ValueError, match="positions and slots"):
        dispatch.rope_write(qkv, replace(places, slots=places.slots[:2]), keys, values)
    with pytest.raises(ValueError, match="rotary tables"):
        dispatch.rope_write(qkv, replace(places, sine=places.sine[:, :4]), keys, values)
    h, _, weight = stream(3, 8, torch.float32, False, seed=3)
    with pytest.raises(ValueError, match="one width"):
        dispatch.add_norm(h, None, weight[:4], EPSILON, torch.float32)
    with pytest.raises(ValueError, match="contiguous"):
        dispatch.add_norm(h, torch.zeros(8, 3).t(), weight, EPSILON, torch.float32)
