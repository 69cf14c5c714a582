"""Where the last tokens of a sequence occurred before: chains of equal n-grams, as LZ77 compressors keep them.

For n of 1, 2, 4 and 8 a table maps the hash of an n-gram to where it last ended, and every position to where an n-gram
of the same hash ended before:

    tokens      … 7 9 4 … 7 9 4 … 7 9 4
    2-gram 9 4      2  ←      9  ←     16  ←  table[hash(9, 4)]

A lookup walks the chains of the longest n-grams first, the latest position first, and compares tokens, so hashes that
collide cost time only. A token costs four table entries to add, whole prompts are linked by numpy, and the last tokens
can be taken back. Suffix automata find the same matches, but need a dict per state, cannot forget, and know how
often a suffix occurred only after a pass over all states.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ORDERS = (1, 2, 4, 8)
LONGEST = 16
MATCHES = 24
BYTES_PER_TOKEN = 4 + 8 * len(ORDERS)

_FEWEST_BITS = 8
_GROWTH_BITS = 2
_BULK = 48
_HOPS_PER_MATCH = 4
_WORD = 0xFFFFFFFF
_FIRST = 0x9E3779B1
_SECOND = 0x85EBCA6B


class Match(NamedTuple):
    """An earlier place with the same last tokens.

    Attributes:
        tokens: the sequence it is in.
        at: index in `tokens` of what followed there.
        length: how many tokens before `at` are the same, 1..`LONGEST`; `LONGEST` stands for more, too.
    """

    tokens: Sequence[int]
    at: int
    length: int


class Chains:
    """A sequence of token ids (0 and above, or -1, which matches nothing) with its n-gram chains."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._hashes = tuple(array("I") for _ in ORDERS)
        self._earlier = tuple(array("i") for _ in ORDERS)
        self._bits = _FEWEST_BITS
        self._latest = _empty_tables(self._bits)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes held, within the slack with which arrays grow."""
        return len(self.tokens) * BYTES_PER_TOKEN + 4 * len(ORDERS) * (1 << self._bits)

    @property
    def room(self) -> int:
        """How many tokens may be added before the tables are built anew."""
        return (1 << self._bits) - len(self.tokens)

    def append(self, token: int) -> None:
        """Adds a token; amortised O(1)."""
        at = len(self.tokens)
        if at >= 1 << self._bits:
            self.extend((token,))
            return
        self.tokens.append(token)
        shift = 32 - self._bits
        value = (token + 1) * _FIRST & _WORD
        for level, order in enumerate(ORDERS):
            hashes, earlier = self._hashes[level], self._earlier[level]
            if level:
                half = order // 2
                below = self._hashes[level - 1]
                value = ((below[at - half] if at >= half else 0) * _FIRST + value) * _SECOND & _WORD
            hashes.append(value)
            if at < order - 1:
                earlier.append(-1)
            else:
                latest = self._latest[level]
                earlier.append(latest[value >> shift])
                latest[value >> shift] = at

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens."""
        start = len(self.tokens)
        if start + len(tokens) <= 1 << self._bits and len(tokens) < _BULK:
            for token in tokens:
                self.append(token)
            return
        self.tokens.extend(tokens)
        while len(self.tokens) > 1 << self._bits:
            self._bits += _GROWTH_BITS
        grown = len(self._latest[0]) < 1 << self._bits
        if grown:
            self._latest = _empty_tables(self._bits)
            for earlier in self._earlier:
                del earlier[:]
        self._hash_from(start)
        self._link_from(0 if grown else start)

    def truncate(self, length: int) -> None:
        """Takes back all tokens from index `length` on."""
        shift = 32 - self._bits
        for hashes, earlier, latest, order in zip(self._hashes, self._earlier, self._latest, ORDERS, strict=True):
            for at in range(len(self.tokens) - 1, max(length, order - 1) - 1, -1):
                latest[hashes[at] >> shift] = earlier[at]
            del hashes[length:], earlier[length:]
        del self.tokens[length:]

    def matches(self, tail: Sequence[int], limit: int = MATCHES) -> list[Match]:
        """Returns up to `limit` places that something followed where the same tokens stand as at the end of `tail`.

        Those found by longer n-grams come first, later places before earlier ones. Only the last `LONGEST` tokens of
        `tail` are looked at.
        """
        tail = tail[-LONGEST:]
        found: dict[int, int] = {}
        for level, value in reversed(list(enumerate(_tail_hashes(tail)))):
            if value is not None:
                self._walk(level, value, tail, (found, limit))
        return [Match(self.tokens, at, length) for at, length in found.items()]

    def _walk(self, level: int, value: int, tail: Sequence[int], into: tuple[dict[int, int], int]) -> None:
        """Adds the matches on one chain."""
        found, limit = into
        tokens, earlier, order = self.tokens, self._earlier[level], ORDERS[level]
        end = len(tokens) - 1
        at = self._latest[level][value >> 32 - self._bits]
        for _ in range(_HOPS_PER_MATCH * limit):
            if at < 0 or len(found) >= limit:
                return
            if at < end and at + 1 not in found:
                length = 0
                for back in range(1, min(len(tail), at + 1) + 1):
                    if tokens[at + 1 - back] != tail[-back]:
                        break
                    length = back
                if length >= order:
                    found[at + 1] = length
            at = earlier[at]

    def _hash_from(self, start: int) -> None:
        """Computes the hashes of all n-grams that end at `start` or later."""
        words = np.frombuffer(self.tokens, dtype=np.int32)[max(start - LONGEST, 0) :].astype(np.uint64)
        offset = len(words) - (len(self.tokens) - start)
        values = (words + np.uint64(1)) * np.uint64(_FIRST) & np.uint64(_WORD)
        for level, order in enumerate(ORDERS):
            if level:
                before = np.zeros_like(values)
                before[order // 2 :] = values[: -(order // 2)]
                values = (before * np.uint64(_FIRST) + values) * np.uint64(_SECOND) & np.uint64(_WORD)
            self._hashes[level].frombytes(values[offset:].astype(np.uint32).tobytes())

    def _link_from(self, start: int) -> None:
        """Links all n-grams that end at `start` or later behind those before them."""
        shift = np.uint32(32 - self._bits)
        for hashes, earlier, latest, order in zip(self._hashes, self._earlier, self._latest, ORDERS, strict=True):
            first = max(start, order - 1)
            links = np.full(len(hashes) - start, -1, dtype=np.int32)
            keys = np.frombuffer(hashes, dtype=np.uint32)[first:] >> shift
            table = np.frombuffer(latest, dtype=np.int32)
            if len(keys):
                ranked = np.argsort(keys, kind="stable").astype(np.int32)
                sorted_keys = keys[ranked]
                fresh = np.append(True, sorted_keys[1:] != sorted_keys[:-1])
                before = np.append(np.int32(-1), ranked[:-1] + np.int32(first))
                links[ranked + (first - start)] = np.where(fresh, table[sorted_keys], before)
                last = np.append(fresh[1:], True)
                table[sorted_keys[last]] = ranked[last] + np.int32(first)
            earlier.frombytes(links.tobytes())


def _empty_tables(bits: int) -> tuple[array[int], ...]:
    return tuple(array("i", (-1,)) * (1 << bits) for _ in ORDERS)


def _tail_hashes(tail: Sequence[int]) -> list[int | None]:
    """Returns the hash of the n-gram at the end of `tail` for each order, None where it is too short."""
    values = [(token + 1) * _FIRST & _WORD for token in tail[-ORDERS[-1] :]]
    found: list[int | None] = []
    for level, order in enumerate(ORDERS):
        if level:
            half = order // 2
            pairs = zip(values[:-half], values[half:], strict=True)
            values = [(left * _FIRST + right) * _SECOND & _WORD for left, right in pairs]
        found.append(values[-1] if values else None)
    return found
