"""Vector code for LLVM: eight float32 lanes, loads from addresses, loops that carry values in registers.

numba compiles Python's loops but leaves the choice of vectors to LLVM's heuristics. Where the order of additions must
not depend on them, and where everything must stay in registers, functions are written with this instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 8

INT8, INT16, INT32, INT64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
HALF, FLOAT = ir.HalfType(), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
WIDE = ir.VectorType(INT32, LANES)
SHORTS, PAIRS = ir.VectorType(INT16, LANES), ir.VectorType(INT16, 2 * LANES)

_LOG2E = 1.44269504088896341
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
# Cephes' expf: exp(r) = 1 + r + r² * polynomial(r) for |r| <= ln 2 / 2, within two units in the last place.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LEAST, _MOST = -87.0, 88.0
# 2 to the power of r for |r| <= 1/2 within 8e-8, by weighted least squares.
_POWER = (1.3276471525e-3, 9.6755413307e-3, 5.5507132749e-2, 2.4022119724e-1, 6.9314696706e-1, 1.0000000717)
# Added to a number below 2 to the power of 22 it leaves the nearest whole number in the lowest bits.
_WHOLE = 12582912.0

# LLVM makes several instructions of what processors with AVX2 have one for.
_HAS_PAIR_SUMS = binding.get_host_cpu_features().get("avx2", False)
# What is written as an instruction has to be read.
binding.initialize_native_asmparser()

# What llvmlite and numba hand around has no types of its own.
Value = Any


class Emitter:
    """Writes code into a function that is being built."""

    def __init__(self, builder: Value) -> None:
        self.builder = builder

    def index(self, value: int) -> Value:
        """Returns a constant offset or count."""
        return ir.Constant(INT64, value)

    def at(self, address: Value, *terms: Value | int) -> Value:
        """Returns `address` plus bytes."""
        for term in terms:
            address = self.builder.add(address, self.index(term) if isinstance(term, int) else term)
        return address

    def times(self, a: Value, b: Value | int) -> Value:
        """Returns a product of indices."""
        return self.builder.mul(a, self.index(b) if isinstance(b, int) else b)

    def load(self, address: Value, kind: Value) -> Value:
        """Returns what lies at an address, aligned or not."""
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=1)

    def vector(self, address: Value) -> Value:
        """Returns the eight float32 at an address."""
        return self.load(address, VECTOR)

    def prefetch(self, address: Value) -> None:
        """Has the line of memory at an address brought into the cache, while other work goes on."""
        pointer = INT8.as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [pointer, INT32, INT32, INT32])
        function = cgutils.get_or_insert_function(self.builder.module, signature, "llvm.prefetch.p0i8")
        how = [ir.Constant(INT32, value) for value in (0, 3, 1)]
        self.builder.call(function, [self.builder.inttoptr(address, pointer), *how])

    def store(self, value: Value, address: Value) -> None:
        """Writes a value to an address, aligned or not."""
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=1)

    def number(self, value: float) -> Value:
        """Returns a constant in all lanes."""
        return ir.Constant(VECTOR, [value] * LANES)

    def integers(self, *values: int) -> Value:
        """Returns eight constant integers; one stands for eight of it."""
        return ir.Constant(WIDE, list(values) * (LANES // len(values)))

    def words(self, value: int) -> Value:
        """Returns a constant 16-bit integer in all of sixteen lanes."""
        return ir.Constant(PAIRS, [value] * (2 * LANES))

    def pair_sums(self, a: Value, b: Value) -> Value:
        """Returns a[2n] * b[2n] + a[2n + 1] * b[2n + 1] of 16-bit integers as eight of 32 bits."""
        if _HAS_PAIR_SUMS:
            signature = ir.FunctionType(WIDE, [PAIRS, PAIRS])
            name = "llvm.x86.avx2.pmadd.wd"
            return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), (a, b))
        products: list[Value] = []
        for first in range(2):
            order = ir.Constant(WIDE, [2 * lane + first for lane in range(LANES)])
            x, y = (self.builder.sext(self.builder.shuffle_vector(v, v, order), WIDE) for v in (a, b))
            products.append(self.builder.mul(x, y))
        return self.builder.add(*products)

    def add_pair_sums(self, total: Value, a: Value, b: Value) -> Value:
        """Returns `total` and `pair_sums` of `a` and `b` added up."""
        found = self.pair_sums(a, b)
        if not _HAS_PAIR_SUMS:
            return self.builder.add(total, found)
        # LLVM would add up what comes in one iteration first, for which there are not enough registers.
        kind = ir.FunctionType(WIDE, [WIDE, WIDE])
        return self.builder.asm(kind, "vpaddd $2, $1, $0", "=x,x,x", [total, found], side_effect=False)

    def spread(self, value: Value, lanes: int = LANES) -> Value:
        """Returns a float32 or int32 in all lanes."""
        kind = ir.VectorType(value.type, lanes)
        nothing = ir.Constant(kind, ir.Undefined)
        one = self.builder.insert_element(nothing, value, ir.Constant(INT32, 0))
        return self.builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))

    def spread_from(self, address: Value) -> Value:
        """Returns the float32 at an address in all lanes."""
        return self.spread(self.load(address, FLOAT))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Returns a * b + c, rounded once."""
        return self._call("llvm.fma.v8f32", a, b, c)

    def root(self, a: Value) -> Value:
        """Returns the square root."""
        return self._call("llvm.sqrt.v8f32", a)

    def largest(self, a: Value, b: Value) -> Value:
        """Returns the larger of two in each lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def larger(self, a: Value, b: Value) -> Value:
        """Returns the larger of two signed whole numbers in each lane."""
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def nearest(self, a: Value) -> Value:
        """Returns the nearest whole numbers, ties to even."""
        return self._call("llvm.rint.v8f32", a)

    def magnitude(self, a: Value) -> Value:
        """Returns a without its sign."""
        return self._call("llvm.fabs.v8f32", a)

    def upper_halves(self, address: Value) -> Value:
        """Returns eight 16-bit words as the upper halves of 32-bit words."""
        bits = self.builder.zext(self.load(address, SHORTS), WIDE)
        return self.builder.shl(bits, self.integers(16))

    def widen_bfloat16(self, address: Value) -> Value:
        """Returns eight bfloat16 as float32."""
        return self.builder.bitcast(self.upper_halves(address), VECTOR)

    def rounded_bits(self, value: Value, factor: Value) -> Value:
        """Returns value * factor, below 2 to the power of 15, rounded to whole numbers in the lower halves of words."""
        return self.builder.bitcast(self.fma(value, factor, self.number(_WHOLE)), WIDE)

    def widen_half(self, address: Value) -> Value:
        """Returns eight float16 as float32."""
        return self.builder.fpext(self.load(address, ir.VectorType(HALF, LANES)), VECTOR)

    def narrow_bfloat16(self, value: Value, address: Value) -> None:
        """Writes eight float32 as bfloat16, rounded to the nearest, ties to even."""
        b = self.builder
        bits = b.bitcast(value, WIDE)
        odd = b.and_(b.lshr(bits, self.integers(16)), self.integers(1))
        rounded = b.add(b.add(bits, self.integers(0x7FFF)), odd)
        self.store(b.trunc(b.lshr(rounded, self.integers(16)), SHORTS), address)

    def exp(self, x: Value) -> Value:
        """Returns e to the power of x; what is under -87 counts as -87."""
        b = self.builder
        x = self.largest(x, self.number(_LEAST))
        x = b.select(b.fcmp_ordered("<", x, self.number(_MOST)), x, self.number(_MOST))
        whole = self.nearest(b.fmul(x, self.number(_LOG2E)))
        rest = self.fma(whole, self.number(-_LN2_HIGH), x)
        rest = self.fma(whole, self.number(-_LN2_LOW), rest)
        result = self.number(_EXP[0])
        for coefficient in _EXP[1:]:
            result = self.fma(result, rest, self.number(coefficient))
        result = b.fadd(self.fma(result, b.fmul(rest, rest), rest), self.number(1.0))
        exponent = b.add(b.fptosi(whole, WIDE), self.integers(127))
        return b.fmul(result, b.bitcast(b.shl(exponent, self.integers(23)), VECTOR))

    def power(self, x: Value) -> Value:
        """Returns 2 to the power of x for x <= 0; what is under -126 counts as -126."""
        b = self.builder
        x = self.largest(x, self.number(-126.0))
        whole = self.nearest(x)
        rest = b.fsub(x, whole)
        result = self.number(_POWER[0])
        for coefficient in _POWER[1:]:
            result = self.fma(result, rest, self.number(coefficient))
        raised = b.add(b.bitcast(result, WIDE), b.shl(b.fptosi(whole, WIDE), self.integers(23)))
        return b.bitcast(raised, VECTOR)

    def fold(self, vector: Value, join: Callable[[Value, Value], Value]) -> Value:
        """Returns `join` over all lanes, in all lanes: halves with halves, so in one order."""
        for step in (4, 2, 1):
            order = self.integers(*(lane ^ step for lane in range(LANES)))
            vector = join(vector, self.builder.shuffle_vector(vector, vector, order))
        return vector

    def first(self, vector: Value) -> Value:
        """Returns the first lane."""
        return self.builder.extract_element(vector, ir.Constant(INT32, 0))

    def loop(
        self,
        count: Value,
        step: int,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
    ) -> list[Value]:
        """Runs `body(index, values) -> values` for indices 0, step, … below `count`; returns the last values."""
        b = self.builder
        before = b.block
        head, inside, behind = (b.append_basic_block(name) for name in ("head", "inside", "behind"))
        b.branch(head)
        b.position_at_end(head)
        at = b.phi(INT64)
        values = [b.phi(value.type) for value in carried]
        b.cbranch(b.icmp_signed("<", at, count), inside, behind)
        b.position_at_end(inside)
        following = body(at, values)
        after = b.add(at, self.index(step))
        end = b.block
        b.branch(head)
        for phi, first, then in zip([at, *values], [self.index(0), *carried], [after, *following], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(then, end)
        b.position_at_end(behind)
        return values

    def _call(self, name: str, *arguments: Value) -> Value:
        signature = ir.FunctionType(VECTOR, [VECTOR] * len(arguments))
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), arguments)


def written(arguments: str, write: Callable[..., Value], returns: Value = types.void) -> Callable[..., Any]:
    """Makes a function for compiled code out of one that writes it.

    Args:
        arguments: a letter per argument: `a` an address or another int64, `f` a float32.
        write: gets an `Emitter` and the arguments; returns the result, None for none.
        returns: numba's type of the result.
    """
    kinds = {"a": types.int64, "f": types.float32}
    signature = returns(*(kinds[letter] for letter in arguments))

    def typer(_context: Value, *_arguments: Value) -> tuple[Value, Callable[..., Value]]:
        def generate(context: Value, builder: Value, _signature: Value, values: Sequence[Value]) -> Value:
            result = write(Emitter(builder), *values)
            return context.get_dummy_value() if result is None else result

        return signature, generate

    # numba counts a function's arguments by its signature.
    names = ("context", *(f"a{n}" for n in range(len(arguments))))
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    vars(typer)["__signature__"] = inspect.Signature([inspect.Parameter(name, positional) for name in names])
    made: Callable[..., Any] = intrinsic(typer)
    return made


def _write_number(e: Emitter, address: Value, n: Value) -> Value:
    return e.load(e.at(address, e.times(n, 8)), INT64)


def _write_set_number(e: Emitter, address: Value, n: Value, value: Value) -> None:
    e.store(value, e.at(address, e.times(n, 8)))


# The n-th int64 behind an address, read and written.
number: Callable[[int, int], int] = written("aa", _write_number, types.int64)
set_number: Callable[[int, int, int], None] = written("aaa", _write_set_number)


def caller(arguments: int) -> Callable[..., Any]:
    """Makes a function that calls the one at an address (its first argument) with so many int64."""
    kind = ir.FunctionType(ir.VoidType(), [INT64] * arguments)

    def write(e: Emitter, address: Value, *values: Value) -> None:
        e.builder.call(e.builder.inttoptr(address, kind.as_pointer()), values)

    return written("a" * (arguments + 1), write)
