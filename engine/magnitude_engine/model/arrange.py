"""Which rows of a packed step attend together, and to which slots; no weights.

Rows that attend together are a tile: a block of slots is laid out once for all of them.

    a chunk                 its rows, some at a time
    a draft tree            as a chunk; behind the known tokens each node sees slots of its own
    one row each of         one tile up to the last whole block that they have in common; behind it each row
    several sequences       sees slots of its own
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.batch import SequenceRows, StepBatch
from magnitude_kernels.cpu import frame, lay

# Fewer rows than can be (`frame.TILE`) attend together where there would not be work for every thread.
_LEAST_TILE = 16
_NO_SLOTS_OF_ITS_OWN = 1 << 40


class Arranged(NamedTuple):
    """The sequences of a step as `frame.Step` takes them."""

    slots: frame.Indices
    tiles: frame.Indices
    own: frame.Indices


class _Group(NamedTuple):
    """Sequences that stand side by side, and the tokens that they share: whole blocks, none where it is one alone."""

    sequences: list[SequenceRows]
    shared: int


def arrange(batch: StepBatch, tiles: int) -> Arranged:
    """Returns which rows attend together, and to which slots; in about `tiles` tiles, as far as that can be."""
    builder = _Builder(batch.positions.numpy(), tiles)
    for group in _groups(batch.sequences):
        if len(group.sequences) > 1:
            builder.add_group(group)
        else:
            builder.add(group.sequences[0])
    return Arranged(np.concatenate(builder.slots), np.array(builder.tiles, np.int64), builder.own)


class _Builder:
    """Collects slots and tiles."""

    def __init__(self, positions: frame.Indices, tiles: int) -> None:
        self.slots: list[frame.Indices] = []
        self.tiles: list[tuple[int, int, int, int, int]] = []
        self.own = np.full((len(positions), 2), [_NO_SLOTS_OF_ITS_OWN, 0], np.int64)
        self._positions = positions
        self._wanted = tiles
        self._begin = 0

    def add(self, sequence: SequenceRows) -> None:
        """Adds a sequence that shares nothing."""
        known, end = sequence.context - len(sequence.parents), sequence.start + sequence.count
        most = min(max(-(-len(self._positions) // self._wanted), _LEAST_TILE), frame.TILE)
        tile = -(-sequence.count // -(-sequence.count // most))
        mine = _slots(sequence)
        for first in range(sequence.start, end, tile):
            self._tile(first, min(tile, end - first), known)
        self._append(mine[:known])
        for row, path in _paths(sequence, mine[:known], mine[known:]):
            self._append_own(row, known // lay.BLOCK * lay.BLOCK, path)

    def add_group(self, group: _Group) -> None:
        """Adds sequences of one row each."""
        members = group.sequences
        self._tile(members[0].start, len(members), group.shared)
        self._append(_slots(members[0])[: group.shared])
        for sequence in members:
            self._append_own(sequence.start, group.shared, _slots(sequence)[group.shared :])

    def _tile(self, first: int, count: int, known: int) -> None:
        last = int(self._positions[first : first + count].max())
        self.tiles.append((first, count, self._begin, known, last))

    def _append(self, slots: frame.Indices) -> None:
        self.slots.append(slots)
        self._begin += len(slots)

    def _append_own(self, row: int, start: int, slots: frame.Indices) -> None:
        self.own[row] = start, self._begin
        self._append(slots)


def _groups(sequences: Sequence[SequenceRows]) -> Iterator[_Group]:
    """Yields the sequences in their order, those with one row together as long as they share at least half as much."""
    members: list[SequenceRows] = []
    shared = 0
    for sequence in sequences:
        common = _common(members, sequence, shared)
        if members and 0 < common >= shared // 2:
            members.append(sequence)
            shared = common
            continue
        if members:
            yield _Group(members, shared)
        members, shared = [sequence], sequence.context // lay.BLOCK * lay.BLOCK
    yield _Group(members, shared)


def _common(members: Sequence[SequenceRows], sequence: SequenceRows, shared: int) -> int:
    """Returns how many tokens in whole blocks a sequence shares with a group that shares `shared`."""
    if not members or members[0].count > 1 or sequence.count > 1 or len(members) == _LEAST_TILE:
        return 0
    pages = zip(members[0].pages[: shared // PAGE_TOKENS], sequence.pages, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pages)) * PAGE_TOKENS
    return min(same, sequence.context) // lay.BLOCK * lay.BLOCK


def _slots(sequence: SequenceRows) -> frame.Indices:
    """Returns the slots of a sequence's keys, those of a draft tree's nodes last."""
    table = np.array(sequence.pages[: -(-sequence.context // PAGE_TOKENS)], np.int64)
    return (table[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1)[: sequence.context]


def _paths(sequence: SequenceRows, known: frame.Indices, nodes: frame.Indices) -> Iterator[tuple[int, frame.Indices]]:
    """Yields the rows of a draft tree with the slots of all that they see from the last whole block on."""
    shared = known[len(known) // lay.BLOCK * lay.BLOCK :]
    first = sequence.start + sequence.count - len(sequence.parents)
    paths: list[list[int]] = []
    for node, parent in enumerate(sequence.parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
        yield first + node, np.concatenate([shared, nodes[paths[node]]])
