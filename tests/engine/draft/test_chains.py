"""N-gram chains against a search through the whole sequence."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.draft.chains import LONGEST, ORDERS, Chains

CASES = settings(max_examples=40, deadline=None)
SMALL = st.lists(st.integers(0, 2), max_size=60)
EVERYTHING = 10_000


def searched(tokens: Sequence[int], tail: Sequence[int]) -> dict[int, int]:
    """Returns the length of the match before each index, for all indices that have one."""
    found: dict[int, int] = {}
    for at in range(1, len(tokens)):
        length = 0
        while length < min(LONGEST, at, len(tail)) and tokens[at - 1 - length] == tail[-1 - length] >= 0:
            length += 1
        if length:
            found[at] = length
    return found


def chains_of(tokens: Sequence[int]) -> Chains:
    """Returns chains of `tokens`, linked at once."""
    chains = Chains()
    chains.extend(tokens)
    return chains


def found_by(chains: Chains, tail: Sequence[int], limit: int = EVERYTHING) -> dict[int, int]:
    """Returns what `matches` gives in the form of `searched`."""
    matches = chains.matches(tail, limit)
    assert len({match.at for match in matches}) == len(matches)
    assert all(match.tokens is chains.tokens for match in matches)
    return {match.at: match.length for match in matches}


def order_of(length: int) -> int:
    """Returns the longest n-gram that finds a match of this length."""
    return max(order for order in ORDERS if order <= length)


@pytest.mark.thorough
@CASES
@given(SMALL)
def test_all_places_with_the_same_last_token_are_found(tokens: list[int]) -> None:
    assert found_by(chains_of(tokens), tokens) == searched(tokens, tokens)


@pytest.mark.thorough
@CASES
@given(SMALL, st.lists(st.integers(0, 3), max_size=20))
def test_another_sequence_is_looked_up_too(tokens: list[int], tail: list[int]) -> None:
    assert found_by(chains_of(tokens), tail) == searched(tokens, tail)


@pytest.mark.thorough
@CASES
@given(SMALL, st.integers(1, 8))
def test_with_a_limit_longer_ngrams_and_later_places_come_first(tokens: list[int], limit: int) -> None:
    found = list(found_by(chains_of(tokens), tokens, limit).items())
    assert found == sorted(found, key=lambda item: (-order_of(item[1]), -item[0]))
    assert len(found) <= limit
    expected = searched(tokens, tokens)
    longest = max(map(order_of, expected.values()), default=0)
    assert longest == max((order_of(length) for _, length in found), default=0)
    assert all(expected[at] == length for at, length in found)


def assert_same(one: Chains, two: Chains, rng: random.Random) -> None:
    """The two answer alike, whatever is asked and added next."""
    assert one.tokens == two.tokens
    for _ in range(5):
        tail = [rng.randrange(4) for _ in range(rng.randrange(20))]
        assert found_by(one, tail) == found_by(two, tail)
    assert one.matches(one.tokens, 7) == two.matches(two.tokens, 7)


@pytest.mark.thorough
def test_one_by_one_in_pieces_or_at_once_is_the_same() -> None:
    rng = random.Random(1)
    for _ in range(10):
        tokens = [rng.randrange(rng.choice((2, 4, 300))) for _ in range(rng.randrange(1_200))]
        single, pieces, whole = Chains(), Chains(), chains_of(tokens)
        at = 0
        while at < len(tokens):
            size = rng.choice((1, 7, 60, 400))
            pieces.extend(tokens[at : at + size])
            at += size
        for token in tokens:
            single.append(token)
        assert_same(single, whole, rng)
        assert_same(pieces, whole, rng)


@pytest.mark.thorough
def test_what_was_taken_back_was_never_there() -> None:
    rng = random.Random(2)
    for _ in range(15):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(600))]
        chains = chains_of(tokens)
        keep = rng.randrange(len(tokens) + 1)
        chains.truncate(keep)
        assert_same(chains, chains_of(tokens[:keep]), rng)
        chains.extend(tokens[:50])
        assert_same(chains, chains_of(tokens[:keep] + tokens[:50]), rng)


def test_a_separator_matches_nothing() -> None:
    chains = chains_of([1, 2, 3, -1, 2, 3, 9, -1])
    assert found_by(chains, [1, 2, 3]) == {3: 3, 6: 2}
    assert found_by(chains, [7]) == {}


@pytest.mark.thorough
@CASES
@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40))
def test_any_token_id_can_be_indexed(tokens: list[int]) -> None:
    assert found_by(chains_of(tokens * 2), tokens)[len(tokens)] >= min(len(tokens), LONGEST)


def test_memory_is_what_the_module_says() -> None:
    chains = chains_of(range(5_000))
    assert 36 * 5_000 < chains.nbytes <= (36 + 64) * 5_000
