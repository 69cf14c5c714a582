"""What a layer does row by row between its products: norms, sums, rotary, the cache's dtype, the gate.

All functions take addresses of float32 and counts that are multiples of eight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from magnitude_kernels.cpu.emit import FLOAT, LANES, SHORTS, WIDE, Emitter, Value, written

# Inputs that share a factor in a coded row, the bytes of such a group, and the greatest code.
GROUP = 32
CODED_GROUP = 2 * GROUP + 8
_LARGEST = 32767.0

# Half a head is a multiple of four.
_NARROW_LANES = 4
_NARROW = ir.VectorType(FLOAT, _NARROW_LANES)


def _for_each(write: Callable[..., None], places: int) -> Callable[..., Any]:
    """Makes a function of `places` addresses and a count that does something to eight values at a time."""

    def write_loop(e: Emitter, *arguments: Value) -> None:
        *addresses, count = arguments

        def body(at: Value, _: list[Value]) -> list[Value]:
            write(e, at, *addresses)
            return []

        e.loop(count, LANES, [], body)

    return written("a" * (places + 1), write_loop)


def _write_add(e: Emitter, at: Value, h: Value, x: Value) -> None:
    place = e.at(h, e.times(at, 4))
    e.store(e.builder.fadd(e.vector(place), e.vector(e.at(x, e.times(at, 4)))), place)


def _write_gate(e: Emitter, at: Value, gates: Value, ups: Value, out: Value) -> None:
    offset, b = e.times(at, 4), e.builder
    x = e.vector(e.at(gates, offset))
    share = b.fdiv(x, b.fadd(e.number(1.0), e.exp(b.fsub(e.number(0.0), x))))
    e.store(b.fmul(share, e.vector(e.at(ups, offset))), e.at(out, offset))


def _write_narrow(e: Emitter, at: Value, source: Value, target: Value) -> None:
    e.narrow_bfloat16(e.vector(e.at(source, e.times(at, 4))), e.at(target, e.times(at, 2)))


def _write_norm(e: Emitter, h: Value, weight: Value, out: Value, count: Value, epsilon: Value) -> None:
    b = e.builder

    def square(at: Value, sums: list[Value]) -> list[Value]:
        x = e.vector(e.at(h, e.times(at, 4)))
        return [e.fma(x, x, sums[0])]

    total = e.fold(e.loop(count, LANES, [e.number(0.0)], square)[0], b.fadd)
    mean = b.fdiv(total, e.spread(b.sitofp(count, FLOAT)))
    scale = b.fdiv(e.number(1.0), e.root(b.fadd(mean, e.spread(epsilon))))

    def body(at: Value, _: list[Value]) -> list[Value]:
        offset = e.times(at, 4)
        scaled = b.fmul(e.vector(e.at(h, offset)), scale)
        e.store(b.fmul(scaled, e.vector(e.at(weight, offset))), e.at(out, offset))
        return []

    e.loop(count, LANES, [], body)


def _write_code(e: Emitter, x: Value, out: Value, count: Value) -> None:
    b = e.builder

    def group_of(group: Value, _: list[Value]) -> list[Value]:
        source, target = e.at(x, e.times(group, 4 * GROUP)), e.at(out, e.times(group, CODED_GROUP))
        values = [e.vector(e.at(source, 4 * LANES * n)) for n in range(GROUP // LANES)]
        most, total = e.number(0.0), e.number(0.0)
        for value in values:
            most, total = e.largest(e.magnitude(value), most), b.fadd(total, value)
        most = e.fold(most, e.largest)
        factor = b.fmul(most, e.number(1.0 / _LARGEST))
        # What is this small is zero beside anything that a model computes with.
        some = b.fcmp_ordered(">", most, e.number(1e-30))
        inverse = b.select(some, b.fdiv(e.number(_LARGEST), most), e.number(0.0))
        for n, value in enumerate(values):
            codes = b.fptosi(e.nearest(b.fmul(value, inverse)), WIDE)
            e.store(b.trunc(codes, SHORTS), e.at(target, 2 * LANES * n))
        # The sum is that of the values, so that what is not finite shows in every product.
        e.store(e.first(factor), e.at(target, 2 * GROUP))
        e.store(e.first(e.fold(total, b.fadd)), e.at(target, 2 * GROUP + 4))
        return []

    e.loop(b.udiv(count, e.index(GROUP)), 1, [], group_of)


def _write_code_head(e: Emitter, x: Value, size: Value, most_code: Value) -> None:
    b = e.builder

    def measure(at: Value, most: list[Value]) -> list[Value]:
        return [e.largest(e.magnitude(e.vector(e.at(x, e.times(at, 4)))), most[0])]

    most = e.fold(e.loop(size, LANES, [e.number(0.0)], measure)[0], e.largest)
    limit = e.spread(most_code)
    some = b.fcmp_ordered(">", most, e.number(1e-30))
    inverse = b.select(some, b.fdiv(limit, most), e.number(0.0))

    def body(at: Value, _: list[Value]) -> list[Value]:
        codes = e.rounded_bits(e.vector(e.at(x, e.times(at, 4))), inverse)
        e.store(b.trunc(codes, SHORTS), e.at(x, e.times(at, 2)))
        return []

    e.loop(size, LANES, [], body)
    e.store(e.first(b.fdiv(most, limit)), e.at(x, e.times(size, 2)))


def _write_turn(e: Emitter, x: Value, cosine: Value, sine: Value, size: Value, factor: Value) -> None:
    b, scale = e.builder, e.spread(factor, _NARROW_LANES)
    half = b.udiv(size, e.index(2))

    def body(at: Value, _: list[Value]) -> list[Value]:
        low, high = e.times(at, 4), e.times(b.add(at, half), 4)
        first, second = e.load(e.at(x, low), _NARROW), e.load(e.at(x, high), _NARROW)

        def turned(one: Value, other: Value, offset: Value) -> Value:
            kept = b.fmul(one, e.load(e.at(cosine, offset), _NARROW))
            return b.fmul(b.fadd(kept, b.fmul(other, e.load(e.at(sine, offset), _NARROW))), scale)

        e.store(turned(first, second, low), e.at(x, low))
        e.store(turned(second, first, high), e.at(x, high))
        return []

    e.loop(half, _NARROW_LANES, [], body)


# h, x, count: adds x to h.
add = _for_each(_write_add, 2)
# gates, ups, out, count: writes silu(gate) * up.
gate = _for_each(_write_gate, 3)
# source, target, count: writes float32 as bfloat16.
narrow = _for_each(_write_narrow, 2)
# x, out, count: writes a row in groups of 32: int16 codes, the float32 factor that makes values of them, and the
# values' sum.
code = written("aaa", _write_code)
# x, size, largest code: writes a head of float32 over itself as int16 codes and, behind them, the float32 factor that
# makes values of them.
code_head = written("aaf", _write_code_head)
# h, weight, out, count, epsilon: writes h / sqrt(mean(h²) + epsilon) * weight.
norm = written("aaaaf", _write_norm)
# x, cosine, sine, size, factor: turns a head of `size` dimensions by its position and scales it, in place; the first
# half of the sines is negated.
turn = written("aaaaf", _write_turn)
