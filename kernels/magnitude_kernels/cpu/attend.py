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
from functools import reduce
from typing import Any

from llvmlite import ir

from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.emit import INT32, LANES, PAIRS, SHORTS, VECTOR, Emitter, Value, written
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


def _weigh(queries: int, whole: bool) -> Callable[..., Any]:
    """Makes what turns a block's scores into weights against their states' greatest scores, for some queries.

    Its arguments: scores, keys that are seen (all of the block's where it is `whole`), the values' factors, the first
    state, bytes between states. A query's scores are overwritten by int16 codes of the weights times the values'
    factors, behind which stand two float32: the correction of what the state holds, and the factor of the codes.
    """

    def write(e: Emitter, *arguments: Value) -> None:
        first_scores, seen, factors, first_state, state_bytes = arguments
        b = e.builder
        places = [e.at(first_scores, query * BLOCK * 4) for query in range(queries)]
        states = [e.at(first_state, e.times(state_bytes, query)) for query in range(queries)]
        limit = e.spread(b.trunc(seen, INT32))

        def seen_of(n: int, value: Value, otherwise: float) -> Value:
            if whole:
                return value
            visible = b.icmp_signed("<", e.integers(*range(n * LANES, (n + 1) * LANES)), limit)
            return b.select(visible, value, e.number(otherwise))

        # Stage by stage for all queries, so that the processor goes on with one while another waits for its lanes.
        befores, greatest = [], []
        for scores, state in zip(places, states, strict=True):
            found = [seen_of(n, e.vector(e.at(scores, 4 * LANES * n)), float("-inf")) for n in range(_VECTORS)]
            befores.append(e.spread_from(state))
            greatest.append(e.largest(befores[-1], e.fold(reduce(e.largest, found), e.largest)))
        totals, most = [e.number(0.0)] * queries, [e.number(0.0)] * queries
        for query, scores in enumerate(places):
            for n in range(_VECTORS):
                place = e.at(scores, 4 * LANES * n)
                weight = seen_of(n, e.power(b.fsub(e.vector(place), greatest[query])), 0.0)
                totals[query] = b.fadd(totals[query], weight)
                share = b.fmul(weight, seen_of(n, e.vector(e.at(factors, 4 * LANES * n)), 0.0))
                most[query] = e.largest(share, most[query])
                e.store(share, place)
        for query, (scores, state) in enumerate(zip(places, states, strict=True)):
            correction = e.power(b.fsub(befores[query], greatest[query]))
            total = e.fma(e.spread_from(e.at(state, 4)), correction, e.fold(totals[query], b.fadd))
            e.store(e.first(greatest[query]), state)
            e.store(e.first(total), e.at(state, 4))
            largest = e.fold(most[query], e.largest)
            some = b.fcmp_ordered(">", largest, e.number(1e-30))
            scale = b.select(some, b.fdiv(e.number(_LARGEST_WEIGHT), largest), e.number(0.0))
            shares = [e.vector(e.at(scores, 4 * LANES * n)) for n in range(_VECTORS)]
            for n, share in enumerate(shares):
                e.store(b.trunc(e.rounded_bits(share, scale), SHORTS), e.at(scores, 2 * LANES * n))
            e.store(e.first(correction), e.at(scores, 2 * BLOCK))
            e.store(e.first(b.fmul(largest, e.number(1.0 / _LARGEST_WEIGHT))), e.at(scores, 2 * BLOCK + 4))

    return written("aaaaa", write)


def _mix(queries: int, vectors: int) -> Callable[..., Any]:
    """Adds the weighted sums of a block's values to some queries' states, for `vectors` vectors of dimensions.

    Its arguments: the first query's codes (as `_weigh` leaves them), how many, the first values, bytes between
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


def _write_empty(e: Emitter, state: Value, size: Value) -> None:
    """Makes a state of `size` dimensions that of a query that has seen nothing."""
    start = ir.Constant(VECTOR, [float("-inf")] + [0.0] * (LANES - 1))
    e.store(start, state)

    def body(at: Value, _: list[Value]) -> list[Value]:
        e.store(e.number(0.0), e.at(state, STATE * 4, e.times(at, 4)))
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
_weigh_whole3, _weigh3, _weigh1 = _weigh(3, whole=True), _weigh(3, whole=False), _weigh(1, whole=False)
_mix32, _mix31, _mix12, _mix11 = _mix(3, 2), _mix(3, 1), _mix(1, 2), _mix(1, 1)
empty, merge, finish = written("aa", _write_empty), written("aaa", _write_merge), written("aaa", _write_finish)


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
        factors = factors_of(values, size)
        if count == 3:
            if seen == BLOCK:
                _weigh_whole3(scores, seen, factors, states, state_bytes)
            else:
                _weigh3(scores, seen, factors, states, state_bytes)
            _mix_three(scores, seen, values, size, states)
        else:
            for n in range(count):
                codes, state_here = scores + n * BLOCK * 4, states + n * state_bytes
                _weigh1(codes, seen, factors, state_here, state_bytes)
                _mix_one(codes, seen, values, size, state_here)


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
