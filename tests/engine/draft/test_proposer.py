"""Proposers along a sequence that grows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.draft.chains import LONGEST
from magnitude_engine.draft.corpus import RunCorpus
from magnitude_engine.draft.proposer import PredictionProposer, Proposer, SuffixProposer
from magnitude_engine.draft.suffix import SuffixIndex
from magnitude_engine.draft.vote import Limits, Trust

CASES = settings(max_examples=40, deadline=None)
CHAIN = Limits(nodes=8, depth=8, score=0.0)
WORDS = list(range(100, 140))


def steps_to_say(proposer: Proposer, prompt: list[int], answer: list[int], limits: Limits = CHAIN) -> int:
    """Returns how many verify steps an answer takes."""
    whole = prompt + answer
    known = len(prompt)
    steps = 0
    while known < len(whole):
        tree = proposer.propose(whole[:known], limits)
        accepted = len(tree.follow(whole[known:-1]))
        known += accepted + 1
        steps += 1
    return steps


def test_own_words_are_repeated_in_few_steps() -> None:
    assert steps_to_say(SuffixProposer(), [*WORDS, 1, 2], [100, *WORDS[1:]]) == 1 + 5
    assert steps_to_say(SuffixProposer(), [1, 2], WORDS) == len(WORDS)


def test_past_runs_help_from_the_first_token_on() -> None:
    runs = RunCorpus(runs=[[1, 2, *WORDS]])
    proposer = SuffixProposer(runs=runs)
    assert steps_to_say(proposer, [5, 6, 1, 2], WORDS) == 5


def test_both_vote_together() -> None:
    own, runs = [3, 4, 5, 8, 3, 4], RunCorpus(runs=[[3, 4, 6, 6, 6, 6, 6, 6, 6]])
    tree = SuffixProposer(runs=runs).propose(own, Limits(2, 1, 0.0))
    assert tree.tokens == (5, 6)
    assert tree.scores[0] == tree.scores[1]


@pytest.mark.thorough
@CASES
@given(st.lists(st.integers(0, 2), max_size=50), st.data())
def test_how_the_tokens_arrive_changes_no_draft(tokens: list[int], data: st.DataObject) -> None:
    grown = SuffixProposer(SuffixIndex(tokens[: data.draw(st.integers(0, len(tokens)))]))
    grown.propose(tokens, CHAIN)
    assert grown.index.matches() == SuffixIndex(tokens).matches()
    again = SuffixProposer(SuffixIndex(tokens))
    assert again.propose(tokens, CHAIN) == SuffixProposer(SuffixIndex(tokens)).propose(tokens, CHAIN)


def test_a_session_keeps_its_index_and_trust_from_step_to_step() -> None:
    index, trust = SuffixIndex(), Trust()
    steps_to_say(SuffixProposer(index, None, trust), [1, 2], [*WORDS, *WORDS])
    held = len(index)
    assert held > 2 + len(WORDS)
    assert any(trust[length] > Trust()[length] for length in range(LONGEST + 1))
    following = SuffixProposer(index, None, trust)
    assert following.begin([1, 2, *WORDS, *WORDS, 5]) == held
    assert following.propose([1, 2, *WORDS, *WORDS, 5, 2], CHAIN).tokens == tuple(WORDS[:8])


def test_a_context_that_shrank_begins_anew() -> None:
    proposer = SuffixProposer()
    proposer.propose([*WORDS, *WORDS[:5]], CHAIN)
    assert proposer.propose(WORDS[:3], CHAIN) == SuffixProposer().propose(WORDS[:3], CHAIN)
    assert len(proposer.index) == 3


@pytest.mark.thorough
def test_matches_that_mislead_are_trusted_less() -> None:
    rng = random.Random(7)
    proposer = SuffixProposer()
    noise = [rng.randrange(8) for _ in range(600)]
    steps_to_say(proposer, noise[:50], noise[50:])
    assert proposer.trust[16] == Trust()[16]
    faithful = SuffixProposer()
    steps_to_say(faithful, WORDS, WORDS * 20)
    misled = SuffixProposer()
    for fresh in range(1_000, 1_100):
        misled.propose([*WORDS, fresh - 1, *WORDS[:20]], CHAIN)
        misled.propose([*WORDS, fresh - 1, *WORDS[:20], fresh], CHAIN)
        misled.begin(WORDS)
    assert misled.trust[16] < 0.2 < 0.9 < faithful.trust[16]
    context = [*WORDS, *WORDS[:20]]
    assert len(misled.propose(context, Limits(8, 8, 0.2))) == 0
    assert len(faithful.propose([*WORDS, *WORDS[:20]], Limits(8, 8, 0.2))) == 8


def test_a_prediction_that_comes_true_takes_the_fewest_steps() -> None:
    proposer = PredictionProposer(WORDS, start=3)
    assert steps_to_say(proposer, [1, 2, 3], WORDS) == 5
    assert proposer.propose([1, 2, 3, *WORDS], CHAIN).tokens == ()


def test_a_prediction_is_taken_up_again_after_a_difference() -> None:
    edits = {
        "replaced": [*WORDS[:10], 7, *WORDS[11:]],
        "inserted": [*WORDS[:10], 7, 8, 9, *WORDS[10:]],
        "left out": [*WORDS[:10], *WORDS[20:]],
        "moved": [*WORDS[20:], *WORDS[:20]],
        "rewritten": [*WORDS[:10], *range(10), *WORDS[20:]],
    }
    taken = {name: steps_to_say(PredictionProposer(WORDS, 1), [1], answer) for name, answer in edits.items()}
    assert taken == {"replaced": 6, "inserted": 9, "left out": 5, "moved": 8, "rewritten": 15}


@pytest.mark.thorough
@CASES
@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_any_prediction_keeps_the_bounds_and_is_deterministic(prediction: list[int], answer: list[int]) -> None:
    one, two = PredictionProposer(prediction, 2), PredictionProposer(prediction, 2)
    for end in range(len(answer)):
        context = [0, 1, *answer[:end]]
        tree = one.propose(context, Limits(4, 3, 0.0))
        assert tree == two.propose(context, Limits(4, 3, 0.0))
        assert len(tree) <= 3
        assert all(parent == at - 1 for at, parent in enumerate(tree.parents))
        text = "".join(map(str, prediction))
        assert "".join(map(str, tree.tokens)) in text


def test_nothing_predicted_nothing_proposed() -> None:
    assert steps_to_say(PredictionProposer([], 1), [1], [2, 3]) == 2
