"""Which rows attend together to which keys."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.batch import SequenceRows
from magnitude_engine.model.cascade import Arrangement, Common, Rules, arrange, runs

SMALL = Rules(few_rows=4, shared=32, chunk=16, joined=64, batch=128, run=48)


def sequences(*parts: tuple[Sequence[int], int, int]) -> list[SequenceRows]:
    """From (pages, context, count) of each."""
    starts = [sum(count for _, _, count in parts[:i]) for i in range(len(parts))]
    return [SequenceRows(s, count, context, tuple(p)) for s, (p, context, count) in zip(starts, parts, strict=True)]


def test_a_prefix_is_shared_from_as_many_spared_keys_as_the_rules_say() -> None:
    two = sequences(([0, 1, 5], 40, 1), ([0, 1, 6], 45, 1))
    assert arrange(two, SMALL).common == (Common((0, 1), 0, 32),)
    assert arrange(two, SMALL).starts == (32, 32)
    one_page = sequences(([0, 5], 20, 1), ([0, 6], 20, 1))
    assert arrange(one_page, SMALL) == Arrangement(((0, 1),), (0, 0), ())
    assert arrange([*one_page, *sequences(([0, 7], 20, 1))], SMALL).common == (Common((0, 1, 2), 0, 16),)


def test_keys_that_some_row_may_not_see_are_never_common() -> None:
    pages = list(range(4))
    assert arrange(sequences((pages, 64, 1), (pages, 64, 2)), SMALL).common == (Common((0, 1), 0, 48),)
    assert arrange(sequences((pages, 64, 1), (pages, 50, 3)), SMALL).common == (Common((0, 1), 0, 32),)


def test_a_chunk_attends_to_what_was_before_it_without_a_mask() -> None:
    assert arrange(sequences((range(10), 150, 100)), SMALL) == Arrangement(((0,),), (50,), (Common((0,), 0, 50),))
    assert arrange(sequences((range(10), 110, 100)), SMALL) == Arrangement(((0,),), (0,), ())


def test_one_run_is_one_part() -> None:
    assert arrange(sequences((range(3, 100), 1500, 1)), SMALL) == Arrangement(((0,),), (0,), ())


def test_long_runs_are_parts_of_their_own() -> None:
    pages = [*range(10, 14), 90, *range(20, 24)]
    assert arrange(sequences((pages, 144, 1)), SMALL) == Arrangement(
        ((0,),), (80,), (Common((0,), 0, 64), Common((0,), 64, 80))
    )
    ends_short = arrange(sequences(([*range(10, 14), 90, 80], 90, 1)), SMALL)
    assert ends_short == Arrangement(((0,),), (64,), (Common((0,), 0, 64),))
    assert arrange(sequences(([7, 5, 3, 1], 64, 1)), SMALL).common == ()


def test_similar_lengths_are_batched() -> None:
    lengths = [16, 60, 64, 8, 64, 200]
    rows = sequences(*((range(100 * i, 100 * i + 20), n, 1) for i, n in enumerate(lengths)))
    assert arrange(rows, SMALL).own == ((5,), (2, 4), (1, 0), (3,))


def test_runs() -> None:
    assert runs([4, 5, 9], 3, 40) == [(67, 29), (144, 8)]
    assert runs([4, 5, 6], 0, 48) == [(64, 48)]
    assert runs([4, 5, 6], 16, 17) == [(80, 1)]


@st.composite
def steps(draw: st.DrawFn) -> list[SequenceRows]:
    parts = []
    for _ in range(draw(st.integers(1, 7))):
        pages = draw(st.lists(st.integers(0, 3), min_size=1, max_size=14))
        context = draw(st.integers(1, len(pages) * PAGE_TOKENS))
        parts.append((pages, context, draw(st.integers(1, min(context, 40)))))
    return sequences(*parts)


@pytest.mark.thorough
@given(steps())
def test_every_row_sees_every_key_once(step: list[SequenceRows]) -> None:
    found = arrange(step, SMALL)
    assert sorted(i for batch in found.own for i in batch) == list(range(len(step)))
    for index, rows in enumerate(step):
        parts = sorted((c.first, c.last) for c in found.common if index in c.members)
        joints = [0, *(last for _, last in parts)]
        assert [first for first, _ in parts] == joints[:-1]
        assert found.starts[index] == joints[-1]
        assert found.starts[index] <= rows.context - rows.count
    for common in found.common:
        tables = {step[i].pages[common.first // PAGE_TOKENS : -(-common.last // PAGE_TOKENS)] for i in common.members}
        assert len(tables) == 1
