"""Causal attention over the cache's slots, in one order of additions whatever is computed together.

A row's keys are taken in blocks of 64 and the blocks in parts of 256, both counted from position 0. Within a part the
weights are those of online softmax, rescaled block by block; parts are merged one after the other, lowest first. So a
row has the same bits in a long chunk, alone, and as a node of a draft tree, and parts may go to several threads.
(Online softmax: Milakov and Gimelshein, arXiv 1805.02867; parts: Flash-Decoding, Dao et al. 2023.)

Within a block everything is multiplied as whole numbers, two products an instruction: keys and values in 12 bits
(`lay`), queries in 13 of their head's greatest, weights, times the values' factors, in 13 of a block's greatest. A sum
fits in 32 bits, and a weight depends on nothing that its row does not see.

What has been summed up of a query is a state: greatest score (a power of two), sum of weights, and from `STATE` on the
weighted values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.emit import INT32, LANES, PAIRS, SHORTS, VECTOR, Emitter, Value, set_real, written
from magnitude_kernels.cpu.lay import BLOCK, CODE_BITS, factors_of, values_of

PART = 256
STATE = 8

_LARGEST_WEIGHT = float((1 << 31) // (BLOCK << CODE_BITS) - 1)
_VECTORS = BLOCK // LANES
# Vectors of scores that are summed up at once: their sums and what they are made of fit into 16 registers.
_TOGETHER = 2


def _score(queries: int) -> Callable[..., Any]:
    """Makes the scores of a block for some queries.

    Its arguments: the first query's codes, bytes between queries, the block, dimensions, out (BLOCK float32 per query).
    """

    def write(e: Emitter, query: Value, stride: Value, keys: Value, size: Value, out: Value) -> None:
        b = e.builder
        factors = e.at(keys, e.times(size, BLOCK * 2))
        own = [e.spread_from(e.at(query, e.times(stride, row), e.times(size, 2))) for row in range(queries)]
        for first in range(0, _VECTORS, _TOGETHER):
            vectors = range(first, first + _TOGETHER)

            def body(at: Value, sums: list[Value], vectors: range = vectors) -> list[Value]:
                sums = list(sums)
                found = [e.load(e.at(keys, e.times(at, BLOCK * 4), 4 * LANES * n), PAIRS) for n in vectors]
                for row in range(queries):
                    pair = e.load(e.at(query, e.times(stride, row), e.times(at, 4)), INT32)
                    code = b.bitcast(e.spread(pair), PAIRS)
                    for n, keys_here in enumerate(found):
                        index = row * _TOGETHER + n
                        sums[index] = b.add(sums[index], e.pair_sums(keys_here, code))
                return sums

            pairs = b.udiv(size, e.index(2))
            sums = e.loop(pairs, 1, [e.integers(0)] * (queries * _TOGETHER), body)
            for index, value in enumerate(sums):
                row, n = index // _TOGETHER, first + index % _TOGETHER
                factor = b.fmul(e.vector(e.at(factors, 4 * LANES * n)), own[row])
                score = b.fmul(b.sitofp(value, VECTOR), factor)
                e.store(score, e.at(out, 4 * (row * BLOCK + LANES * n)))

    return written("aaaaa", write)


def _write_weigh(e: Emitter, scores: Value, seen: Value, factors: Value, state: Value) -> None:
    """Turns a block's scores into weights against the state's greatest score.

    Overwrites the scores by int16 codes of the weights times the values' factors, behind which stand two float32: the
    correction of what the state holds, and the factor of the codes.
    """
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
    total, most, shares = e.number(0.0), e.number(0.0), []
    for n, (score, visible) in enumerate(found):
        weight = b.select(visible, e.power(b.fsub(score, greatest)), e.number(0.0))
        total = b.fadd(total, weight)
        factor = b.select(visible, e.vector(e.at(factors, 4 * LANES * n)), e.number(0.0))
        shares.append(b.fmul(weight, factor))
        most = e.largest(shares[-1], most)
    correction = e.power(b.fsub(before, greatest))
    summed = e.fma(e.spread_from(e.at(state, 4)), correction, e.fold(total, b.fadd))
    e.store(e.first(greatest), state)
    e.store(e.first(summed), e.at(state, 4))
    most = e.fold(most, e.largest)
    some = b.fcmp_ordered(">", most, e.number(1e-30))
    scale = b.select(some, b.fdiv(e.number(_LARGEST_WEIGHT), most), e.number(0.0))
    for n, share in enumerate(shares):
        e.store(b.trunc(e.rounded_bits(share, scale), SHORTS), e.at(scores, 2 * LANES * n))
    e.store(e.first(correction), e.at(scores, 2 * BLOCK))
    e.store(e.first(b.fmul(most, e.number(1.0 / _LARGEST_WEIGHT))), e.at(scores, 2 * BLOCK + 4))


def _mix(queries: int, vectors: int) -> Callable[..., Any]:
    """Adds the weighted sums of a block's values to some queries' states, for `vectors` vectors of dimensions.

    Its arguments: the first query's codes (as `_write_weigh` leaves them), how many, the first values, bytes between
    pairs of slots, the first query's sums, bytes between states.
    """

    def write(e: Emitter, *arguments: Value) -> None:
        codes, count, values, stride, sums, state_bytes = arguments
        b = e.builder

        def body(at: Value, mixed: list[Value]) -> list[Value]:
            mixed = list(mixed)
            start = e.at(values, e.times(b.udiv(at, e.index(2)), stride))
            found = [e.load(e.at(start, 4 * LANES * n), PAIRS) for n in range(vectors)]
            for query in range(queries):
                pair = e.load(e.at(codes, query * BLOCK * 4, e.times(at, 2)), INT32)
                code = b.bitcast(e.spread(pair), PAIRS)
                for n, value in enumerate(found):
                    index = query * vectors + n
                    mixed[index] = b.add(mixed[index], e.pair_sums(value, code))
            return mixed

        mixed = e.loop(count, 2, [e.integers(0)] * (queries * vectors), body)
        for query in range(queries):
            correction, factor = (e.spread_from(e.at(codes, query * BLOCK * 4 + 2 * BLOCK + 4 * n)) for n in range(2))
            for n in range(vectors):
                place = e.at(sums, e.times(state_bytes, query), 4 * LANES * n)
                kept = b.fmul(e.vector(place), correction)
                e.store(e.fma(b.sitofp(mixed[query * vectors + n], VECTOR), factor, kept), place)

    return written("aaaaaa", write)


def _write_merge(e: Emitter, total: Value, part: Value, size: Value) -> None:
    """Adds a part's state to the state of those before it."""
    b = e.builder
    before, added = e.spread_from(total), e.spread_from(part)
    greatest = e.largest(before, added)
    keep, take = e.power(b.fsub(before, greatest)), e.power(b.fsub(added, greatest))
    # power gives a little at least; what is empty has no share at all.
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


