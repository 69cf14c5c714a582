"""The rounding kernels under Triton's interpreter; `test_kv_quantise_kernel.py` runs this with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels.kv_quantise import reference
from magnitude_kernels.kv_quantise import triton as kernels
from testkit.quantising import complaints, rows

UNWRITTEN = -128


@pytest.mark.parametrize("columns", [1, 64, 80, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_kernels_round_as_the_reference_does(dtype: torch.dtype, columns: int) -> None:
    for number in (0, 1, 37):
        x = rows(number, columns, dtype, seed=columns)
        if dtype == torch.bfloat16:
            # The interpreter turns denormal bfloat16 into other numbers; and it cuts bfloat16 off where GPUs round.
            x[x.abs() < torch.finfo(dtype).tiny] = 0
        # One row more than is written: it must keep its mark.
        codes = torch.full((number + 1, columns), UNWRITTEN, dtype=torch.int8)
        scales = torch.full((number + 1,), -1.0)
        kernels.launch_quantise(x, codes[:number], scales[:number])
        assert bool((codes[:number] != UNWRITTEN).all())
        assert codes[number].tolist() == [UNWRITTEN] * columns
        assert scales[number] == -1.0
        found = reference.Quantised(codes[:number], scales[:number])
        expected = reference.quantise(x)
        assert torch.equal(found.codes, expected.codes)
        assert torch.equal(found.scales.view(torch.int32) * ~found.scales.isnan(), expected_bits(expected.scales))

        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        back = torch.full((number + 1, columns), torch.inf, dtype=wide)
        kernels.launch_dequantise(found, back[:number])
        assert bool(back[number].isinf().all())
        assert torch.equal(back[:number].nan_to_num(7.0), reference.dequantise(found, wide).nan_to_num(7.0))
        assert complaints(x, found, back[:number]) == []


def expected_bits(scales: torch.Tensor) -> torch.Tensor:
    """Returns the bits of scales, 0 for NaN, of which there are many."""
    return scales.view(torch.int32) * ~scales.isnan()
