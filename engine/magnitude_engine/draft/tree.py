"""A draft: tokens that may come next, as a tree below the last known token.

    last known token ─┬─ 0 "get" ─── 2 "_user" ─── 3 "_details"        parents (-1, -1, 0, 2)
                      └─ 1 "book"

Nodes stand in order of depth, so a parent stands before its children, and verification can lay them out row by row.
A node's score is the estimated probability that it and all nodes above it are accepted: it never rises along a path.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed tokens.

    Attributes:
        tokens: token id per node; siblings differ.
        parents: index of the node above, -1 below the last known token.
        scores: probability of being accepted together with the whole path, 0..1.
        depths: 1 for nodes below the last known token.

    Raises:
        ValueError: the lengths differ, nodes are not in order of depth, siblings are equal, or a score is not finite,
            outside 0..1 or above its parent's.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    depths: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.parents) == len(self.scores):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.parents)} parents, {len(self.scores)} scores")
        depths: list[int] = []
        for at, (parent, score) in enumerate(zip(self.parents, self.scores, strict=True)):
            if not -1 <= parent < at:
                raise ValueError(f"node {at} names node {parent} as its parent, which does not stand before it")
            depths.append(1 if parent < 0 else depths[parent] + 1)
            if at and depths[at] < depths[at - 1]:
                raise ValueError(f"node {at} is less deep than the node before it")
            if not 0.0 <= score <= (1.0 if parent < 0 else self.scores[parent]):
                raise ValueError(f"node {at} has score {score}, which is outside 0..1 or above its parent's")
        if len(set(zip(self.parents, self.tokens, strict=True))) < len(self.tokens):
            raise ValueError("two children of one node have the same token")
        object.__setattr__(self, "depths", tuple(depths))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def expected(self) -> float:
        """How many of its tokens are expected to be accepted when the whole tree is verified."""
        return math.fsum(self.scores)

    def path(self, node: int) -> tuple[int, ...]:
        """Returns the indices of the nodes from below the last known token down to `node`; -1 gives none."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return tuple(reversed(found))

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the nodes on the way that `tokens` take through the tree, as far as it goes."""
        below = {(parent, token): at for at, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))}
        at = -1
        found: list[int] = []
        for token in tokens:
            following = below.get((at, token))
            if following is None:
                break
            at = following
            found.append(at)
        return tuple(found)

    def best_chain(self) -> DraftTree:
        """Returns the path with the most tokens expected to be accepted, as a tree without forks."""
        if not self.tokens:
            return self
        sums: list[float] = []
        for parent, score in zip(self.parents, self.scores, strict=True):
            sums.append(score + (sums[parent] if parent >= 0 else 0.0))
        return self.kept(self.path(max(range(len(sums)), key=lambda at: (sums[at], -at))))

    def prune(self, budget: int) -> DraftTree:
        """Returns the `budget` nodes with which most tokens are expected to be accepted; all where they are fewer."""
        if budget >= len(self.tokens):
            return self
        ranked = sorted(range(len(self.tokens)), key=lambda at: (-self.scores[at], at))
        return self.kept(sorted(ranked[: max(budget, 0)]))

    def scaled(self, factor: float) -> DraftTree:
        """Returns the tree with all scores times `factor`, 1 at most."""
        return DraftTree(self.tokens, self.parents, tuple(min(score * factor, 1.0) for score in self.scores))

    def within(self, depth: int) -> DraftTree:
        """Returns the nodes that are not deeper than `depth`."""
        return self.kept([node for node, each in enumerate(self.depths) if each <= depth])

    def kept(self, nodes: Sequence[int]) -> DraftTree:
        """Returns the tree of these nodes alone; `nodes` rise and hold the parent of each (else KeyError)."""
        place = {-1: -1} | {node: at for at, node in enumerate(nodes)}
        return DraftTree(
            tuple(self.tokens[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
            tuple(self.scores[node] for node in nodes),
        )


def merge(first: DraftTree, second: DraftTree) -> DraftTree:
    """Returns all nodes of both, those with the same path once, with the higher of their two scores."""
    if not first.tokens or not second.tokens:
        return first if first.tokens else second
    nodes: dict[tuple[int, ...], float] = {}
    for tree in (first, second):
        paths: list[tuple[int, ...]] = []
        for token, parent, score in zip(tree.tokens, tree.parents, tree.scores, strict=True):
            path = (*(paths[parent] if parent >= 0 else ()), token)
            paths.append(path)
            nodes[path] = max(score, nodes.get(path, 0.0))
    order = sorted(nodes, key=len)
    place = {(): -1} | {path: at for at, path in enumerate(order)}
    return DraftTree(
        tuple(path[-1] for path in order), tuple(place[path[:-1]] for path in order), tuple(nodes[p] for p in order)
    )


def common(whole: DraftTree, part: DraftTree) -> dict[int, int]:
    """Returns the nodes of `whole` whose paths `part` has too, each with its node there."""
    places = {(parent, token): at for at, (parent, token) in enumerate(zip(part.parents, part.tokens, strict=True))}
    found = {-1: -1}
    for node, (parent, token) in enumerate(zip(whole.parents, whole.tokens, strict=True)):
        there = places.get((found[parent], token)) if parent in found else None
        if there is not None:
            found[node] = there
    del found[-1]
    return found
