"""What attention reads: the pages of one layer, and which rows of a step belong to which sequence.

sequence 0    sequence 1    sequence 2          padding
|- 1 row -|   |- 1 row -|   |---- 256 rows ---| |-----|
run 0: 2 sequences          run 1: 1 sequence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

# A sequence of at most this many rows reads its context in splits that run side by side.
SHORT_ROWS = 64


class Cache(NamedTuple):
    """Keys and values of one layer, [pages, page tokens, kv_heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


class Run(NamedTuple):
    """Consecutive sequences that one launch serves; all are upper bounds that a captured graph may keep.

    Attributes:
        sequences: how many, entries without rows included.
        rows: rows from the end of the run before it to the end of this one.
        most_rows: no sequence has more.
    """

    sequences: int
    rows: int
    most_rows: int


@dataclass(frozen=True, slots=True)
class Ragged:
    """The sequences of a step; tensors lie on the queries' device.

    The rows `starts .. starts + counts` of a sequence are its last `counts` tokens, in order, so that row i of it has
    position `contexts - counts + i`. Rows of no sequence are padding: their result is zero.

    Attributes:
        starts, counts, contexts: int32 [sequences]; first row, rows, and tokens in the cache, those of the rows
            included. An entry with a count of 0 is padding.
        table: int32 [sequences, pages], the pages of each sequence in order; entries past its context are not read.
        runs: covers the sequences in order. Only speed and memory depend on it, and the last bits of a result: a
            row's bits are the same in every batch that gives it a run of the same `kind`.
    """

    starts: torch.Tensor
    counts: torch.Tensor
    contexts: torch.Tensor
    table: torch.Tensor
    runs: tuple[Run, ...]


def kind(rows: int) -> int:
    """Returns which sequences may share a run: 0 for one row, 1 for at most SHORT_ROWS, 2 for more."""
    return 0 if rows <= 1 else 1 if rows <= SHORT_ROWS else 2


def lay_out(
    counts: Sequence[int], contexts: Sequence[int], pages: Sequence[Sequence[int]], device: torch.device
) -> Ragged:
    """Returns the step whose sequences have these lengths, their rows without gaps; any order is right.

    Fewest launches and least memory take sequences in order of `kind`.
    """
    runs = []
    for _, group in groupby(counts, kind):
        members = list(group)
        runs.append(Run(len(members), sum(members), max(members)))
    table = torch.zeros(len(pages), max(map(len, pages), default=0), dtype=torch.int32)
    for row, own in zip(table, pages, strict=True):
        row[: len(own)] = torch.tensor(own, dtype=torch.int32)
    starts = [sum(counts[:index]) for index in range(len(counts))]
    lengths = torch.tensor([starts, list(counts), list(contexts)], dtype=torch.int32).to(device)
    return Ragged(lengths[0], lengths[1], lengths[2], table.to(device), tuple(runs))
