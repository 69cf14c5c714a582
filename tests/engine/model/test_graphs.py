"""Graphs of decode steps: their shapes and choices, and a runner that replays them.

Where there is no GPU a recorder that runs the work again stands for the capture: everything else is the product's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.model import graphs
from magnitude_engine.model.batch import SequenceRows, StepBatch, StepOutput
from magnitude_engine.model.graphs import GraphRunner, Recording, Shape
from magnitude_engine.model.runner import Runner
from testkit.paged_model import CONTEXT, paged_decoder
from testkit.steps import Walk, run, step
from testkit.tiny import TINY_VOCAB

CPU = torch.device("cpu")
MOST = Shape(6, CONTEXT // 16)
SHAPES = st.builds(Shape, st.integers(1, 40), st.integers(1, 300))


class Again:
    """Records by running the work again; counts what was recorded and replayed."""

    def __init__(self) -> None:
        self.recorded = 0
        self.replayed = 0
        self.room = 100

    def __call__(self, work: Callable[[], StepOutput]) -> Recording:
        if self.recorded == self.room:
            raise torch.OutOfMemoryError("no room")
        self.recorded += 1
        output = work()

        def replay() -> None:
            self.replayed += 1
            again = work()
            output.logits.copy_(again.logits)
            output.hidden.copy_(again.hidden)

        return Recording(replay, output)


def runner_with(record: Again, max_rows: int = 6) -> GraphRunner:
    """Returns a runner of the tiny model whose decode steps are recorded."""
    return GraphRunner(paged_decoder(CPU), "native", CONTEXT, CPU, max_rows, record)


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two results differ by rounding only."""
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


def decode_batch(contexts: list[int]) -> StepBatch:
    """Returns a decode step of sequences with these contexts, each in pages of its own."""
    width = max(contexts) // 16 + 1
    sequences = tuple(
        SequenceRows(i, 1, context, tuple(range(i * width, (i + 1) * width))) for i, context in enumerate(contexts)
    )
    positions = torch.tensor(contexts) - 1
    slots = torch.tensor([s.pages[(s.context - 1) // 16] * 16 + (s.context - 1) % 16 for s in sequences])
    rows = torch.arange(len(contexts))
    return StepBatch(rows + 7, positions, slots, sequences, rows)


def test_buckets_double_up_to_the_most() -> None:
    assert [graphs.bucket(n, 6) for n in range(1, 8)] == [1, 2, 4, 4, 6, 6, None]
    assert [graphs.bucket(n, 300, least=16, factor=4) for n in (1, 16, 17, 64, 65, 257, 301)] == [
        *(16, 16, 64, 64, 256, 300),
        None,
    ]
    assert graphs.buckets(6) == (6, 4, 2, 1)
    assert graphs.buckets(8) == (8, 4, 2, 1)
    assert graphs.buckets(1) == (1,)


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 1024), st.integers(1, 1024))
def test_every_row_count_has_a_bucket_of_warm_up(rows: int, most: int) -> None:
    found = graphs.bucket(rows, most)
    assert (found in graphs.buckets(most)) == (rows <= most)
    if found is not None:
        assert rows <= found < 2 * rows or found == 1


def test_only_decode_steps_within_bounds_have_a_shape() -> None:
    assert graphs.shape_of(decode_batch([1, 30, 257]), MOST) == (4, 32)
    assert graphs.shape_of(decode_batch([256]), MOST) == (1, 16)
    assert graphs.shape_of(decode_batch([5] * 7), MOST) is None
    assert graphs.shape_of(decode_batch([CONTEXT + 1]), MOST) is None
    rows = torch.arange(3)
    prefill = (SequenceRows(0, 1, 5, (0,)), SequenceRows(1, 2, 2, (1,)))
    assert graphs.shape_of(StepBatch(rows, rows, rows, prefill, rows), MOST) is None
    assert graphs.shape_of(StepBatch(rows[:0], rows[:0], rows[:0], (), rows[:0]), MOST) is None


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@given(SHAPES, st.sets(SHAPES))
def test_a_step_takes_the_smallest_graph_that_holds_it(wanted: Shape, captured: set[Shape]) -> None:
    found = graphs.fitting(wanted, captured)
    holding = {s for s in captured if s.rows >= wanted.rows and s.pages >= wanted.pages and s.rows <= 4 * wanted.rows}
    assert found is None if not holding else found in holding
    assert all(found is not None and found <= other for other in holding)


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.dictionaries(SHAPES, st.integers(0, 200), max_size=8), st.sets(SHAPES, max_size=5), st.integers(0, 5))
def test_what_is_seen_most_is_captured(seen: dict[Shape, int], captured: set[Shape], room: int) -> None:
    captured |= set(list(seen)[:2])
    choice = graphs.choose(seen, captured, room)
    after = (captured - set(choice.drop)) | set(choice.capture)
    worth = {shape for shape, count in seen.items() if count >= graphs.LEAST_STEPS}
    assert set(choice.capture) <= worth - captured
    assert set(choice.drop) <= captured
    assert len(after) <= room
    assert after >= worth or len(after & worth) >= min(room, len(worth))
    left_out = [seen[shape] for shape in worth - after]
    assert all(seen[shape] >= count for shape in after & worth for count in left_out)


