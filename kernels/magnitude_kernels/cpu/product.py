"""Rows times a matrix that stays packed: y[r, o] = sum over i of x[r, i] * weight[o, i].

A matrix lies in blocks of 16 outputs, each block input by input, so that vectors run over outputs and every sum goes
over the inputs in their order. So a row's result has the same bits whatever rows stand beside it. A code is turned
into its float32 weight in registers, code * scale + minimum, once for up to six rows.

    kind      bytes per block and input      scales per block and 32 inputs
    4-bit     8: output j low, j + 8 high    float16: 16 scales, 16 minima
    8-bit     16, signed                     the same
    bfloat16  32                             none
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from llvmlite import ir

from magnitude_kernels.cpu.compiled import address_of, compiled
from magnitude_kernels.cpu.emit import INT8, LANES, VECTOR, WIDE, Emitter, Value, caller, number, written
from magnitude_kernels.cpu.threads import take

OUTPUTS = 16
GROUP = 32
FOUR_BITS, EIGHT_BITS, BFLOAT16 = 4, 8, 16
TILE_ROWS = 6
# Blocks that a thread takes at once. A single row is multiplied by all of them together, since each sum has to wait
# for its last addition.
CHUNK = 4

_BYTES = {FOUR_BITS: 8, EIGHT_BITS: 16, BFLOAT16: 32}
_SCALE_BYTES = 2 * OUTPUTS * 2
_UNROLLED = 4


def _weights(e: Emitter, kind: int, address: Value, scales: Sequence[Value]) -> list[Value]:
    """Returns the weights of 16 outputs for one input."""
    b = e.builder
    if kind == BFLOAT16:
        return [e.widen_bfloat16(e.at(address, 2 * LANES * half)) for half in range(2)]
    codes_type = ir.VectorType(INT8, LANES)
    if kind == EIGHT_BITS:
        codes = [b.sext(e.load(e.at(address, LANES * half), codes_type), WIDE) for half in range(2)]
    else:
        pair = b.zext(e.load(address, codes_type), WIDE)
        codes = [b.and_(pair, e.integers(15)), b.lshr(pair, e.integers(4))]
    return [e.fma(b.sitofp(code, VECTOR), scales[half], scales[2 + half]) for half, code in enumerate(codes)]


def _tile(kind: int, rows: int, blocks: int) -> Callable[..., Any]:
    """Makes the product of `rows` rows and `blocks` blocks.

    Its arguments: codes, scales, x, bytes per row of x, out, bytes per row of out, inputs.
    """
    width = _BYTES[kind]

    def write(e: Emitter, *arguments: Value) -> None:
        codes, scales, x, x_row, out, out_row, inputs = arguments
        groups = e.builder.udiv(inputs, e.index(GROUP))

        def scales_of(n: int, first: Value) -> list[Value]:
            if kind == BFLOAT16:
                return []
            group = e.builder.udiv(first, e.index(GROUP))
            start = e.at(scales, e.times(groups, _SCALE_BYTES * n), e.times(group, _SCALE_BYTES))
            return [e.widen_half(e.at(start, 2 * LANES * part)) for part in range(4)]

        def group_of(first: Value, sums: list[Value]) -> Sequence[Value]:
            found = [scales_of(n, first) for n in range(blocks)]

            def some(at: Value, values: list[Value]) -> Sequence[Value]:
                values = list(values)
                for step in range(_UNROLLED):
                    place = e.at(first, at, step)
                    weights: list[Value] = []
                    for n in range(blocks):
                        start = e.at(codes, e.times(inputs, width * n), e.times(place, width))
                        weights += _weights(e, kind, start, found[n])
                    for row in range(rows):
                        factor = e.spread_from(e.at(x, e.times(x_row, row), e.times(place, 4)))
                        for n, weight in enumerate(weights):
                            index = row * len(weights) + n
                            values[index] = e.fma(weight, factor, values[index])
                return values

            return e.loop(e.index(GROUP), _UNROLLED, sums, some)

        sums = e.loop(inputs, GROUP, [e.number(0.0)] * (rows * blocks * 2), group_of)
        for row in range(rows):
            for n in range(2 * blocks):
                e.store(sums[row * 2 * blocks + n], e.at(out, e.times(out_row, row), 4 * LANES * n))

    return written("aaaaaaa", write)


@lru_cache
def tiles(kind: int) -> int:
    """Returns the address of the product for one kind of matrix, which is compiled at the first call.

    Its arguments: first block, blocks, rows, then those of `_tile`, for block 0 and the first row.
    """
    width = _BYTES[kind]
    single, one, two, three = _tile(kind, 1, CHUNK), _tile(kind, 1, 1), _tile(kind, 2, 1), _tile(kind, 3, 1)
    four, five, six = _tile(kind, 4, 1), _tile(kind, 5, 1), _tile(kind, 6, 1)

    def multiply_tiles(
        first: int, blocks: int, rows: int,
        codes: int, scales: int, x: int, x_row: int, out: int, out_row: int, inputs: int,
    ) -> None:  # fmt: skip
        if rows == 1 and blocks == CHUNK:
            codes += first * inputs * width
            scales += first * (inputs // GROUP * _SCALE_BYTES)
            single(codes, scales, x, x_row, out + first * OUTPUTS * 4, out_row, inputs)
            return
        parts = (rows + TILE_ROWS - 1) // TILE_ROWS
        size = (rows + parts - 1) // parts
        for row in range(0, rows, size):
            count, x_here = min(size, rows - row), x + row * x_row
            for block in range(first, first + blocks):
                code, scale = codes + block * inputs * width, scales + block * (inputs // GROUP * _SCALE_BYTES)
                place = out + row * out_row + block * OUTPUTS * 4
                if count == 6:
                    six(code, scale, x_here, x_row, place, out_row, inputs)
                elif count == 5:
                    five(code, scale, x_here, x_row, place, out_row, inputs)
                elif count == 4:
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
def multiply_blocks(
    matrix: int, first: int, blocks: int, rows: int, x: int, x_row: int, out: int, out_row: int, inputs: int
) -> None:
    """Multiplies `rows` rows by `blocks` blocks of a matrix from block `first` on.

    `matrix` is the address of four int64: the address of the product for its kind (`tiles`), those of codes and scales,
    and blocks; `out` is the place of block 0.
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
