"""Attention over a shared prefix under Triton's interpreter; `test_attention_kernels.py` runs this file with
TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magnitude_kernels.paged_attention import reference
from magnitude_kernels.paged_attention.launch import Partials, workspace
from magnitude_kernels.paged_attention.triton import SPLIT_KEYS, TOLERANCE
from magnitude_kernels.shared_prefix.reference import Shared
from magnitude_kernels.shared_prefix.triton import launch
from testkit.attention import PAGE, Given, Heads, complaints, given, share

HEADS = Heads(3, 1, 32)


def poisoned(step: Given, shared: Shared) -> torch.Tensor:
    """Returns what the kernels write where everything was NaN."""
    nan = float("nan")
    out = torch.full(step.queries.shape, nan, dtype=step.queries.dtype)
    partials = Partials(*(tensor.fill_(nan) for tensor in workspace(step.queries, step.cache, step.ragged)))
    launch(step.queries, step.cache, step.ragged, shared, step.scale, out, partials)
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("prefix", [16, 256, 528])
def test_a_group_and_one_apart(prefix: int, dtype: torch.dtype) -> None:
    lengths = [(1, prefix + 1), (1, prefix + 17), (4, prefix + 20), (1, prefix + 3)]
    step = given(lengths, HEADS, dtype, seed=prefix, prefix=prefix)
    assert complaints(step, poisoned(step, share(step, prefix, [0, 1, 2])), TOLERANCE[dtype]) == []


def test_whole_splits_are_read_from_the_leader_only() -> None:
    step = given([(1, 600), (2, 530), (1, 529)], HEADS, torch.float16, seed=2, prefix=528)
    shared = share(step, 528, [0, 1, 2])
    table = step.ragged.table.clone()
    nobody = table[0, -1]
    table[:2, : 2 * SPLIT_KEYS // PAGE] = nobody
    apart = step._replace(ragged=replace(step.ragged, table=table))
    assert complaints(step, poisoned(apart, shared), TOLERANCE[torch.float16]) == []
    assert reference.paged_attention(*apart)[:3].isnan().all()


def test_a_long_run_reads_for_itself() -> None:
    step = given([(1, 300), (2, 290), (70, 340)], HEADS, torch.float16, seed=3, prefix=256)
    assert complaints(step, poisoned(step, share(step, 256, [0, 1, 2])), TOLERANCE[torch.float16]) == []


def test_many_rows_in_a_group_and_padding_groups() -> None:
    step = given([(30, 290), (30, 300), (30, 310)], HEADS, torch.float16, seed=4, prefix=256)
    group = share(step, 256, [0, 1, 2])
    zero = torch.zeros(1, dtype=torch.int32)
    shared = Shared(
        torch.cat([zero, group.starts]),
        torch.cat([zero, group.counts]),
        torch.cat([zero, group.leaders]),
        group.tokens,
        group.most_rows + 9,
    )
    assert complaints(step, poisoned(step, shared), TOLERANCE[torch.float16]) == []