_score1, _score2, _score3 = _score(1), _score(2), _score(3)
_weigh = written("aaaa", _write_weigh)
_mix32, _mix31, _mix12, _mix11 = _mix(3, 2), _mix(3, 1), _mix(1, 2), _mix(1, 1)
merge, finish = written("aaa", _write_merge), written("aaa", _write_finish)


@compiled
def empty(state: int, size: int) -> None:
    """Makes a state of `size` dimensions that of a query that has seen nothing."""
    for n in range(STATE + size):
        set_real(state, n, 0.0)
    set_real(state, 0, -np.inf)


@compiled
def attend_block(query: int, stride: int, group: int, seen: int, size: int, laid: int, state: int, scores: int) -> None:
    """Adds a block that was laid out to the states of a row's `group` queries.

    Args:
        query, stride: address of the first query, as `rows.code_head` writes it, and bytes between them.
        seen: keys of the block that the row sees, at least 1.
        state: address of the first query's state; they stand `STATE + size` float32 apart.
        scores: address of 3 * BLOCK float32, overwritten.
    """
    values, state_bytes = values_of(laid, size), (STATE + size) * 4
    for first in range(0, group, 3):
        count = min(3, group - first)
        here, states = query + first * stride, state + first * state_bytes
        if count == 3:
            _score3(here, stride, laid, size, scores)
        elif count == 2:
            _score2(here, stride, laid, size, scores)
        else:
            _score1(here, stride, laid, size, scores)
        for n in range(count):
            _weigh(scores + n * BLOCK * 4, seen, factors_of(values, size), states + n * state_bytes)
        if count == 3:
            _mix_three(scores, seen, values, size, states)
        else:
            for n in range(count):
                _mix_one(scores + n * BLOCK * 4, seen, values, size, states + n * state_bytes)


@compiled
def _mix_three(codes: int, seen: int, values: int, size: int, states: int) -> None:
    row, state_bytes, sums, at = size * 4, (STATE + size) * 4, states + STATE * 4, 0
    while at + 16 <= size:
        _mix32(codes, seen, values + at * 4, row, sums + at * 4, state_bytes)
        at += 16
    if at + 8 <= size:
        _mix31(codes, seen, values + at * 4, row, sums + at * 4, state_bytes)


@compiled
def _mix_one(codes: int, seen: int, values: int, size: int, states: int) -> None:
    row, sums, at = size * 4, states + STATE * 4, 0
    while at + 16 <= size:
        _mix12(codes, seen, values + at * 4, row, sums + at * 4, 0)
        at += 16
    if at + 8 <= size:
        _mix11(codes, seen, values + at * 4, row, sums + at * 4, 0)
