"""Laying out a block of slots for attention: keys and values in codes, as they are multiplied.

A block that was laid out is, one after the other:

    keys     int16 [size / 2, BLOCK, 2], pairs of dimensions slot by slot
    factors  float32 [BLOCK], of the keys
    values   int16 [BLOCK / 2, size, 2], pairs of slots dimension by dimension
    factors  float32 [BLOCK], of the values

A code is below 2 to the power of 12, and a factor a power of two for a slot and head, so that bfloat16 are held exactly
down to a sixteenth of a head's greatest value. A slot's codes depend on nothing but the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.emit import (
    INT32,
    INT64,
    LANES,
    PAIRS,
    SHORTS,
    VECTOR,
    WIDE,
    Emitter,
    Value,
    number,
    set_number,
    written,
)

BLOCK = 64
CODE_BITS = 12

# Bytes that memory gives at once.
_LINE = 64
_LEAST_EXPONENT, _NOT_FINITE = CODE_BITS - 1, 255
_HALF_ROW = ir.VectorType(INT32, LANES // 2)


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
    """Writes eight slots' factors, given the bits of their greatest bfloat16; returns what makes codes of them."""
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
    plain = ir.Constant(SHORTS, [0x7FFF] * LANES)

    def measure(at: Value, most: list[Value]) -> list[Value]:
        bits = [e.load(e.at(row, e.times(at, 2)), SHORTS) for row in rows]
        return [e.larger(before, b.and_(found, plain)) for before, found in zip(most, bits, strict=True)]

    most = e.loop(size, LANES, [ir.Constant(SHORTS, [0] * LANES)] * LANES, measure)
    scale = _scales(e, _greatest_of_each(e, [b.zext(each, WIDE) for each in most]), factors)
    scales = [b.shuffle_vector(scale, scale, e.integers(n)) for n in range(LANES)]
    for n in range(0, LANES, 2):

        def body(at: Value, _: list[Value], n: int = n) -> list[Value]:
            first, second = (e.upper_halves(e.at(row, e.times(at, 2))) for row in rows[n : n + 2])
            target = e.at(out, e.times(e.times(size, n // 2), 4), e.times(at, 4))
            e.store(_paired(e, first, second, (scales[n], scales[n + 1])), target)
            return []

        e.loop(size, LANES, [], body)


def _write_fetch(e: Emitter, *arguments: Value) -> None:
    """Has eight slots' keys and values brought into the cache: their bases, slots, bytes between, bytes of each."""
    keys, values, slots, row_bytes, count = arguments
    for n in range(LANES):
        offset = e.times(e.load(e.at(slots, 8 * n), INT64), row_bytes)

        def body(at: Value, _: list[Value], offset: Value = offset) -> list[Value]:
            for base in (keys, values):
                e.prefetch(e.at(base, offset, at))
            return []

        e.loop(count, _LINE, [], body)


_turn16, _turn8 = _lay_keys(16), _lay_keys(8)
_code_keys, _lay_values = written("aaa", _write_code_keys), written("aaaaaa", _write_lay_values)
_fetch = written("aaaaa", _write_fetch)


@compiled
def values_of(laid: int, size: int) -> int:
    """Returns where the values of a block begin."""
    return laid + BLOCK * (size * 2 + 4)


@compiled
def factors_of(codes: int, size: int) -> int:
    """Returns where the factors of keys or values begin."""
    return codes + BLOCK * size * 2


@compiled
def lay(
    keys: int, values: int, slots: int, count: int, fetched: int, row_bytes: int, size: int, laid: int, padded: int
) -> None:
    """Lays a block of one key head out; every argument but the counts is an address.

    Args:
        keys, values: of the head in slot 0, bfloat16.
        slots, count: int64, at most BLOCK; eight are read at a time, short ones are filled with their last slot.
        fetched: bytes of a slot that other heads will read soon, this one's included. Memory is twice as fast when it
            is read line by line, so they are brought into the cache now; 0 where that has been done.
        row_bytes: between slots.
        laid: where to write.
        padded: int64 [LANES], overwritten.
    """
    values_laid = values_of(laid, size)
    for first in range(0, count, LANES):
        here = slots + first * 8
        if count - first < LANES:
            for n in range(LANES):
                set_number(padded, n, number(here, min(n, count - first - 1)))
            here = padded
        _fetch(keys, values, here, row_bytes, fetched)
        turned = laid + first * 4
        for start in range(0, size - 8, 16):
            _turn16(keys + start * 2, here, row_bytes, turned + start * BLOCK * 2)
        if size % 16:
            _turn8(keys + (size - 8) * 2, here, row_bytes, turned + (size - 8) * BLOCK * 2)
        _code_keys(turned, size // 2, factors_of(laid, size) + first * 4)
        factors = factors_of(values_laid, size) + first * 4
        _lay_values(values, here, row_bytes, size, values_laid + first * size * 2, factors)
