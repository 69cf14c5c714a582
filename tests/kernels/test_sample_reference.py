"""The sampling reference against its definition in double precision; the kernel is held to the same judge."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from llguidance.numpy import apply_token_bitmask_inplace

from magnitude_kernels import dispatch
from magnitude_kernels.sample.reference import NO_TOKEN, allowed
from testkit.sampling import batch, complaints


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("vocab", [1, 31, 100, 3000])
def test_awkward_rows(vocab: int, masked: bool) -> None:
    given = batch(vocab, rows=24, seed=vocab, masked=masked)
    assert complaints(given, dispatch.sample(*given)) == []


def test_a_whole_vocabulary() -> None:
    given = batch(49_152, rows=8, seed=3, masked=True)
    assert complaints(given, dispatch.sample(*given)) == []


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_a_mask_is_what_llguidance_writes(vocab: int) -> None:
    mask = batch(vocab, rows=24, seed=vocab, masked=True).params.mask
    assert mask is not None
    logits = np.zeros((24, vocab), dtype=np.float32)
    apply_token_bitmask_inplace(logits, mask.numpy())
    assert torch.equal(torch.stack([allowed(row, vocab) for row in mask]), torch.from_numpy(logits) == 0)


@pytest.mark.thorough
def test_a_mask_draws_as_if_nothing_else_was_there() -> None:
    given = batch(100, rows=48, seed=6, masked=True)
    mask = given.params.mask
    assert mask is not None
    before = given.logits.clone()
    drawn = dispatch.sample(*given)
    assert torch.equal(given.logits.view(torch.int32), before.view(torch.int32))
    # Forbidden logits may be anything finite: far above all others they are still not drawn, nor do they count.
    forbidden = ~torch.stack([allowed(row, 100) for row in mask]) & before.isfinite()
    raised = torch.where(forbidden, 1e30, before)
    assert torch.equal(dispatch.sample(raised, given.params).ids, drawn.ids)


def test_a_mask_of_another_size_is_refused() -> None:
    given = batch(100, rows=6, seed=7, masked=True)
    mask = given.params.mask
    assert mask is not None
    for other in (mask[:, :3], mask[:5], mask.long(), mask.repeat(1, 2)[:, ::2]):
        with pytest.raises(ValueError, match=r"mask of int32 \(6, 4\), one bit per token"):
            dispatch.sample(given.logits, replace(given.params, mask=other))


def test_the_judge_sees_a_wrong_token() -> None:
    given = batch(100, rows=24, seed=5, masked=True)
    drawn = dispatch.sample(*given)
    other = torch.where(drawn.ids == NO_TOKEN, drawn.ids, (drawn.ids + 1) % 100)
    assert len(complaints(given, drawn._replace(ids=other))) >= int(drawn.finite.sum()) - 1
    assert len(complaints(given, drawn._replace(finite=~drawn.finite))) == 24
