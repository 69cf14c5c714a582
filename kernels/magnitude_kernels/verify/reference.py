"""Follows draft trees with what was drawn, in plain torch: the definition of the operation, and its path on CPU.

The rows of a sequence are its last known token and behind it the nodes of its draft. A token was drawn at each row:

    row      0 (last known)   1       2       3          parents -1, -1, 0; the first row's is not read
    node                      0       1       2
    drawn    "book"           ...     "a"     ...        accepted: node 1, and behind it "a"

From the last known token on, the child whose token is the one that was drawn is followed, until there is none. The
token drawn there comes behind the path: it is the model's own, so that a step gives at least one token.

Greedy and sampled steps are accepted alike. The noise of sampling is a function of (seed, choice, position, token),
so the token drawn at a node is the very one that decoding without a draft draws there, and only the child that equals
it can be right. Rejection sampling (accept with probability p / q, else draw from the rest) is not needed: it keeps
the distribution but not the token, so the same seed would give another text with another draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch

NO_NODE = -1


@dataclass(frozen=True, slots=True)
class Trees:
    """The drafts of a step; tensors are int64 and lie on the device of what is drawn.

    Attributes:
        starts: [sequences + 1], the first row of each sequence and the end; every sequence has a row.
        tokens: [rows], the token of each node; what stands at a sequence's first row is not read.
        parents: [rows], the node above, counted within the tree, -1 below the last known token. Parents stand before
            their children, and siblings have different tokens.
        most_nodes: no tree has more.
    """

    starts: torch.Tensor
    tokens: torch.Tensor
    parents: torch.Tensor
    most_nodes: int


class Accepted(NamedTuple):
    """What of each draft is right.

    Attributes:
        nodes: int64 [sequences, most_nodes], the accepted path from the top, `NO_NODE` behind it.
        counts: int64 [sequences], the length of the path.
        following: int64 [sequences], the token drawn behind the path; negative where none could be drawn.
    """

    nodes: torch.Tensor
    counts: torch.Tensor
    following: torch.Tensor


def lay_out(drafts: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> Trees:
    """Returns the trees with these (tokens, parents), one pair per sequence, two empty lists where nothing is drafted.

    Raises:
        ValueError: a draft is no tree as `Trees` describes it.
    """
    starts, tokens, parents = [0], [], []
    for draft_tokens, draft_parents in drafts:
        _check(draft_tokens, draft_parents)
        tokens += [NO_NODE, *draft_tokens]
        parents += [NO_NODE, *draft_parents]
        starts.append(len(tokens))
    rows = torch.tensor([tokens, parents], dtype=torch.int64, device=device)
    most_nodes = max((len(draft_tokens) for draft_tokens, _ in drafts), default=0)
    return Trees(torch.tensor(starts, dtype=torch.int64, device=device), rows[0], rows[1], most_nodes)


def verify(trees: Trees, drawn: torch.Tensor) -> Accepted:
    """Returns how far `drawn` (int64 [rows], negative where none could be drawn) follows each tree."""
    check_rows(trees, drawn)
    tokens, parents, wanted = trees.tokens.tolist(), trees.parents.tolist(), drawn.tolist()
    paths, following = [], []
    for start, end in pairwise(trees.starts.tolist()):
        below = {(parents[row], tokens[row]): row - start - 1 for row in range(start + 1, end) if tokens[row] >= 0}
        path: list[int] = []
        at = NO_NODE
        while (at, wanted[start + 1 + at]) in below:
            at = below[at, wanted[start + 1 + at]]
            path.append(at)
        paths.append(path + [NO_NODE] * (trees.most_nodes - len(path)))
        following.append(wanted[start + 1 + at])
    nodes = torch.tensor(paths, dtype=torch.int64, device=drawn.device).view(len(paths), trees.most_nodes)
    return Accepted(nodes, (nodes >= 0).sum(1), torch.tensor(following, dtype=torch.int64, device=drawn.device))


def check_rows(trees: Trees, drawn: torch.Tensor) -> None:
    """Raises ValueError where trees and drawn tokens are not of the same rows."""
    rows = tuple(trees.tokens.shape)
    if tuple(drawn.shape) != rows or tuple(trees.parents.shape) != rows or drawn.dtype != torch.int64:
        raise ValueError(
            f"verify needs an int64 token drawn at each of {rows} rows, last known tokens included, "
            f"not {drawn.dtype} {tuple(drawn.shape)} with parents {tuple(trees.parents.shape)}"
        )


def _check(tokens: Sequence[int], parents: Sequence[int]) -> None:
    if len(tokens) != len(parents):
        raise ValueError(f"a draft has {len(tokens)} tokens but {len(parents)} parents: give each node one")
    for node, parent in enumerate(parents):
        if not NO_NODE <= parent < node:
            raise ValueError(f"node {node} names node {parent} as its parent, which does not stand before it")
    if len(set(zip(parents, tokens, strict=True))) < len(tokens):
        raise ValueError("two children of one node have the same token: merge them")
