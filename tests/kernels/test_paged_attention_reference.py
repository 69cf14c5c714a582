"""Paged attention's reference against its definition in double precision; the kernel is held to the same judge."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magnitude_kernels import dispatch
from magnitude_kernels.paged_attention.launch import block_dim, check, split_count
from magnitude_kernels.paged_attention.ragged import SHORT_ROWS, Run, lay_out
from magnitude_kernels.paged_attention.triton import TOLERANCE
from testkit.attention import Heads, complaints, given

AWKWARD = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 255), (1, 257), (3, 17), (16, 16), (20, 40), (66, 90)]
CPU = torch.device("cpu")


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", [Heads(9, 3, 64), Heads(8, 1, 80), Heads(2, 2, 128)], ids=str)
def test_awkward_lengths(heads: Heads, dtype: torch.dtype) -> None:
    step = given(AWKWARD, heads, dtype, seed=heads.size)
    assert complaints(step, dispatch.paged_attention(*step), TOLERANCE[dtype]) == []


def test_padding_is_zero() -> None:
    step = given([(2, 20), (1, 33)], Heads(2, 1, 16), torch.float32, seed=3)
    queries = torch.cat([step.queries, torch.full((3, 2, 16), float("nan"))])
    step = step._replace(queries=queries)
    out = dispatch.paged_attention(*step)
    assert complaints(step, out, TOLERANCE[torch.float32]) == []
    assert not out[3:].any()


@pytest.mark.slow
def test_the_judge_sees_small_and_large_faults() -> None:
    step = given(AWKWARD, Heads(9, 3, 64), torch.float32, seed=7)
    right = dispatch.paged_attention(*step)
    limit = TOLERANCE[torch.float32]
    assert len(complaints(step, right * (1 + 1e-4), limit)) == right.shape[0]
    assert len(complaints(step, torch.full_like(right, float("nan")), limit)) == right.shape[0]
    # One key too few: nothing but the first token, which is its own average, may hide it.
    short = replace(step.ragged, contexts=step.ragged.contexts - 1)
    for row in (1, 2, 3, 4, 5):
        out = dispatch.paged_attention(
            step.queries, step.cache, replace(short, counts=short.counts * 0 + 1), step.scale
        )
        assert any(f"row {row}:" in line for line in complaints(step, out, limit))


def test_runs_hold_sequences_of_like_kind() -> None:
    counts = [1, 1, 0, 2, SHORT_ROWS, SHORT_ROWS + 1, 500, 1]
    ragged = lay_out(counts, [600] * 8, [[1, 2]] * 8, CPU)
    assert ragged.runs == (Run(3, 2, 1), Run(2, 2 + SHORT_ROWS, SHORT_ROWS), Run(2, 565, 500), Run(1, 1, 1))
    assert ragged.starts.tolist() == [0, 1, 2, 2, 4, 68, 133, 633]
    assert lay_out([], [], [], CPU).runs == ()


def test_splits_widen_with_the_context() -> None:
    contexts = (0, 1, 256, 257, 4096, 4097, 8192, 8193, 8704, 8705, 32_768, 131_072)
    assert [split_count(context) for context in contexts] == [0, 1, 1, 2, 16, 17, 32, 33, 33, 34, 64, 96]
    assert [block_dim(size) for size in (1, 16, 64, 80, 96, 128, 129)] == [16, 16, 64, 128, 128, 128, 256]


def test_what_the_kernels_cannot_read_is_refused() -> None:
    step = given([(1, 20)], Heads(4, 2, 32), torch.float16, seed=0)
    check(step.queries, step.cache, step.scale)
    with pytest.raises(ValueError, match="of one type"):
        check(step.queries.float(), step.cache, step.scale)
    with pytest.raises(ValueError, match="of one type"):
        check(step.queries.double(), step.cache._replace(keys=step.cache.keys.double()), step.scale)
    with pytest.raises(ValueError, match="without gaps"):
        check(step.queries.transpose(1, 2), step.cache, step.scale)
    with pytest.raises(ValueError, match="laid out as the keys"):
        check(step.queries, step.cache._replace(values=step.cache.values[:, :, :, ::2]), step.scale)
    with pytest.raises(ValueError, match="multiple of"):
        check(step.queries[:, :3], step.cache, step.scale)
    with pytest.raises(ValueError, match="same size"):
        check(step.queries[:, :, :16], step.cache, step.scale)
    with pytest.raises(ValueError, match="scale above 0"):
        check(step.queries, step.cache, 0.0)