def test_padding_belongs_to_nobody() -> None:
    batch = decode_batch([33, 1, 16])
    filled, ragged = graphs.padded(batch, Shape(4, 8), spare_slot=999)
    assert filled.ids.tolist() == [7, 8, 9, 0]
    assert filled.positions.tolist() == [32, 0, 15, 0]
    assert filled.slots.tolist() == [*batch.slots.tolist(), 999]
    assert filled.logit_rows.tolist() == [0, 1, 2, 3]
    assert ragged.counts.tolist() == [1, 1, 1, 0]
    assert ragged.contexts.tolist() == [33, 1, 16, 0]
    assert ragged.table.tolist() == [[0, 1, 2], [3, 0, 0], [6, 0, 0], [0, 0, 0]]
    assert ragged.runs == ((4, 4, 1),)


@pytest.mark.thorough
def test_replayed_steps_are_the_plain_runners() -> None:
    record = Again()
    runner, plain = runner_with(record), Runner(paged_decoder(CPU), "native", CONTEXT, CPU)
    caches = runner.allocate_cache(64), plain.allocate_cache(64)
    assert caches[0].keys[0].shape[0] == 65
    assert record.recorded == 4
    ids = torch.randint(0, TINY_VOCAB, (5, 90), generator=torch.Generator().manual_seed(1)).tolist()
    walks = [[Walk(own, run(6 * i, 90)) for i, own in enumerate(ids)] for _ in range(2)]
    # Prefill runs eagerly; then sequences of very different lengths decode in changing company.
    for members, counts in (((0, 1, 2, 3, 4), (17, 1, 70, 3, 31)), *(((0, 2, 4), (1,) * 3), ((1, 3), (1, 1))) * 3):
        found, expected = (
            step(each, cache, [(own[m], n) for m, n in zip(members, counts, strict=True)])
            for each, cache, own in zip((runner, plain), caches, walks, strict=True)
        )
        assert all(near(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert record.replayed == 6
    for mine, theirs in zip((*caches[0].keys, *caches[0].values), (*caches[1].keys, *caches[1].values), strict=True):
        assert near(mine[:-1], theirs)


def test_only_wanted_logits_come_back_and_are_kept() -> None:
    runner = runner_with(Again())
    cache = runner.allocate_cache(16)
    batch = decode_batch([1, 1, 1])
    wanted = StepBatch(batch.ids, batch.positions, batch.slots, batch.sequences, torch.tensor([2, 0]))
    first = runner.forward(wanted, cache)
    kept = first.logits.clone()
    everything = runner.forward(batch, cache)
    assert torch.equal(first.logits, everything.logits[[2, 0]])
    runner.forward(StepBatch(batch.ids + 1, *(batch.positions, batch.slots, batch.sequences, batch.logit_rows)), cache)
    assert torch.equal(first.logits, kept)


@pytest.mark.thorough
def test_shapes_that_come_often_get_graphs_between_steps() -> None:
    record = Again()
    runner = runner_with(record)
    cache = runner.allocate_cache(16)
    assert not runner.recapture()
    for _ in range(graphs.LEAST_STEPS):
        runner.forward(decode_batch([5, 9]), cache)
    before = record.recorded
    assert runner.recapture()
    assert not runner.recapture()
    assert record.recorded == before + 1
    replayed = record.replayed
    runner.forward(decode_batch([5, 9]), cache)
    assert record.replayed == replayed + 1


def test_another_cache_and_missing_memory_mean_eager_steps() -> None:
    record = Again()
    record.room = 2
    runner = runner_with(record)
    cache = runner.allocate_cache(64)
    assert record.recorded == 2
    for contexts in ([3], [3, 4, 5]):
        runner.forward(decode_batch(contexts), cache)
    # Memory ran out after the graphs of six and of four rows: one row takes the latter.
    assert record.replayed == 2
    other = Runner(paged_decoder(CPU), "native", CONTEXT, CPU).allocate_cache(64)
    runner.forward(decode_batch([3, 4, 5]), other)
    assert record.replayed == 2
    assert not runner.recapture()


def test_only_a_gpu_gets_graphs() -> None:
    assert type(graphs.build_runner(paged_decoder(CPU), "native", CONTEXT, CPU, 8)) is Runner


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_graph_on_a_gpu_computes_what_the_eager_step_does() -> None:
    device = torch.device("cuda")
    decoder = paged_decoder(device)
    runner = graphs.build_runner(decoder, "native", CONTEXT, device, 6)
    assert isinstance(runner, GraphRunner)
    plain = Runner(decoder, "native", CONTEXT, device)
    caches = runner.allocate_cache(64), plain.allocate_cache(64)
    for _ in range(3):
        batch = decode_batch([1, 1, 1])
        columns = (batch.ids, batch.positions, batch.slots)
        ids, positions, slots = (t.to(device) for t in columns)
        moved = StepBatch(ids, positions, slots, batch.sequences, batch.logit_rows.to(device))
        found, expected = (r.forward(moved, c).logits for r, c in zip((runner, plain), caches, strict=True))
        assert near(found, expected, 1e-3)
