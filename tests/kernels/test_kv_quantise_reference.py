"""Rounding in plain torch against the judge in double precision; the kernel is held to the same."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels import dispatch
from magnitude_kernels.kv_quantise.reference import LEAST_SCALE, Quantised
from testkit.quantising import complaints, rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("columns", [1, 64, 80, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_awkward_rows(dtype: torch.dtype, columns: int) -> None:
    x = rows(36, columns, dtype, seed=columns)
    found = dispatch.quantise(x)
    assert complaints(x, found, dispatch.dequantise(found, dtype)) == []
    assert complaints(x, found, dispatch.dequantise(found, torch.float32)) == []


def test_pages_keep_their_shape() -> None:
    pages = torch.randn(3, 16, 3, 80)
    found = dispatch.quantise(pages)
    assert (found.codes.shape, found.scales.shape) == (pages.shape, pages.shape[:-1])
    step = found.scales[..., None]
    assert bool(((dispatch.dequantise(found, torch.float32) - pages).abs() <= 0.5001 * step).all())
    none = dispatch.quantise(pages[:0])
    assert dispatch.dequantise(none, torch.bfloat16).shape == (0, 16, 3, 80)


def test_zeros_and_denormals_stay_what_they_are() -> None:
    found = dispatch.quantise(torch.tensor([[0.0, -0.0], [1e-45, 0.0], [LEAST_SCALE * 3, LEAST_SCALE]]))
    assert found.scales.tolist() == [LEAST_SCALE] * 3
    assert found.codes.tolist() == [[0, 0], [0, 0], [3, 1]]


def test_the_judge_sees_a_wrong_code() -> None:
    x = rows(18, 64, torch.float32, seed=0)
    found = dispatch.quantise(x)
    back = dispatch.dequantise(found, torch.float32)
    codes = found.codes.clone()
    codes[0, 3] += 1
    assert len(complaints(x, found._replace(codes=codes), back)) == 2
    assert len(complaints(x, found._replace(scales=found.scales * 1.01), back)) == 3
    assert len(complaints(x, found._replace(scales=found.scales.nan_to_num(1.0)), back)) == 1


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        dispatch.quantise(torch.zeros(4, 8).t())
    with pytest.raises(ValueError, match="contiguous rows"):
        dispatch.quantise(torch.zeros(4, 8, dtype=torch.int32))
    with pytest.raises(ValueError, match="scale per row"):
        dispatch.dequantise(Quantised(torch.zeros(4, 8, dtype=torch.int8), torch.zeros(3)), torch.float32)
