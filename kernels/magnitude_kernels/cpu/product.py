"""Rows times a matrix that stays packed: y[r, o] = sum over i of x[r, i] * weight[o, i].

A matrix lies in blocks of 16 outputs, each block input by input, so that vectors run over outputs and every sum goes
over the inputs in their order. So a row's result has the same bits whatever rows stand beside it.

    kind      bytes per block and input      scales per block and 32 inputs
    4-bit     8                              float16: 16 scales, 16 minima
    8-bit     16, signed                     the same
    bfloat16  32                             none

Codes of 4 and 8 bits are multiplied as whole numbers with rows that are coded in 16 bits (`rows.code`): two inputs of
eight outputs per instruction, exactly, and a factor per 32 inputs. What 16 bits leave out of a row is a hundredth of
what bfloat16 would. So pairs of inputs lie side by side; 4-bit codes lie in 16-bit words, of which each holds the codes
of one output for inputs i, i + 2, i + 4 and i + 6. bfloat16 weights become float32 in registers, once for some rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from llvmlite import ir

from magnitude_kernels.cpu.compiled import address_of, compiled
from magnitude_kernels.cpu.emit import INT8, INT32, LANES, PAIRS, Emitter, Value, caller, number, written
from magnitude_kernels.cpu.rows import CODED_GROUP, GROUP
from magnitude_kernels.cpu.threads import take

OUTPUTS = 16
FOUR_BITS, EIGHT_BITS, BFLOAT16 = 4, 8, 16
TILE_ROWS = 4
# Blocks that a thread takes at once.
CHUNK = 2

_BYTES = {FOUR_BITS: 8, EIGHT_BITS: 16, BFLOAT16: 32}
_SCALE_BYTES = 2 * OUTPUTS * 2
_HALVES = OUTPUTS // LANES
# Inputs that one load of codes holds for eight outputs, in pairs.
_INPUTS = {FOUR_BITS: 8, EIGHT_BITS: 2}
_UNROLLED = 4


def _pairs(e: Emitter, kind: int, address: Value) -> list[Value]:
    """Returns the codes of eight outputs for `_INPUTS` inputs: a vector of 16-bit words for each two of them."""
    b = e.builder
    if kind == EIGHT_BITS:
        return [b.sext(e.load(address, ir.VectorType(INT8, 2 * LANES)), PAIRS)]
    words = e.load(address, PAIRS)
    low = e.words(15)
    return [
        b.and_(words, low),
        *(b.and_(b.lshr(words, e.words(4 * n)), low) for n in (1, 2)),
        b.lshr(words, e.words(12)),
    ]


def _tile(kind: int, rows: int) -> Callable[..., Any]:
    """Makes the product of `rows` coded rows and a block.

    Its arguments: codes, scales, x, bytes per row of x, out, bytes per row of out, inputs.
    """
    inputs_per_load = _INPUTS[kind]
    load_bytes = _BYTES[kind] * inputs_per_load // _HALVES

    def write(e: Emitter, *arguments: Value) -> None:
        codes, scales, x, x_row, out, out_row, inputs = arguments
        b = e.builder

        def group_of(group: Value, sums: list[Value]) -> Sequence[Value]:
            here = e.at(codes, e.times(group, GROUP * _BYTES[kind]))
            place = e.at(x, e.times(group, CODED_GROUP))
            coded = [e.at(place, e.times(x_row, row)) for row in range(rows)]

            def some(at: Value, values: list[Value]) -> Sequence[Value]:
                values = list(values)
                first = e.at(here, e.times(at, _BYTES[kind]))
                halves = [_pairs(e, kind, e.at(first, load_bytes * half)) for half in range(_HALVES)]
                for n in range(inputs_per_load // 2):
                    for row in range(rows):
                        pair = e.load(e.at(coded[row], e.times(at, 2), 4 * n), INT32)
                        factor = b.bitcast(e.spread(pair), PAIRS)
                        for half in range(_HALVES):
                            index = row * _HALVES + half
                            values[index] = e.add_pair_sums(values[index], halves[half][n], factor)
                return values

            zeros = [e.integers(0)] * (rows * _HALVES)
            whole = e.loop(e.index(GROUP), inputs_per_load, zeros, some)
            start = e.at(scales, e.times(group, _SCALE_BYTES))
            scale, minimum = (
                [e.widen_half(e.at(start, 2 * LANES * (2 * part + half))) for half in range(2)] for part in range(2)
            )
            found: list[Value] = []
            for row in range(rows):
                factor, total = (e.spread_from(e.at(coded[row], 2 * GROUP + 4 * n)) for n in range(2))
                for half in range(_HALVES):
                    index = row * _HALVES + half
                    real = b.sitofp(whole[index], sums[index].type)
                    summed = e.fma(real, b.fmul(scale[half], factor), sums[index])
                    found.append(e.fma(minimum[half], total, summed))
            return found

        groups = b.udiv(inputs, e.index(GROUP))
        _store(e, e.loop(groups, 1, [e.number(0.0)] * (rows * _HALVES), group_of), rows, out, out_row)

    return written("aaaaaaa", write)


def _wide_tile(rows: int) -> Callable[..., Any]:
    """Makes the same for bfloat16 weights and rows in float32."""
    width = _BYTES[BFLOAT16]

    def write(e: Emitter, *arguments: Value) -> None:
        codes, _, x, x_row, out, out_row, inputs = arguments

        def some(at: Value, values: list[Value]) -> Sequence[Value]:
            values = list(values)
            for step in range(_UNROLLED):
                place = e.at(at, step)
                start = e.at(codes, e.times(place, width))
                weights = [e.widen_bfloat16(e.at(start, 2 * LANES * half)) for half in range(_HALVES)]
                for row in range(rows):
                    factor = e.spread_from(e.at(x, e.times(x_row, row), e.times(place, 4)))
                    for half, weight in enumerate(weights):
                        index = row * _HALVES + half
                        values[index] = e.fma(weight, factor, values[index])
            return values

        _store(e, e.loop(inputs, _UNROLLED, [e.number(0.0)] * (rows * _HALVES), some), rows, out, out_row)

    return written("aaaaaaa", write)


def _store(e: Emitter, sums: Sequence[Value], rows: int, out: Value, out_row: Value) -> None:
    for row in range(rows):
        for half in range(_HALVES):
            e.store(sums[row * _HALVES + half], e.at(out, e.times(out_row, row), 4 * LANES * half))


@lru_cache
def tiles(kind: int) -> int:
    """Returns the address of the product for one kind of matrix, which is compiled at the first call.

    Its arguments: first block, blocks, rows, then those of `_tile`, for block 0 and the first row.
    """
    width = _BYTES[kind]
    one, two, three, four = (
        _wide_tile(rows) if kind == BFLOAT16 else _tile(kind, rows) for rows in range(1, TILE_ROWS + 1)
    )

    def multiply_tiles(
        first: int, blocks: int, rows: int,
        codes: int, scales: int, x: int, x_row: int, out: int, out_row: int, inputs: int,
    ) -> None:  # fmt: skip
        parts = (rows + TILE_ROWS - 1) // TILE_ROWS
        size = (rows + parts - 1) // parts
        for row in range(0, rows, size):
            count, x_here = min(size, rows - row), x + row * x_row
            for block in range(first, first + blocks):
                code, scale = codes + block * inputs * width, scales + block * (inputs // GROUP * _SCALE_BYTES)
                place = out + row * out_row + block * OUTPUTS * 4
                if count == 4:
                    four(code, scale, x_here, x_row, place, out_row, inputs)
                elif count == 3:
                    three(code, scale, x_here, x_row, place, out_row, inputs)
                elif count == 2:
                    two(code, scale, x_here, x_row, place, out_row, inputs)
                else:
                    one(code, scale, x_here, x_row, place, out_row, inputs)

    return address_of(multiply_tiles, 10)


_call = caller(10)


@compiled
def takes_codes(matrix: int) -> bool:
    """Returns whether rows have to be coded for a matrix."""
    return number(matrix, 4) != 0


@compiled
def multiply_blocks(
    matrix: int, first: int, blocks: int, rows: int, x: int, x_row: int, out: int, out_row: int, inputs: int
) -> None:
    """Multiplies `rows` rows by `blocks` blocks of a matrix from block `first` on.

    `matrix` is the address of five int64: the address of the product for its kind (`tiles`), those of codes and scales,
    blocks, and whether it takes coded rows; `x` are rows in that form; `out` is the place of block 0.
    """
    codes, scales = number(matrix, 1), number(matrix, 2)
    _call(number(matrix, 0), first, blocks, rows, codes, scales, x, x_row, out, out_row, inputs)


@compiled
def multiply(matrix: int, rows: int, x: int, x_row: int, out: int, out_row: int, inputs: int, counter: int) -> None:
    """Multiplies `rows` rows by a matrix, together with the other threads that count at `counter`."""
    total = number(matrix, 3)
    while True:
        first = take(counter, CHUNK)
        if first >= total:
            return
        multiply_blocks(matrix, first, min(CHUNK, total - first), rows, x, x_row, out, out_row, inputs)
