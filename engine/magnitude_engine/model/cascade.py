"""Decides which rows of a step attend together to which keys; no tensors.

Attention over a set of keys can be computed in parts, each with its log-sum-exp, and merged exactly. So a step
becomes two kinds of parts:

    sequence A   |== common ==|---- own ----|        common   keys that every row of its members sees: one pass
    sequence B   |== common ==|-- own --|                     with the members' rows stacked, no mask
    sequence C   |== common ==|------ own ------|    own      the rest, up to each row's position; sequences with
                                                              as many rows and similar lengths in one padded pass

Prefixes nest: a group that shares a prefix may hold smaller groups that share more. A long chunk of one sequence
has the keys before the chunk as a common part of its own, which spares it the mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.batch import SequenceRows


class Common(NamedTuple):
    """Keys `first..last` (positions), the same in all `members` (indices of sequences) and seen by all their rows."""

    members: tuple[int, ...]
    first: int
    last: int


class Arrangement(NamedTuple):
    """The parts of a step.

    Attributes:
        own: batches of sequences; every sequence stands in exactly one.
        starts: per sequence, the position where its own keys begin.
        common: what is merged into the own parts, in any order.
    """

    own: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    common: tuple[Common, ...]


@dataclass(frozen=True, slots=True)
class Rules:
    """When a part of its own pays; measured, see tests/bench/log.md.

    Attributes:
        few_rows: sequences with at most so many rows share prefixes and are batched.
        shared: least number of keys that sharing spares, counted over all members.
        chunk: least number of keys before a chunk of more than `few_rows` rows that become a part.
        joined: most own keys of a sequence that is batched with others.
        batch: most keys of a padded batch.
        run: least length of a run of pages that is read in place, as a part, rather than copied with the others.
    """

    few_rows: int = 16
    shared: int = 512
    chunk: int = 256
    joined: int = 1024
    batch: int = 4096
    run: int = 1024


def arrange(sequences: Sequence[SequenceRows], rules: Rules) -> Arrangement:
    """Returns the parts of a step."""
    starts = [0] * len(sequences)
    common = list(_shared(sequences, rules, starts))
    for index, rows in enumerate(sequences):
        before = rows.context - rows.count
        if rows.count > rules.few_rows and before - starts[index] >= rules.chunk:
            common.append(Common((index,), starts[index], before))
            starts[index] = before
    for index, rows in enumerate(sequences):
        end = _copied_from(rows, starts[index], rules.run)
        if end > starts[index]:
            common.append(Common((index,), starts[index], end))
            starts[index] = end
    common = [piece for part in common for piece in _in_place(sequences[part.members[0]].pages, part, rules.run)]
    return Arrangement(tuple(_batches(sequences, starts, rules)), tuple(starts), tuple(common))


def runs(pages: Sequence[int], first: int, last: int) -> list[tuple[int, int]]:
    """Returns (first slot, tokens) of each run of consecutive pages that holds positions `first..last`."""
    found: list[tuple[int, int]] = []
    position = first
    while position < last:
        index = position // PAGE_TOKENS
        end = index + 1
        while end * PAGE_TOKENS < last and pages[end] == pages[end - 1] + 1:
            end += 1
        tokens = min(end * PAGE_TOKENS, last) - position
        found.append((pages[index] * PAGE_TOKENS + position % PAGE_TOKENS, tokens))
        position += tokens
    return found


def _shared(sequences: Sequence[SequenceRows], rules: Rules, starts: list[int]) -> Iterator[Common]:
    """Yields the prefixes worth sharing, outer ones first, and moves the starts of their members."""
    seen = {i: s.pages[: (s.context - s.count) // PAGE_TOKENS] for i, s in enumerate(sequences)}
    groups = [[i for i, s in enumerate(sequences) if s.count <= rules.few_rows]]
    while groups:
        group = groups.pop()
        if len(group) < 2:
            continue
        length = _common_length([seen[i] for i in group])
        start = starts[group[0]]
        if (len(group) - 1) * (length * PAGE_TOKENS - start) >= rules.shared:
            yield Common(tuple(group), start, length * PAGE_TOKENS)
            for index in group:
                starts[index] = length * PAGE_TOKENS
        longer = sorted((i for i in group if len(seen[i]) > length), key=lambda i: seen[i][length])
        groups += [list(g) for _, g in itertools.groupby(longer, key=lambda i: seen[i][length])]


def _common_length(tuples: Sequence[tuple[int, ...]]) -> int:
    """Returns how many leading items all of them have in common."""
    low, high = min(tuples), max(tuples)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


def _copied_from(rows: SequenceRows, start: int, least: int) -> int:
    """Returns where a sequence's own keys should begin, so that few of them are copied to be read as one.

    That is where its last run begins if that one is long, else where the last long run ends, but not past the
    keys that all rows see.
    """
    pieces = runs(rows.pages, start, rows.context)
    if len(pieces) == 1:
        return start
    ends = list(itertools.accumulate((tokens for _, tokens in pieces), initial=start))
    if pieces[-1][1] >= least:
        return min(ends[-2], rows.context - rows.count)
    long = [end for end, (_, tokens) in zip(ends[1:], pieces, strict=True) if tokens >= least]
    return min(long[-1], rows.context - rows.count) if long else start


def _in_place(pages: Sequence[int], part: Common, least: int) -> Iterator[Common]:
    """Yields a part cut so that each long run of pages is a part, and what lies between two of them."""
    first = last = part.first
    for _, tokens in runs(pages, part.first, part.last):
        if tokens >= least:
            if first < last:
                yield Common(part.members, first, last)
            yield Common(part.members, last, last + tokens)
            first = last + tokens
        last += tokens
    if first < last:
        yield Common(part.members, first, last)


def _batches(sequences: Sequence[SequenceRows], starts: Sequence[int], rules: Rules) -> Iterator[tuple[int, ...]]:
    """Yields the sequences in batches of equal row counts, none padded to more than twice its length."""

    def order(index: int) -> tuple[int, int]:
        return sequences[index].count, starts[index] - sequences[index].context

    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(sequences)), key=order):
        rows = sequences[index]
        length = rows.context - starts[index]
        joins = (
            bool(batch)
            and rows.count == sequences[batch[0]].count
            and rows.count <= rules.few_rows
            and longest <= rules.joined
            and (len(batch) + 1) * longest <= rules.batch
            and 2 * length + 64 >= longest
        )
        if not joins:
            if batch:
                yield tuple(batch)
            batch, longest = [], length
        batch.append(index)
    if batch:
        yield tuple(batch)
