"""The decoder on a tiny random model: exact in `reference` and `packed`, close to the first elsewhere."""

from __future__ import annotations

import pytest
import torch

from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_engine.model.runner import Runner
from testkit.steps import Walk, in_chunks, run, step
from testkit.tiny import TINY_VOCAB, tiny_model

LENGTH = 150


def ids_of(seed: int, length: int = LENGTH) -> list[int]:
    return torch.randint(0, TINY_VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module", params=["reference", "packed"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """A model in each of the profiles in which a row has the same bits in any company."""
    return tiny_model(profile=request.param).runner


@pytest.fixture(scope="module")
def expected(runner: Runner) -> torch.Tensor:
    """One-shot logits of the sequence `ids_of(1)`."""
    return in_chunks(runner, runner.allocate_cache(16), Walk(ids_of(1), run(0, LENGTH)), [LENGTH])


def one_shot() -> torch.Tensor:
    """Returns the same in `reference`."""
    runner = tiny_model().runner
    return in_chunks(runner, runner.allocate_cache(16), Walk(ids_of(1), run(0, LENGTH)), [LENGTH])


@pytest.mark.thorough
@pytest.mark.parametrize("sizes", [[1], [7], [13, 1, 64], [16], [127, 1, 1]], ids=str)
def test_chunks_do_not_change_a_bit(sizes: list[int], runner: Runner, expected: torch.Tensor) -> None:
    found = in_chunks(runner, runner.allocate_cache(16), Walk(ids_of(1), run(0, LENGTH)), sizes)
    assert torch.equal(found, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("strangers", [1, 2, 3, 7])
def test_neighbours_do_not_change_a_bit(strangers: int, runner: Runner, expected: torch.Tensor) -> None:
    cache = runner.allocate_cache(16 * (strangers + 1))
    others = [Walk(ids_of(50 + i, 40 + 17 * i), run(16 * (i + 1), LENGTH)) for i in range(strangers)]
    own = Walk(ids_of(1), run(0, LENGTH))
    rows = []
    while own.left:
        parts = [(w, min(1 + (i + own.done) % 9, w.left)) for i, w in enumerate(others) if w.left]
        middle = len(parts) // 2
        parts.insert(middle, (own, min(5, own.left)))
        rows.append(step(runner, cache, parts)[middle])
    assert torch.equal(torch.cat(rows), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_do_not_change_a_bit(threads: int, runner: Runner, expected: torch.Tensor) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        other = tiny_model(profile=runner.profile).runner
        found = in_chunks(other, other.allocate_cache(16), Walk(ids_of(1), run(0, LENGTH)), [140, 1, 9])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)


@pytest.mark.thorough
def test_scattered_pages_do_not_change_a_bit(runner: Runner, expected: torch.Tensor) -> None:
    pages = [9, 3, 14, 0, 7, 11, 1, 5, 13, 2]
    found = in_chunks(runner, runner.allocate_cache(16), Walk(ids_of(1), pages), [33])
    assert torch.equal(found, expected)


def test_garbage_past_the_context_is_never_read(runner: Runner, expected: torch.Tensor) -> None:
    cache = runner.allocate_cache(16)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    found = in_chunks(runner, cache, Walk(ids_of(1), run(0, LENGTH)), [50, 3])
    assert torch.equal(found, expected)


def test_a_shared_prefix_gives_the_same_bits(runner: Runner, expected: torch.Tensor) -> None:
    cache = runner.allocate_cache(32)
    step(runner, cache, [(Walk(ids_of(1), run(0, LENGTH)), 64)])
    fork = Walk(ids_of(1), [*range(4), *range(20, 26)])
    fork.done = 64
    found = in_chunks(runner, cache, fork, [11])
    assert torch.equal(found, expected[64:])


@pytest.mark.thorough
def test_sequences_that_share_a_prefix_give_the_same_bits_together(runner: Runner, expected: torch.Tensor) -> None:
    cache = runner.allocate_cache(64)
    step(runner, cache, [(Walk(ids_of(1), run(0, LENGTH)), 130)])
    short = Walk(ids_of(1), [*range(4), *range(60, 64), 50, 51])
    short.done = 64
    step(runner, cache, [(short, 70)])
    stranger = Walk(ids_of(9), range(52, 60))
    forks = []
    for index in range(4):
        fork = Walk(ids_of(1), [*range(8), 10 + 2 * index, 11 + 2 * index])
        fork.done = 128
        # They stand at different places.
        step(runner, cache, [(fork, 1 + 3 * index)])
        forks.append(fork)
    together = [*forks[:2], short, *forks[2:], stranger]
    for _ in range(5):
        places = [walk.done for walk in together]
        found = step(runner, cache, [(walk, 1) for walk in together])
        for walk, place, logits in zip(together[:-1], places, found, strict=False):
            assert torch.equal(logits[0], expected[place]), (walk.pages, place)


def test_only_wanted_rows_go_through_the_head(runner: Runner) -> None:
    rows = torch.arange(20)
    everything = in_chunks(runner, runner.allocate_cache(2), Walk(ids_of(2, 20), (0, 1)), [20])
    for wanted in ([3, 19], []):
        batch = StepBatch(torch.tensor(ids_of(2, 20)), rows, rows, _one(20), torch.tensor(wanted, dtype=torch.int64))
        output = runner.forward(batch, runner.allocate_cache(2))
        assert torch.equal(output.logits, everything[wanted])
        assert output.hidden.shape == (len(wanted), runner.shape.hidden)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("profile", "dtype", "tolerance"),
    [("native", torch.float32, 1e-5), ("native", torch.bfloat16, 0.05), ("packed", torch.float32, 0.05)],
)
def test_fast_profiles_stay_close(profile: str, dtype: torch.dtype, tolerance: float) -> None:
    expected = one_shot()
    runner = tiny_model(profile=profile, weight_dtype=dtype).runner  # type: ignore[arg-type]
    for pages in (run(0, LENGTH), [9, 3, 14, 0, 7, 11, 1, 5, 13, 2]):
        found = in_chunks(runner, runner.allocate_cache(16), Walk(ids_of(1), pages), [100, 1, 9])
        assert relative_error(found, expected) < tolerance


def test_fast_batches_stay_close() -> None:
    expected = one_shot()
    runner = tiny_model(profile="native").runner
    cache = runner.allocate_cache(32)
    own, other = Walk(ids_of(1), run(0, LENGTH)), Walk(ids_of(3), run(16, LENGTH))
    first = step(runner, cache, [(other, 30), (own, 149)])[1]
    last = step(runner, cache, [(own, 1), (other, 1)])[0]
    assert relative_error(torch.cat([first, last]), expected) < 1e-5


def test_runner_states_its_shape() -> None:
    runner = tiny_model(context=512).runner
    cache = runner.allocate_cache(3)
    assert runner.shape.context == 512
    assert cache.keys[0].shape == (3, 16, runner.shape.kv_heads, runner.shape.head_dim)
    assert cache.keys[0].dtype == runner.cache_dtype == torch.float32
    assert tiny_model(profile="packed").runner.cache_dtype == torch.bfloat16


def _one(count: int) -> tuple[SequenceRows, ...]:
    return (SequenceRows(0, count, count, tuple(run(0, count))),)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
