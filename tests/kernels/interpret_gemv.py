"""Products with packed weights under Triton's interpreter; `test_speculation_kernels.py` runs this with
TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels.gemv.reference import DTYPES
from magnitude_kernels.gemv.triton import TOLERANCE, gemv, launch, stretches, workspace
from testkit.packing import KINDS, Product, complaints, product

# One group; a stretch that is not full and a tile that is not; several stretches, the last one short.
SIZES = [(1, 32, 1), (3, 96, 70), (16, 608, 129)]


def rounding(dtype: torch.dtype) -> float:
    """Returns the relative error of the last rounding: the interpreter cuts bfloat16 off."""
    eps = torch.finfo(dtype).eps
    return eps if dtype == torch.bfloat16 else eps / 2


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_multiply_as_the_definition_says(kind: str, size: tuple[int, int, int]) -> None:
    for dtype in DTYPES:
        given = product(kind, size, dtype, seed=size[0])
        rows, _, outputs = size
        # One row more than is written: it must keep its mark.
        y = torch.full((rows + 1, outputs), torch.inf, dtype=dtype)
        sums = workspace(y[:rows], given.packed).fill_(torch.inf)
        launch(given.x, given.packed, y[:rows], sums)
        assert bool(y[rows].isinf().all())
        assert complaints(given, y[:rows], TOLERANCE, rounding(dtype)) == []


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    given = product("Q4_1", (16, 608, 129), torch.float32, seed=1)
    together = gemv(given.x, given.packed)
    for row in range(0, 16, 5):
        wide = torch.full((16, 700), torch.nan)
        wide[row, :608] = given.x[row]
        assert torch.equal(gemv(wide[:, :608], given.packed)[row], together[row])


def test_the_judge_sees_a_kernel_that_skips_a_group() -> None:
    given = product("Q8_0", (2, 608, 129), torch.float32, seed=2)
    y = gemv(torch.cat([given.x[:, :576], 0 * given.x[:, 576:]], 1), given.packed)
    assert complaints(given, y, TOLERANCE, rounding(torch.float32))
    assert not complaints(Product(given.x, *given[1:]), gemv(given.x, given.packed), TOLERANCE, 2.0**-24)


def test_stretches_cover_every_group_once() -> None:
    for groups in (1, 7, 18, 48, 128, 448):
        for outputs in (1, 192, 960, 4096, 49_152, 128_256):
            number, each = stretches(groups, outputs)
            assert (number - 1) * each < groups <= number * each
