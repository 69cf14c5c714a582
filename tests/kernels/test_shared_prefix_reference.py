"""The reference of attention over a shared prefix, and what it says of steps that share nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magnitude_kernels import dispatch
from magnitude_kernels.paged_attention.triton import TOLERANCE
from testkit.attention import Given, Heads, complaints, given, share


def _step() -> Given:
    return given([(1, 300), (1, 290), (4, 333), (1, 289)], Heads(4, 2, 32), torch.float32, seed=4, prefix=288)


def test_sharing_changes_nothing() -> None:
    step = _step()
    shared = share(step, 288, [0, 1, 2])
    out = dispatch.shared_prefix(step.queries, step.cache, step.ragged, shared, step.scale)
    assert complaints(step, out, TOLERANCE[torch.float32]) == []


def test_what_is_not_shared_is_refused() -> None:
    step = _step()
    shared = share(step, 288, [0, 1, 2])
    table = step.ragged.table.clone()
    table[1, 3] = table[1, 2]
    with pytest.raises(ValueError, match="sequence 1 does not share its first 288 tokens with sequence 2"):
        dispatch.shared_prefix(step.queries, step.cache, replace(step.ragged, table=table), shared, step.scale)
    tokens = shared.tokens.clone()
    tokens[0] = 272
    with pytest.raises(ValueError, match="sequence 0 does not share"):
        dispatch.shared_prefix(step.queries, step.cache, step.ragged, replace(shared, tokens=tokens), step.scale)
    inside = replace(step.ragged, contexts=step.ragged.contexts - 12)
    with pytest.raises(ValueError, match="rows after them"):
        dispatch.shared_prefix(step.queries, step.cache, inside, shared, step.scale)
    tokens = shared.tokens.clone()
    tokens[3] = 288
    with pytest.raises(ValueError, match=r"sequences \[3\] share tokens but are in no group"):
        dispatch.shared_prefix(step.queries, step.cache, step.ragged, replace(shared, tokens=tokens), step.scale)
