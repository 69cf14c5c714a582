"""Drafts of a made-up model, and what decoding with it token by token says of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from magnitude_kernels.verify.reference import NO_NODE, Accepted, Trees, lay_out

VOCAB = 3
NO_TOKEN = -1


class Step(NamedTuple):
    """Drafts as (tokens, parents), laid out, and the token that the model draws at each row."""

    drafts: list[tuple[list[int], list[int]]]
    trees: Trees
    drawn: torch.Tensor


def spoken(sequence: int, path: Sequence[int]) -> int:
    """Returns the token that the model says after `path`, or NO_TOKEN for a few paths, whose logits are broken."""
    number = zlib.crc32(bytes([sequence % 251, *path]))
    return NO_TOKEN if number % 29 == 0 else number // 29 % VOCAB


def step(sizes: Sequence[int], seed: int) -> Step:
    """Returns a step of drafts with these sizes, the parents random and no two children of a node alike."""
    generator = torch.Generator().manual_seed(seed)

    def number(least: int, end: int) -> int:
        return int(torch.randint(least, end, (1,), generator=generator))

    drafts, drawn = [], []
    for sequence, size in enumerate(sizes):
        tokens: list[int] = []
        parents: list[int] = []
        while len(tokens) < size:
            # Often below the last nodes and often right, so that paths become long and branch off.
            parent = max(-1, len(tokens) - number(1, 4)) if number(0, 3) else number(-1, len(tokens))
            token = spoken(sequence, _path(tokens, parents, parent)) if number(0, 2) else number(0, VOCAB)
            if token != NO_TOKEN and (parent, token) not in zip(parents, tokens, strict=True):
                parents.append(parent)
                tokens.append(token)
        paths = [_path(tokens, parents, node) for node in range(size)]
        drawn += [spoken(sequence, path) for path in ([], *paths)]
        drafts.append((tokens, parents))
    return Step(drafts, lay_out(drafts, torch.device("cpu")), torch.tensor(drawn, dtype=torch.int64))


def complaints(given: Step, accepted: Accepted) -> list[str]:
    """Returns where `accepted` is not what the model says token by token, as far as the draft has it."""
    nodes, counts, following = (column.tolist() for column in accepted)
    wrong = []
    for sequence, (tokens, parents) in enumerate(given.drafts):
        paths = {tuple(_path(tokens, parents, node)): node for node in range(len(tokens))}
        said = [spoken(sequence, [])]
        expected: list[int] = []
        while tuple(said) in paths:
            expected.append(paths[tuple(said)])
            said.append(spoken(sequence, said))
        padding = [NO_NODE] * (given.trees.most_nodes - len(expected))
        found = (nodes[sequence], counts[sequence], following[sequence])
        if found != (expected + padding, len(expected), said[-1]):
            wrong.append(f"sequence {sequence}: {found}, not nodes {expected} and then {said[-1]}")
    return wrong


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Returns the tokens from the top of the tree down to `node`."""
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
