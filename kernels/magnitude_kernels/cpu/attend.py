"""Causal attention over the cache's slots, in one order of additions whatever is computed together.

A row's keys are taken in blocks of 32 and the blocks in parts of 256, both counted from position 0. Within a part the
weights are those of online softmax, rescaled block by block; parts are merged one after the other, lowest first. So a
row has the same bits in a long chunk, alone, and as a node of a draft tree, and parts may go to several threads.
(Online softmax: Milakov and Gimelshein, arXiv 1805.02867; parts: Flash-Decoding, Dao et al. 2023.)

What has been summed up of a query is a state: greatest score, sum of weights, and from `STATE` on the weighted values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.emit import INT32, INT64, LANES, Emitter, Value, number, set_number, set_real, written

BLOCK = 32
PART = 256
STATE = 8

_VECTORS = BLOCK // LANES


def _write_turn(e: Emitter, base: Value, slots: Value, row_bytes: Value, out: Value) -> None:
    """Reads eight dimensions of eight slots' bfloat16 and writes them dimension by dimension as float32."""
    rows = []
    for n in range(LANES):
        slot = e.load(e.at(slots, 8 * n), INT64)
        rows.append(e.widen_bfloat16(e.at(base, e.times(slot, row_bytes))))
    # Three exchanges between rows that differ in one bit of their number turn the square.
    for bit in (4, 2, 1):
        low = e.integers(*(lane if not lane & bit else LANES + (lane ^ bit) for lane in range(LANES)))
        high = e.integers(*(lane | bit if not lane & bit else LANES + lane for lane in range(LANES)))
        turned = list(rows)
        for n in range(LANES):
            if not n & bit:
                turned[n] = e.builder.shuffle_vector(rows[n], rows[n | bit], low)
                turned[n | bit] = e.builder.shuffle_vector(rows[n], rows[n | bit], high)
        rows = turned
    for n, row in enumerate(rows):
        e.store(row, e.at(out, n * BLOCK * 4))


def _write_widen(
    e: Emitter, base: Value, slots: Value, row_bytes: Value, count: Value, size: Value, out: Value
) -> None:
    """Writes `size` bfloat16 of each of `count` slots as float32, one slot after the other."""

    def row(at: Value, _: list[Value]) -> list[Value]:
        slot = e.load(e.at(slots, e.times(at, 8)), INT64)
        source, target = e.at(base, e.times(slot, row_bytes)), e.at(out, e.times(e.times(at, size), 4))

        def body(column: Value, _: list[Value]) -> list[Value]:
            e.store(e.widen_bfloat16(e.at(source, e.times(column, 2))), e.at(target, e.times(column, 4)))
            return []

        e.loop(size, LANES, [], body)
        return []

    e.loop(count, 1, [], row)


def _score(queries: int) -> Callable[..., Any]:
    """Makes the scores of a block for some queries.

    Its arguments: the first query, bytes between queries, turned keys, dimensions, out (BLOCK float32 per query).
    """

    def write(e: Emitter, query: Value, stride: Value, keys: Value, size: Value, out: Value) -> None:
        def body(at: Value, sums: list[Value]) -> list[Value]:
            sums = list(sums)
            found = [e.vector(e.at(keys, e.times(at, BLOCK * 4), 4 * LANES * n)) for n in range(_VECTORS)]
            for row in range(queries):
                factor = e.spread_from(e.at(query, e.times(stride, row), e.times(at, 4)))
                for n in range(_VECTORS):
                    sums[row * _VECTORS + n] = e.fma(found[n], factor, sums[row * _VECTORS + n])
            return sums

        sums = e.loop(size, 1, [e.number(0.0)] * (queries * _VECTORS), body)
        for n, value in enumerate(sums):
            e.store(value, e.at(out, 4 * LANES * n))

    return written("aaaaa", write)


def _write_weigh(e: Emitter, scores: Value, seen: Value, state: Value) -> Value:
    """Turns a block's scores into weights against the state's greatest score, of which it returns the correction."""
    b = e.builder
    limit = e.spread(b.trunc(seen, INT32))
    found = []
    for n in range(_VECTORS):
        visible = b.icmp_signed("<", e.integers(*range(n * LANES, (n + 1) * LANES)), limit)
        score = e.vector(e.at(scores, 4 * LANES * n))
        found.append((b.select(visible, score, e.number(float("-inf"))), visible))
    block = found[0][0]
    for score, _ in found[1:]:
        block = e.largest(block, score)
    before = e.spread_from(state)
    greatest = e.largest(before, e.fold(block, e.largest))
    correction = e.exp(b.fsub(before, greatest))
    total = e.number(0.0)
    for n, (score, visible) in enumerate(found):
        weight = b.select(visible, e.exp(b.fsub(score, greatest)), e.number(0.0))
        e.store(weight, e.at(scores, 4 * LANES * n))
        total = b.fadd(total, weight)
    summed = e.fma(e.spread_from(e.at(state, 4)), correction, e.fold(total, b.fadd))
    e.store(e.first(greatest), state)
    e.store(e.first(summed), e.at(state, 4))
    return e.first(correction)


