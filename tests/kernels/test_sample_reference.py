"""The sampling reference against its definition in double precision; the kernel is held to the same judge."""

from __future__ import annotations

import pytest
import torch

from magnitude_kernels import dispatch
from magnitude_kernels.sample.reference import NO_TOKEN
from testkit.sampling import batch, complaints


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vocab", [1, 31, 100, 3000])
def test_awkward_rows(vocab: int, masked: bool) -> None:
    given = batch(vocab, rows=24, seed=vocab, masked=masked)
    assert complaints(given, dispatch.sample(*given)) == []


def test_a_whole_vocabulary() -> None:
    given = batch(49_152, rows=8, seed=3, masked=True)
    assert complaints(given, dispatch.sample(*given)) == []


def test_the_judge_sees_a_wrong_token() -> None:
    given = batch(100, rows=24, seed=5, masked=True)
    drawn = dispatch.sample(*given)
    other = torch.where(drawn.ids == NO_TOKEN, drawn.ids, (drawn.ids + 1) % 100)
    assert len(complaints(given, drawn._replace(ids=other))) >= int(drawn.finite.sum()) - 1
    assert len(complaints(given, drawn._replace(finite=~drawn.finite))) == 24
