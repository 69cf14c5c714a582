"""Paged attention under Triton's interpreter; `test_attention_kernels.py` runs this file with TRITON_INTERPRET=1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magnitude_kernels.paged_attention.launch import Partials, launch, paged_attention, workspace
from magnitude_kernels.paged_attention.ragged import Cache, Ragged, Run
from magnitude_kernels.paged_attention.triton import TOLERANCE
from testkit.attention import Given, Heads, complaints, given

SMOLLM2 = Heads(9, 3, 64)
SMALL = Heads(2, 1, 16)
NAN = float("nan")


def poisoned(step: Given) -> torch.Tensor:
    """Returns what the kernels write where everything was NaN."""
    out = torch.full(step.queries.shape, NAN, dtype=step.queries.dtype)
    partials = Partials(*(tensor.fill_(NAN) for tensor in workspace(step.queries, step.cache, step.ragged)))
    launch(*step, out, partials)
    return out


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decoding_awkward_contexts(dtype: torch.dtype) -> None:
    step = given([(1, 1), (1, 15), (1, 16), (1, 17), (1, 255), (1, 257)], SMOLLM2, dtype, seed=1)
    assert complaints(step, poisoned(step), TOLERANCE[dtype]) == []


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_mix_of_all_kinds(dtype: torch.dtype) -> None:
    step = given([(1, 17), (3, 17), (9, 259), (1, 20), (66, 90)], Heads(3, 1, 64), dtype, seed=2)
    assert [run.most_rows for run in step.ragged.runs] == [1, 9, 1, 66]
    assert complaints(step, poisoned(step), TOLERANCE[dtype]) == []


@pytest.mark.parametrize("heads", [Heads(8, 1, 80), Heads(2, 2, 96), Heads(7, 1, 128), Heads(3, 1, 256)], ids=str)
def test_head_sizes_and_groups(heads: Heads) -> None:
    step = given([(1, 33), (4, 18), (65, 70)], heads, torch.float16, seed=3)
    assert complaints(step, poisoned(step), TOLERANCE[torch.float16]) == []


def test_splits_of_every_width() -> None:
    step = given([(1, 8800)], SMALL, torch.float16, seed=4)
    assert complaints(step, poisoned(step), TOLERANCE[torch.float16]) == []


def test_a_long_chunk_reads_whole_spans_first() -> None:
    step = given([(70, 700)], SMALL, torch.float16, seed=5)
    assert complaints(step, poisoned(step), TOLERANCE[torch.float16]) == []


def test_sharp_scores() -> None:
    step = given([(1, 300), (5, 40)], SMALL, torch.float32, seed=6, spread=40.0)
    assert complaints(step, poisoned(step), 10 * TOLERANCE[torch.float32]) == []


def test_a_row_does_not_depend_on_its_batch() -> None:
    lengths = [(1, 300), (1, 40), (5, 40), (70, 100)]
    step = given(lengths, SMALL, torch.float16, seed=7)
    together = poisoned(step)
    wide = torch.zeros(1, 40, dtype=torch.int32)
    for index, (count, _) in enumerate(lengths):
        start = int(step.ragged.starts[index])
        table = wide.clone()
        table[:, : step.ragged.table.shape[1]] = step.ragged.table[index]
        own = [tensor[index : index + 1] for tensor in (step.ragged.counts, step.ragged.contexts)]
        alone = Ragged(torch.zeros(1, dtype=torch.int32), *own, table, (Run(1, count, count),))
        out = paged_attention(step.queries[start : start + count], step.cache, alone, step.scale)
        assert torch.equal(out, together[start : start + count])


def test_a_row_does_not_depend_on_the_rows_after_it() -> None:
    step = given([(80, 330)], SMALL, torch.float16, seed=8)
    ragged = replace(
        step.ragged,
        counts=torch.tensor([71], dtype=torch.int32),
        contexts=torch.tensor([321], dtype=torch.int32),
        runs=(Run(1, 71, 71),),
    )
    part = paged_attention(step.queries[:71], step.cache, ragged, step.scale)
    assert torch.equal(part, poisoned(step)[:71])


def test_bounds_larger_than_the_step() -> None:
    step = given([(1, 30), (1, 5), (2, 270)], SMALL, torch.float16, seed=9)
    none = torch.zeros(2, dtype=torch.int32)
    ragged = Ragged(
        torch.cat([step.ragged.starts, none]),
        torch.cat([step.ragged.counts, none]),
        torch.cat([step.ragged.contexts, none]),
        torch.cat([step.ragged.table, step.ragged.table[:2]]),
        (Run(2, 2, 1), Run(3, 40, 24)),
    )
    queries = torch.cat([step.queries, torch.full((38, 2, 16), NAN, dtype=torch.float16)])
    padded = step._replace(queries=queries, ragged=ragged)
    out = poisoned(padded)
    assert out[4:].isnan().all()
    assert complaints(step, out[:4], TOLERANCE[torch.float16]) == []
    assert not paged_attention(*padded)[4:].any()


def test_views_of_wider_tensors() -> None:
    step = given([(2, 40), (67, 70)], Heads(4, 2, 32), torch.float16, seed=10)
    rows, pages = step.queries.shape[0], step.cache.keys.shape[0]
    projected = torch.full((rows, 8, 32), NAN, dtype=torch.float16)
    projected[:, :4] = step.queries
    layers = torch.full((pages, 2, 16, 6, 32), NAN, dtype=torch.float16)
    layers[:, 0, :, 1:3], layers[:, 1, :, 1:3] = step.cache
    views = Cache(layers[:, 0, :, 1:3], layers[:, 1, :, 1:3])
    assert torch.equal(poisoned(step._replace(queries=projected[:, :4], cache=views)), poisoned(step))


def test_no_rows() -> None:
    step = given([(1, 5)], SMALL, torch.float32, seed=11)
    nobody = replace(step.ragged, counts=torch.zeros(1, dtype=torch.int32))
    assert not paged_attention(step.queries, step.cache, nobody, step.scale).any()
    nothing = Ragged(*(tensor[:0] for tensor in (nobody.starts, nobody.counts, nobody.contexts, nobody.table)), ())
    assert paged_attention(step.queries[:0], step.cache, nothing, step.scale).shape == (0, 2, 16)
