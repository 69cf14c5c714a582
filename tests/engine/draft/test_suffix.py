"""A session's own index from step to step."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.draft.suffix import SuffixIndex

CASES = settings(max_examples=40, deadline=None)
TOKENS = st.lists(st.integers(0, 2), max_size=80)


@pytest.mark.thorough
@CASES
@given(TOKENS, TOKENS, TOKENS)
def test_following_another_prompt_is_as_indexing_it_anew(shared: list[int], before: list[int], now: list[int]) -> None:
    index = SuffixIndex(shared + before)
    kept = index.follow(shared + now)
    fresh = SuffixIndex(shared + now)
    assert len(index) == len(fresh)
    assert index.matches() == fresh.matches()
    pairs = enumerate(zip(shared + before, shared + now, strict=False))
    common = next((at for at, (a, b) in pairs if a != b), len(shared) + min(len(before), len(now)))
    assert kept in ({common} if 2 * common >= len(shared + before) else {0})


@pytest.mark.thorough
@CASES
@given(TOKENS, st.integers(0, 9), st.integers(0, 9))
def test_drafts_keep_their_bounds_and_are_the_same_every_time(tokens: list[int], nodes: int, depth: int) -> None:
    tree = SuffixIndex(tokens).propose(nodes, depth)
    assert len(tree) <= nodes
    assert all(level <= depth for level in tree.depths)
    single = SuffixIndex()
    for token in tokens:
        single.extend([token])
    assert single.propose(nodes, depth) == tree


def test_what_followed_the_longest_match_comes_first() -> None:
    index = SuffixIndex([1, 2, 3, 4, 5, 8, 2, 3, 4, 6, 9, 3, 4, 7, 0, 1, 2, 3, 4])
    tree = index.propose(5, 1)
    assert tree.tokens == (5, 6, 7)
    assert index.propose(3, 3).tokens == (5, 8, 2)
    assert SuffixIndex([1, 2, 3]).propose(8, 8).tokens == ()
    assert SuffixIndex().propose(8, 8).tokens == ()


def test_a_long_prompt_takes_the_stated_memory() -> None:
    assert SuffixIndex(range(6_000)).nbytes < 600_000
