"""The sampling kernel under Triton's interpreter; `test_sample_kernel.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels.sample import reference
from magnitude_kernels.sample.triton import launch, sample
from testkit.sampling import batch, complaints

UNWRITTEN = -7


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("vocab", "rows"), [(1, 8), (31, 1), (31, 8), (100, 3), (1000, 8), (5000, 3)])
def test_kernel_draws_what_the_definition_says(vocab: int, rows: int, masked: bool) -> None:
    for seed in (1, 2):
        given = batch(vocab, rows, seed, masked)
        ids = torch.full((rows,), UNWRITTEN)
        finite = torch.full((rows,), UNWRITTEN, dtype=torch.int8)
        launch(*given, ids, finite)
        assert set(finite.tolist()) <= {0, 1}
        assert complaints(given, reference.Sampled(ids, finite.bool())) == []


def test_a_whole_vocabulary() -> None:
    given = batch(49_152, 3, 11, masked=False)
    assert complaints(given, sample(*given)) == []


def test_rows_with_a_gap_between_them() -> None:
    given = batch(100, 3, 4, masked=False)
    wide = torch.full((3, 160), float("nan"))
    wide[:, :100] = given.logits
    assert complaints(given, sample(wide[:, :100], given.params)) == []
    with pytest.raises(ValueError, match="without gaps"):
        sample(wide.t(), given.params)


def test_ties_are_kept_together() -> None:
    logits = torch.tensor([[1.0, 1.0, 0.0, -0.0, 0.0, -1.0]]).expand(16, -1).contiguous()
    given = batch(6, 16, 0, masked=False)
    ones = torch.ones(16)
    params = reference.SampleParams(ones, (3 * ones).to(torch.int32), ones, 0 * ones, given.params.keys, None)
    drawn = sample(logits, params)
    assert set(drawn.ids.tolist()) <= {0, 1, 2, 3, 4}
    assert torch.equal(drawn.ids, reference.sample(logits, params).ids)
