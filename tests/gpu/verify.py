"""The acceptance kernel on a GPU: right on fresh drafts, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from magnitude_kernels import dispatch
from magnitude_kernels.verify.reference import Trees
from testkit.accepting import Step, complaints, step
from testkit.gpu import Case

SIZES = ((1, 8), (8, 16), (64, 64))
_WORD_BYTES = 8


def check(device: torch.device) -> list[str]:
    """Returns what the operation accepts wrongly, over drafts of all sizes."""
    wrong = []
    start = torch.seed() % 2**31
    for seed in range(start, start + 10):
        given = _on(device, step([0, 1, 2, 5, 17, 0, 33, 63, 64], seed))
        wrong += [f"{line} (seed {seed})" for line in complaints(given, dispatch.verify(given.trees, given.drawn))]
    return wrong


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the steps to time; each row's token, parent and drawn token are read once."""
    for sequences, nodes in SIZES:
        given = _on(device, step([nodes] * sequences, seed=nodes))
        yield _case(f"{sequences} trees of {nodes}", given)


def _case(name: str, given: Step) -> Case:
    trees, drawn = given.trees, given.drawn
    return Case(
        name,
        kernel=lambda turn: dispatch.verify(trees, drawn),
        torch=lambda turn: plain_torch(trees, drawn),
        least_bytes=3 * _WORD_BYTES * drawn.numel(),
    )


def plain_torch(trees: Trees, drawn: torch.Tensor) -> torch.Tensor:
    """Returns which rows are on an accepted path, with torch's own operations and no wait for the device."""
    rows = torch.arange(drawn.numel(), device=drawn.device)
    first = trees.starts[torch.searchsorted(trees.starts, rows, right=True) - 1]
    above = torch.where(rows == first, rows, first + 1 + trees.parents)
    right = (rows == first) | (trees.tokens == drawn[above])
    # Each turn looks twice as far up.
    for _ in range(trees.most_nodes.bit_length()):
        right = right & right[above]
        above = above[above]
    return right


def _on(device: torch.device, given: Step) -> Step:
    columns = {name: getattr(given.trees, name).to(device) for name in ("starts", "tokens", "parents")}
    return given._replace(trees=replace(given.trees, **columns), drawn=given.drawn.to(device))
