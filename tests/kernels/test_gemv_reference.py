"""Products with packed weights in plain torch against the judge in double precision; the kernel is held to the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magnitude_engine.model.gguf import Blocks, GgufFile
from magnitude_kernels import dispatch
from magnitude_kernels.gemv.reference import DTYPES, MOST_ROWS, pack
from magnitude_kernels.gemv.triton import TOLERANCE
from testkit.model import smollm2_path
from testkit.packing import KINDS, complaints, product


@pytest.mark.parametrize("kind", KINDS)
def test_awkward_products(kind: str) -> None:
    for dtype, size in zip(DTYPES, [(16, 320, 129), (3, 96, 70), (1, 32, 1)], strict=True):
        given = product(kind, size, dtype, seed=size[0])
        y = dispatch.gemv(given.x, given.packed)
        assert (y.dtype, y.shape) == (dtype, (size[0], size[2]))
        assert complaints(given, y, TOLERANCE, torch.finfo(dtype).eps / 2) == []
    assert dispatch.gemv(given.x[:0], given.packed).shape == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_sees_one_wrong_code(kind: str) -> None:
    given = product(kind, (3, 96, 70), torch.float32, seed=4)
    codes = given.packed.codes.clone()
    # Not in the first group, whose scales are 0.
    codes[1, 69, 0] ^= 1
    y = dispatch.gemv(given.x, replace(given.packed, codes=codes))
    wrong = complaints(given, y, TOLERANCE, 2.0**-24)
    assert [line.split()[0] + line.split()[1] for line in wrong] == [f"y[{row},69]" for row in range(3)]


def test_what_does_not_fit_is_refused() -> None:
    codes, scale = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"groups of 32 .* not \[\(4, 64\), \(4, 1\)"):
        pack(codes, scale[:, :1], scale, 4)
    with pytest.raises(ValueError, match=r"of 4 or 8 bits, not .* of 5"):
        pack(codes, scale, scale, 5)
    with pytest.raises(ValueError, match="-8 to 7, not 0 to 9"):
        pack(codes.index_fill(0, torch.tensor([1]), 9), scale, scale, 4)
    with pytest.raises(ValueError, match="beyond float16"):
        pack(codes, scale * 1e6, scale, 8)
    packed = pack(codes, scale, scale, 4)
    with pytest.raises(ValueError, match="rows of 64 numbers without gaps"):
        dispatch.gemv(torch.zeros(2, 32), packed)
    with pytest.raises(ValueError, match="at most 16 rows, not 17"):
        dispatch.gemv(torch.zeros(MOST_ROWS + 1, 64), packed)


@pytest.mark.slow
def test_a_stored_model_is_packed_without_loss() -> None:
    file = GgufFile.open(smollm2_path())
    largest_first = sorted(file.tensors.values(), key=lambda info: -info.size)
    smallest = {info.kind: info for info in largest_first if len(info.shape) == 2}
    found = [file.tensor(info.name, info.shape) for info in smallest.values()]
    blocks = [tensor for tensor in found if isinstance(tensor, Blocks)]
    assert {4, 8} == {each.bits for each in blocks}
    for each in blocks:
        dense = pack(each.codes, each.scale, each.minimum, each.bits).dense()
        # Both round what the file says: one in float32, the other in the sum of minimum and scaled code.
        torch.testing.assert_close(dense, each.dense(), rtol=2.0**-20, atol=2.0**-18 * float(each.scale.abs().max()))
