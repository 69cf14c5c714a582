"""Draft trees against their definition by sets of paths."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.draft.tree import DraftTree, merge

pytestmark = pytest.mark.thorough

CASES = settings(max_examples=40, deadline=None)
Paths = dict[tuple[int, ...], float]


@st.composite
def trees(draw: st.DrawFn, most: int = 9) -> DraftTree:
    """Any tree over three tokens; scores are multiples of 1/8 that fall along each path."""
    tokens: list[int] = []
    parents: list[int] = []
    scores: list[float] = []
    depths: list[int] = []
    for at in range(draw(st.integers(0, most))):
        # A parent of the deepest level but one, or deeper, keeps the nodes in order of depth.
        floor = next((i for i in range(at) if depths[i] == depths[-1] - 1), -1) if depths and depths[-1] > 1 else -1
        free = [
            (parent, token)
            for parent in range(floor, at)
            for token in range(3)
            if (parent, token) not in zip(parents, tokens, strict=True)
            and (not depths or (depths[parent] if parent >= 0 else 0) + 1 >= depths[-1])
        ]
        parent, token = draw(st.sampled_from(free))
        ceiling = 1.0 if parent < 0 else scores[parent]
        tokens.append(token)
        parents.append(parent)
        scores.append(draw(st.integers(0, int(8 * ceiling))) / 8)
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(scores))


def paths(tree: DraftTree) -> Paths:
    """Returns the tree as the tokens down to each node, with its score."""
    return {tuple(tree.tokens[n] for n in tree.path(at)): tree.scores[at] for at in range(len(tree))}


@CASES
@given(trees())
def test_a_node_stands_behind_its_parent_and_not_above_a_deeper_one(tree: DraftTree) -> None:
    assert len(paths(tree)) == len(tree)
    assert list(tree.depths) == [len(tree.path(at)) for at in range(len(tree))] == sorted(tree.depths)
    assert tree.expected == math.fsum(tree.scores)


@CASES
@given(trees(), st.lists(st.integers(0, 2), max_size=6))
def test_follow_goes_as_far_as_a_path_does(tree: DraftTree, tokens: list[int]) -> None:
    known = paths(tree)
    reached = max((n for n in range(len(tokens) + 1) if n == 0 or tuple(tokens[:n]) in known), default=0)
    assert [tree.tokens[at] for at in tree.follow(tokens)] == tokens[:reached]


@CASES
@given(trees(), trees())
def test_merging_joins_the_paths(first: DraftTree, second: DraftTree) -> None:
    one, two = paths(first), paths(second)
    assert paths(merge(first, second)) == {p: max(one.get(p, 0.0), two.get(p, 0.0)) for p in one | two}
    assert paths(merge(first, second)) == paths(merge(second, first))
    assert merge(first, DraftTree()) == merge(DraftTree(), first) == first


@CASES
@given(trees(), st.integers(-1, 10))
def test_pruning_keeps_the_most_expected_tokens_that_a_tree_of_this_size_can_have(tree: DraftTree, budget: int) -> None:
    kept = tree.prune(budget)
    assert len(kept) == min(max(budget, 0), len(tree))
    assert paths(kept).items() <= paths(tree).items()
    best = max(
        math.fsum(tree.scores[at] for at in nodes)
        for nodes in combinations(range(len(tree)), len(kept))
        if all(tree.parents[at] in (-1, *nodes) for at in nodes)
    )
    assert kept.expected == best


@CASES
@given(trees())
def test_the_best_chain_is_the_path_with_the_most_expected_tokens(tree: DraftTree) -> None:
    chain = tree.best_chain()
    assert list(chain.parents) == list(range(-1, len(chain) - 1))
    assert paths(chain).items() <= paths(tree).items()
    sums = [math.fsum(tree.scores[n] for n in tree.path(at)) for at in range(len(tree))]
    assert chain.expected == max(sums, default=0.0)


@pytest.mark.parametrize(
    ("tokens", "parents", "scores", "complaint"),
    [
        ((1, 2), (-1,), (0.5, 0.5), "2 tokens, 1 parents, 2 scores"),
        ((1,), (0,), (0.5,), "node 0 names node 0"),
        ((1,), (-2,), (0.5,), "node 0 names node -2"),
        ((1, 2, 3), (-1, 0, -1), (0.5, 0.5, 0.5), "node 2 is less deep"),
        ((1, 2), (-1, 0), (0.5, 0.6), "node 1 has score 0.6"),
        ((1,), (-1,), (math.nan,), "node 0 has score nan"),
        ((1,), (-1,), (1.5,), "node 0 has score 1.5"),
        ((1, 1), (-1, -1), (0.5, 0.5), "same token"),
    ],
)
def test_what_is_no_draft_is_refused(
    tokens: tuple[int, ...], parents: tuple[int, ...], scores: tuple[float, ...], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        DraftTree(tokens, parents, scores)
