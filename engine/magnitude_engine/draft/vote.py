"""Earlier places with the same last tokens vote on what comes next; the likeliest paths become a draft tree.

A place votes for the token that followed there with the square of the length of its match. The share of a token among
the votes, times the trust that the longest match deserves, estimates its probability; places that agree with a token
vote on below it, their match one token longer. The tree grows at its likeliest leaf first, so that with any budget it
holds the nodes with which most tokens are expected to be accepted.

Measured on the public agent traces: votes by length squared, cubed, or to the power 1.5 or 2 differ by less than 2 % in
tokens per step, and looking each path up anew instead of following the same places gains less than 1 %
(tests/bench/log.md).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from magnitude_engine.draft.chains import LONGEST, Match
from magnitude_engine.draft.tree import DraftTree

# Share of cases in which any of the places had the right token, by the length of the longest match, on those traces.
_PRIOR = (0.0, 0.54, 0.71, 0.78, 0.86, 0.87, 0.91, 0.91, 0.92, 0.92, 0.92, 0.94, 0.95, 0.95, 0.95, 0.95, 0.96)
_PRIOR_CASES = 24.0
_MEMORY_CASES = 400.0
# Certainty would make every leaf below equal, and rounding could lift one above its parent.
_MOST_TRUST = 0.99


class Limits(NamedTuple):
    """How large a draft may be: nodes, tokens on a path, the least score of a node, 0..1, and whether it may fork."""

    nodes: int = 16
    depth: int = 24
    score: float = 0.02
    fork: bool = True


class Ballot(NamedTuple):
    """The tree, and what may be learned from the token that really comes.

    Attributes:
        length: the longest match that something followed, 0 where there was none.
        candidates: all tokens voted for.
    """

    tree: DraftTree
    length: int
    candidates: frozenset[int]


# A `Match` without its name: a draft makes hundreds of them.
_Place = tuple[Sequence[int], int, int]

NO_BALLOT = Ballot(DraftTree(), 0, frozenset())


class Trust:
    """How often matches of each length are right, learned as tokens come; older cases fade."""

    def __init__(self) -> None:
        self._right = [_PRIOR_CASES * share for share in _PRIOR]
        self._cases = [_PRIOR_CASES] * len(_PRIOR)

    def __getitem__(self, length: int) -> float:
        """Returns the probability that any place is right when the longest match has this length, 0..0.99."""
        return min(self._right[length] / self._cases[length], _MOST_TRUST)

    def learn(self, ballot: Ballot, token: int) -> None:
        """Takes note of the token that came after `ballot`."""
        at = ballot.length
        if at:
            if self._cases[at] >= _MEMORY_CASES:
                self._cases[at] *= 0.5
                self._right[at] *= 0.5
            self._cases[at] += 1.0
            self._right[at] += token in ballot.candidates


class _Leaf(NamedTuple):
    """A node that may join the tree, ordered by score; `places` are those that agree with its path."""

    negative_score: float
    arrival: int
    token: int
    parent: int
    depth: int
    places: Sequence[_Place]


def vote(places: Sequence[Match], trust: Trust, limits: Limits) -> Ballot:
    """Returns the tree that `places` vote for, within `limits`."""
    arrivals = itertools.count()
    leaves = list(_below(_Leaf(-1.0, 0, -1, -1, 0, places), -1, trust, arrivals))
    candidates = frozenset(leaf.token for leaf in leaves)
    heapq.heapify(leaves)
    nodes: list[_Leaf] = []
    while leaves and len(nodes) < limits.nodes:
        leaf = heapq.heappop(leaves)
        if -leaf.negative_score < limits.score or leaf.depth > limits.depth:
            break
        nodes.append(leaf)
        if not limits.fork:
            leaves.clear()
        if leaf.depth < limits.depth:
            for each in _below(leaf, len(nodes) - 1, trust, arrivals):
                heapq.heappush(leaves, each)
    length = max((p.length for p in places if p.at < len(p.tokens) and p.tokens[p.at] >= 0), default=0)
    return Ballot(_in_depth_order(nodes), length, candidates)


def _below(above: _Leaf, node: int, trust: Trust, arrivals: Iterator[int]) -> Iterator[_Leaf]:
    """Yields the leaves below a node that became number `node` of the tree."""
    followers: dict[int, list[_Place]] = {}
    votes: dict[int, int] = {}
    longest = 0
    for tokens, at, length in above.places:
        token = tokens[at] if at < len(tokens) else -1
        if token < 0:
            continue
        place = (tokens, at + 1, length + 1 if length < LONGEST else length)
        if token in votes:
            votes[token] += length * length
            followers[token].append(place)
        else:
            votes[token] = length * length
            followers[token] = [place]
        if length > longest:
            longest = length
    if votes:
        whole = above.negative_score * trust[longest] / sum(votes.values())
        depth = above.depth + 1
        for token, share in votes.items():
            yield _Leaf(whole * share, next(arrivals), token, node, depth, followers[token])


def _in_depth_order(nodes: Sequence[_Leaf]) -> DraftTree:
    order = sorted(range(len(nodes)), key=lambda at: nodes[at].depth)
    place = {-1: -1} | {node: at for at, node in enumerate(order)}
    return DraftTree(
        tuple(nodes[at].token for at in order),
        tuple(place[nodes[at].parent] for at in order),
        tuple(-nodes[at].negative_score for at in order),
    )