def _mix(vectors: int) -> Callable[..., Any]:
    """Makes the weighted sum of a block's values for `vectors` vectors of dimensions.

    Its arguments: weights, how many, values, bytes between values, the sums so far, the correction of these.
    """

    def write(e: Emitter, *arguments: Value) -> None:
        weights, count, values, stride, sums, correction = arguments
        factor = e.spread(correction)
        places = [e.at(sums, 4 * LANES * n) for n in range(vectors)]

        def body(at: Value, mixed: list[Value]) -> list[Value]:
            weight = e.spread_from(e.at(weights, e.times(at, 4)))
            start = e.at(values, e.times(at, stride))
            return [e.fma(e.vector(e.at(start, 4 * LANES * n)), weight, value) for n, value in enumerate(mixed)]

        begun = [e.builder.fmul(e.vector(place), factor) for place in places]
        for value, place in zip(e.loop(count, 1, begun, body), places, strict=True):
            e.store(value, place)

    return written("aaaaaf", write)


def _write_merge(e: Emitter, total: Value, part: Value, size: Value) -> None:
    """Adds a part's state to the state of those before it."""
    b = e.builder
    before, added = e.spread_from(total), e.spread_from(part)
    greatest = e.largest(before, added)
    keep, take = e.exp(b.fsub(before, greatest)), e.exp(b.fsub(added, greatest))
    # exp gives exp(-87) at least; what is empty has no share at all.
    keep = b.select(b.fcmp_ordered("==", before, e.number(float("-inf"))), e.number(0.0), keep)

    def joined(first: Value, second: Value) -> Value:
        return e.fma(first, keep, b.fmul(second, take))

    e.store(e.first(greatest), total)
    e.store(e.first(joined(e.spread_from(e.at(total, 4)), e.spread_from(e.at(part, 4)))), e.at(total, 4))

    def body(at: Value, _: list[Value]) -> list[Value]:
        offset = e.at(e.times(at, 4), STATE * 4)
        place = e.at(total, offset)
        e.store(joined(e.vector(place), e.vector(e.at(part, offset))), place)
        return []

    e.loop(size, LANES, [], body)


def _write_finish(e: Emitter, state: Value, out: Value, size: Value) -> None:
    """Writes a state's values over the sum of their weights."""
    share = e.builder.fdiv(e.number(1.0), e.spread_from(e.at(state, 4)))

    def body(at: Value, _: list[Value]) -> list[Value]:
        value = e.vector(e.at(state, STATE * 4, e.times(at, 4)))
        e.store(e.builder.fmul(value, share), e.at(out, e.times(at, 4)))
        return []

    e.loop(size, LANES, [], body)


_turn, _widen = written("aaaa", _write_turn), written("aaaaaa", _write_widen)
_score1, _score2, _score3 = _score(1), _score(2), _score(3)
_weigh = written("aaa", _write_weigh, types.float32)
_mix8, _mix4, _mix2, _mix1 = _mix(8), _mix(4), _mix(2), _mix(1)
merge, finish = written("aaa", _write_merge), written("aaa", _write_finish)


@compiled
def empty(state: int, size: int) -> None:
    """Makes a state of `size` dimensions that of a query that has seen nothing."""
    for n in range(STATE + size):
        set_real(state, n, 0.0)
    set_real(state, 0, -np.inf)


@compiled
def lay(
    keys: int, values: int, slots: int, count: int, row_bytes: int, size: int, turned: int, wide: int, padded: int
) -> None:
    """Reads a block of one key head: keys turned to [size, BLOCK] float32, values to [BLOCK, size].

    Every argument but the counts is an address.

    Args:
        keys, values: of the head in slot 0, bfloat16.
        slots, count: int64, at most BLOCK; short blocks are filled with their last slot.
        row_bytes: between slots.
        turned, wide: where to write.
        padded: int64 [BLOCK], overwritten.
    """
    filled = slots
    if count < BLOCK:
        filled = padded
        for n in range(BLOCK):
            set_number(padded, n, number(slots, min(n, count - 1)))
    for tokens in range(0, BLOCK, LANES):
        for start in range(0, size, LANES):
            _turn(keys + start * 2, filled + tokens * 8, row_bytes, turned + (start * BLOCK + tokens) * 4)
    _widen(values, slots, row_bytes, count, size, wide)


@compiled
def attend_block(
    query: int, stride: int, group: int, seen: int, size: int, turned: int, wide: int, state: int, scores: int
) -> None:
    """Adds a block that was laid out to the states of a row's `group` queries.

    Args:
        query, stride: address of the first query, float32 already scaled, and bytes between them.
        seen: keys of the block that the row sees, at least 1.
        state: address of the first query's state; they stand `STATE + size` float32 apart.
        scores: address of 3 * BLOCK float32, overwritten.
    """
    for first in range(0, group, 3):
        count = min(3, group - first)
        here = query + first * stride
        if count == 3:
            _score3(here, stride, turned, size, scores)
        elif count == 2:
            _score2(here, stride, turned, size, scores)
        else:
            _score1(here, stride, turned, size, scores)
        for n in range(count):
            place, weights = state + (first + n) * (STATE + size) * 4, scores + n * BLOCK * 4
            correction = _weigh(weights, seen, place)
            _mix_all(weights, seen, wide, size, place + STATE * 4, correction)


@compiled
def _mix_all(weights: int, count: int, wide: int, size: int, sums: int, correction: float) -> None:
    row, at = size * 4, 0
    while at + 64 <= size:
        _mix8(weights, count, wide + at * 4, row, sums + at * 4, correction)
        at += 64
    if at + 32 <= size:
        _mix4(weights, count, wide + at * 4, row, sums + at * 4, correction)
        at += 32
    if at + 16 <= size:
        _mix2(weights, count, wide + at * 4, row, sums + at * 4, correction)
        at += 16
    if at + 8 <= size:
        _mix1(weights, count, wide + at * 4, row, sums + at * 4, correction)
