"""Votes against the same definition without a heap."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.draft.chains import LONGEST, Match
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.draft.vote import NO_BALLOT, Ballot, Limits, Trust, vote

CASES = settings(max_examples=40, deadline=None)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
PLACES = st.lists(st.tuples(TOKENS, st.integers(0, 12), st.integers(1, LONGEST)), max_size=5)


def places_of(drawn: list[tuple[list[int], int, int]]) -> list[Match]:
    """Returns drawn places as matches."""
    return [Match(tokens, min(at, len(tokens)), length) for tokens, at, length in drawn]


def likelihood(places: list[Match], trust: Trust, path: tuple[int, ...]) -> float:
    """Returns the score of a path by the definition in the module's text."""
    score = 1.0
    agreeing = [place for place in places if place.at < len(place.tokens)]
    for token in path:
        if not agreeing:
            return 0.0
        votes = [(p.tokens[p.at], p.length**2) for p in agreeing]
        share = sum(v for t, v in votes if t == token) / sum(v for _, v in votes)
        score *= share * trust[max(p.length for p in agreeing)]
        followed = [Match(p.tokens, p.at + 1, min(p.length + 1, LONGEST)) for p in agreeing if p.tokens[p.at] == token]
        agreeing = [place for place in followed if place.at < len(place.tokens)]
    return score


@pytest.mark.thorough
@CASES
@given(PLACES, st.integers(0, 8), st.integers(0, 5))
def test_the_tree_holds_the_likeliest_paths(
    drawn: list[tuple[list[int], int, int]], most_nodes: int, most_depth: int
) -> None:
    places, trust = places_of(drawn), Trust()
    tree = vote(places, trust, Limits(most_nodes, most_depth, 0.0)).tree
    paths = {tuple(p.tokens[p.at : end]) for p in places for end in range(p.at + 1, p.at + most_depth + 1)} - {()}
    scores = sorted((likelihood(places, trust, path) for path in paths), reverse=True)[:most_nodes]
    assert sorted(tree.scores, reverse=True) == pytest.approx(scores)
    for at in range(len(tree)):
        path = tuple(tree.tokens[node] for node in tree.path(at))
        assert tree.scores[at] == pytest.approx(likelihood(places, trust, path))


@pytest.mark.thorough
@CASES
@given(PLACES)
def test_the_ballot_says_what_was_voted_for(drawn: list[tuple[list[int], int, int]]) -> None:
    places = places_of(drawn)
    ballot = vote(places, Trust(), Limits(1, 1, 0.0))
    assert ballot.candidates == {place.tokens[place.at] for place in places if place.at < len(place.tokens)}
    assert ballot.length == max((p.length for p in places if p.at < len(p.tokens)), default=0)


@pytest.mark.thorough
@CASES
@given(PLACES, st.floats(0.0, 1.0))
def test_no_node_is_less_likely_than_the_limit(drawn: list[tuple[list[int], int, int]], least: float) -> None:
    places = places_of(drawn)
    tree = vote(places, Trust(), Limits(8, 8, least)).tree
    assert tree.scores == tuple(s for s in vote(places, Trust(), Limits(8, 8, 0.0)).tree.scores if s >= least)


@pytest.mark.thorough
@CASES
@given(PLACES)
def test_without_forks_the_likeliest_child_is_followed(drawn: list[tuple[list[int], int, int]]) -> None:
    places, trust = places_of(drawn), Trust()
    chain = vote(places, trust, Limits(6, 24, 0.0, fork=False)).tree
    assert chain.parents == tuple(range(-1, len(chain) - 1))
    tokens: tuple[int, ...] = ()
    for token, score in zip(chain.tokens, chain.scores, strict=True):
        assert score == pytest.approx(max(likelihood(places, trust, (*tokens, t)) for t in range(3)))
        tokens = (*tokens, token)


def test_a_run_ends_at_its_separator() -> None:
    assert vote([Match([5, 6, -1, 7], 0, 4)], Trust(), Limits(8, 8, 0.0)).tree.tokens == (5, 6)
    assert vote([Match([-1, 7], 0, 4)], Trust(), Limits()) == NO_BALLOT
    assert vote([], Trust(), Limits()) == NO_BALLOT


def test_equal_votes_go_to_the_first_place() -> None:
    places = [Match([token], 0, 3) for token in (4, 9, 2)]
    assert vote(places, Trust(), Limits(2, 1, 0.0)).tree.tokens == (4, 9)


@pytest.mark.thorough
def test_a_long_draft_of_full_trust_is_a_valid_tree() -> None:
    trust = Trust()
    for _ in range(20_000):
        trust.learn(Ballot(DraftTree(), LONGEST, frozenset({7})), 7)
    tokens = list(range(300))
    places = [Match(tokens, 0, LONGEST) for _ in range(7)]
    tree = vote(places, trust, Limits(250, 250, 0.0)).tree
    assert tree.tokens == tuple(range(250))
    assert tree.expected == pytest.approx(math.fsum(0.99**depth for depth in range(1, 251)))


def test_trust_follows_what_came() -> None:
    trust = Trust()
    ballot = Ballot(DraftTree(), 2, frozenset({7}))
    before = [trust[length] for length in range(LONGEST + 1)]
    assert before[1:] == sorted(before[1:])
    for _ in range(2_000):
        trust.learn(ballot, 8)
    assert trust[2] < 0.01
    assert [trust[length] for length in range(LONGEST + 1) if length != 2] == before[:2] + before[3:]
    for _ in range(20_000):
        trust.learn(ballot, 7)
    assert trust[2] == 0.99
    trust.learn(NO_BALLOT, 7)
    assert math.isclose(trust[0], 0.0)
