"""Causal attention over the cache's slots, in one order of additions whatever is computed together.

A row's keys are taken in blocks of 64 and the blocks in parts of 256, both counted from position 0. Within a part the
weights are those of online softmax, rescaled block by block; parts are merged one after the other, lowest first. So a
row has the same bits in a long chunk, alone, and as a node of a draft tree, and parts may go to several threads.
(Online softmax: Milakov and Gimelshein, arXiv 1805.02867; parts: Flash-Decoding, Dao et al. 2023.)

Within a block everything is multiplied as whole numbers, two products an instruction: keys and values in 12 bits with a
power of two per slot and head, which holds their bfloat16 exactly down to a sixteenth of a head's greatest value;
queries in 13 bits of their head's greatest; weights, times the values' factors, in 13 bits of a block's greatest. A sum
fits in 32 bits. A slot's code depends on nothing but the slot, and a weight on nothing that its row does not see.

What has been summed up of a query is a state: greatest score (a power of two), sum of weights, and from `STATE` on the
weighted values. A block that was laid out is, one after the other:

    keys     int16 [size / 2, BLOCK, 2], pairs of dimensions slot by slot
    factors  float32 [BLOCK], of the keys
    values   int16 [BLOCK / 2, size, 2], pairs of slots dimension by dimension
    factors  float32 [BLOCK], of the values
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.emit import INT16, INT32, INT64, LANES, PAIRS, VECTOR, WIDE, Emitter, Value
from magnitude_kernels.cpu.emit import number, set_number, set_real, written

BLOCK = 64
PART = 256
STATE = 8

# Codes of keys and values are below 2 to the power of CODE_BITS.
CODE_BITS = 12
_LARGEST_WEIGHT = float((1 << 31) // (BLOCK << CODE_BITS) - 1)
_VECTORS = BLOCK // LANES
# Vectors of scores that are summed up at once.
_TOGETHER = 4
_LEAST_EXPONENT, _NOT_FINITE = CODE_BITS - 1, 255
_HALF_ROW = ir.VectorType(INT32, LANES // 2)
_SHORTS = ir.VectorType(INT16, LANES)


def _turned(e: Emitter, rows: Sequence[Value]) -> list[Value]:
    """Returns eight vectors as the columns of their square: three exchanges between rows that differ in one bit."""
    turned = list(rows)
    for bit in (4, 2, 1):
        low, high = _exchange(e, bit)
        rows = list(turned)
        for n in range(LANES):
            if not n & bit:
                turned[n] = e.builder.shuffle_vector(rows[n], rows[n | bit], low)
                turned[n | bit] = e.builder.shuffle_vector(rows[n], rows[n | bit], high)
    return turned


def _greatest_of_each(e: Emitter, rows: Sequence[Value]) -> Value:
    """Returns a vector whose lanes are the greatest lanes of eight vectors of whole numbers."""
    b, found = e.builder, dict(enumerate(rows))
    for bit in (4, 2, 1):
        low, high = _exchange(e, bit)
        for n in [n for n in found if not n & bit]:
            one, other = found[n], found.pop(n | bit)
            found[n] = e.larger(b.shuffle_vector(one, other, low), b.shuffle_vector(one, other, high))
    return found[0]


def _exchange(e: Emitter, bit: int) -> tuple[Value, Value]:
    """Returns the two shuffles that bring lanes without and with a bit of their number together."""
    low = e.integers(*(lane if not lane & bit else LANES + (lane ^ bit) for lane in range(LANES)))
    high = e.integers(*(lane | bit if not lane & bit else LANES + lane for lane in range(LANES)))
    return low, high


def _scales(e: Emitter, greatest: Value, factors: Value) -> Value:
    """Writes the factors of eight slots, whose greatest bfloat16 are given as bits; returns what makes codes of them."""
    b = e.builder
    exponent = b.lshr(greatest, e.integers(7))
    exponent = e.larger(exponent, e.integers(_LEAST_EXPONENT))
    factor = b.bitcast(b.shl(b.sub(exponent, e.integers(_LEAST_EXPONENT)), e.integers(23)), VECTOR)
    finite = b.icmp_signed("<", exponent, e.integers(_NOT_FINITE))
    e.store(b.select(finite, factor, e.number(float("inf"))), factors)
    return b.bitcast(b.shl(b.sub(e.integers(254 + _LEAST_EXPONENT), exponent), e.integers(23)), VECTOR)


def _paired(e: Emitter, first: Value, second: Value, scales: tuple[Value, Value]) -> Value:
    """Returns eight pairs of codes of what stands as bfloat16 in the upper halves of eight 32-bit words each."""
    b = e.builder
    low, high = (
        e.rounded_bits(b.bitcast(word, VECTOR), scale) for word, scale in zip((first, second), scales, strict=True)
    )
    return b.or_(b.and_(low, e.integers(0xFFFF)), b.shl(high, e.integers(16)))


def _lay_keys(dimensions: int) -> Callable[..., Any]:
    """Makes what turns 16 or 8 dimensions of eight slots: their addresses' list, where to write, as they are."""

    def write(e: Emitter, base: Value, slots: Value, row_bytes: Value, out: Value) -> None:
        rows = []
        for n in range(LANES):
            place = e.at(base, e.times(e.load(e.at(slots, 8 * n), INT64), row_bytes))
            if dimensions == 2 * LANES:
                rows.append(e.load(place, WIDE))
            else:
                half = e.load(place, _HALF_ROW)
                rows.append(e.builder.shuffle_vector(half, half, e.integers(0, 1, 2, 3, 0, 1, 2, 3)))
        for n, row in enumerate(_turned(e, rows)[: dimensions // 2]):
            e.store(row, e.at(out, n * BLOCK * 4))

    return written("aaaa", write)


def _write_code_keys(e: Emitter, keys: Value, pairs: Value, factors: Value) -> None:
    """Makes codes of eight slots' keys, which stand turned, and writes their factors."""
    b, plain = e.builder, e.integers(0x7FFF7FFF)

    def place(at: Value) -> Value:
        return e.at(keys, e.times(at, BLOCK * 4))

    def measure(at: Value, most: list[Value]) -> list[Value]:
        bits = b.bitcast(b.and_(e.load(place(at), WIDE), plain), PAIRS)
        return [e.larger(most[0], bits)]

    most = b.bitcast(e.loop(pairs, 1, [e.words(0)], measure)[0], WIDE)
    most = e.larger(b.and_(most, e.integers(0xFFFF)), b.lshr(most, e.integers(16)))
    scale = _scales(e, most, factors)

    def body(at: Value, _: list[Value]) -> list[Value]:
        bits = e.load(place(at), WIDE)
        first, second = b.shl(bits, e.integers(16)), b.and_(bits, e.integers(-0x10000))
        e.store(_paired(e, first, second, (scale, scale)), place(at))
        return []

    e.loop(pairs, 1, [], body)


def _write_lay_values(e: Emitter, *arguments: Value) -> None:
    """Writes eight slots' values in codes, and their factors: base, slots, bytes between, dimensions, out, factors."""
    base, slots, row_bytes, size, out, factors = arguments
    b = e.builder
    rows = [e.at(base, e.times(e.load(e.at(slots, 8 * n), INT64), row_bytes)) for n in range(LANES)]
    plain = ir.Constant(_SHORTS, [0x7FFF] * LANES)

    def measure(at: Value, most: list[Value]) -> list[Value]:
        bits = [e.load(e.at(row, e.times(at, 2)), _SHORTS) for row in rows]
        return [e.larger(before, b.and_(found, plain)) for before, found in zip(most, bits, strict=True)]

    most = e.loop(size, LANES, [ir.Constant(_SHORTS, [0] * LANES)] * LANES, measure)
    scale = _scales(e, _greatest_of_each(e, [b.zext(each, WIDE) for each in most]), factors)
    scales = [b.shuffle_vector(scale, scale, e.integers(n)) for n in range(LANES)]
    for n in range(0, LANES, 2):

        def body(at: Value, _: list[Value], n: int = n) -> list[Value]:
            first, second = (e.upper_halves(e.at(row, e.times(at, 2))) for row in rows[n : n + 2])
            target = e.at(out, e.times(e.times(size, n // 2), 4), e.times(at, 4))
            e.store(_paired(e, first, second, (scales[n], scales[n + 1])), target)
            return []

        e.loop(size, LANES, [], body)


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
        e.store(b.trunc(e.rounded_bits(share, scale), _SHORTS), e.at(scores, 2 * LANES * n))
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


_turn16, _turn8 = _lay_keys(16), _lay_keys(8)
_code_keys, _lay_values = written("aaa", _write_code_keys), written("aaaaaa", _write_lay_values)
_score1, _score2, _score3 = _score(1), _score(2), _score(3)
_weigh = written("aaaa", _write_weigh)
_mix34, _mix32, _mix31 = _mix(3, 4), _mix(3, 2), _mix(3, 1)
_mix14, _mix12, _mix11 = _mix(1, 4), _mix(1, 2), _mix(1, 1)
merge, finish = written("aaa", _write_merge), written("aaa", _write_finish)


@compiled
def empty(state: int, size: int) -> None:
    """Makes a state of `size` dimensions that of a query that has seen nothing."""
    for n in range(STATE + size):
        set_real(state, n, 0.0)
    set_real(state, 0, -np.inf)


@compiled
def lay(keys: int, values: int, slots: int, count: int, row_bytes: int, size: int, laid: int, padded: int) -> None:
    """Lays a block of one key head out; every argument but the counts is an address.

    Args:
        keys, values: of the head in slot 0, bfloat16.
        slots, count: int64, at most BLOCK; eight are read at a time, short ones are filled with their last slot.
        row_bytes: between slots.
        laid: where to write.
        padded: int64 [LANES], overwritten.
    """
    values_laid = laid + BLOCK * (size * 2 + 4)
    for first in range(0, count, LANES):
        here = slots + first * 8
        if count - first < LANES:
            for n in range(LANES):
                set_number(padded, n, number(here, min(n, count - first - 1)))
            here = padded
        turned = laid + first * 4
        for start in range(0, size - 8, 16):
            _turn16(keys + start * 2, here, row_bytes, turned + start * BLOCK * 2)
        if size % 16:
            _turn8(keys + (size - 8) * 2, here, row_bytes, turned + (size - 8) * BLOCK * 2)
        _code_keys(turned, size // 2, laid + BLOCK * size * 2 + first * 4)
        factors = values_laid + BLOCK * size * 2 + first * 4
        _lay_values(values, here, row_bytes, size, values_laid + first * size * 2, factors)


@compiled
def attend_block(
    query: int, stride: int, group: int, seen: int, size: int, laid: int, state: int, scores: int
) -> None:
    """Adds a block that was laid out to the states of a row's `group` queries.

    Args:
        query, stride: address of the first query, as `rows.code_head` writes it, and bytes between them.
        seen: keys of the block that the row sees, at least 1.
        state: address of the first query's state; they stand `STATE + size` float32 apart.
        scores: address of 3 * BLOCK float32, overwritten.
    """
    values, state_bytes = laid + BLOCK * (size * 2 + 4), (STATE + size) * 4
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
            _weigh(scores + n * BLOCK * 4, seen, values + BLOCK * size * 2, states + n * state_bytes)
        if count == 3:
            _mix_three(scores, seen, values, size, states)
        else:
            for n in range(count):
                _mix_one(scores + n * BLOCK * 4, seen, values, size, states + n * state_bytes)


@compiled
def _mix_three(codes: int, seen: int, values: int, size: int, states: int) -> None:
    row, state_bytes, sums, at = size * 4, (STATE + size) * 4, states + STATE * 4, 0
    while at + 32 <= size:
        _mix34(codes, seen, values + at * 4, row, sums + at * 4, state_bytes)
        at += 32
    if at + 16 <= size:
        _mix32(codes, seen, values + at * 4, row, sums + at * 4, state_bytes)
        at += 16
    if at + 8 <= size:
        _mix31(codes, seen, values + at * 4, row, sums + at * 4, state_bytes)


@compiled
def _mix_one(codes: int, seen: int, values: int, size: int, states: int) -> None:
    row, sums, at = size * 4, states + STATE * 4, 0
    while at + 32 <= size:
        _mix14(codes, seen, values + at * 4, row, sums + at * 4, 0)
        at += 32
    if at + 16 <= size:
        _mix12(codes, seen, values + at * 4, row, sums + at * 4, 0)
        at += 16
    if at + 8 <= size:
        _mix11(codes, seen, values + at * 4, row, sums + at * 4, 0)
