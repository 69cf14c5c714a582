"""One step of a packed decoder: what each thread does, phase by phase, for all layers.

    norm → q k v → rotary and cache → attention → merge → out, added → norm → gate and up → down, added

Rows are coded (`rows.code`) before the products of matrices that take them so.

Threads share out the work of a phase by a counter and meet behind it. All sums are taken in fixed orders, so neither
the number of threads nor the rows that are computed together change a bit of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from magnitude_kernels.cpu import attend, lay, rows
from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.emit import LANES, number
from magnitude_kernels.cpu.frame import (
    COUNTERS,
    DOWN,
    GATE,
    MANY_PARTS,
    MATRICES,
    MATRIX_BYTES,
    OUT,
    SPLIT_COUNTER,
    UP,
    K,
    Q,
    V,
)
from magnitude_kernels.cpu.product import CHUNK, OUTPUTS, multiply, multiply_blocks, takes_codes
from magnitude_kernels.cpu.threads import asked, begin, done, end, meet, take


@compiled
def work(frames: Any, team: int, thread: int, threads: int) -> None:
    """Computes the step of `frames[0]` (a `frame.Frame`) with the others of a `threads.Team`, as its `work` does."""
    if thread == 0:
        begin(team, threads)
    # One call, since what is called is compiled into its caller.
    while thread == 0 or asked(team, thread):
        _step(frames[0], thread, threads)
        if thread == 0:
            end(team, threads)
            return
        done(team)


@compiled
def _step(f: Any, thread: int, threads: int) -> None:
    for n in range(f.layers):
        layer = number(f.chosen, n)
        counters = f.counters + (1 + n * COUNTERS) * 8
        _norms(f, 2 * layer, thread, threads)
        meet(f.counters, threads)
        _queries(f, layer, counters)
        meet(f.counters, threads)
        _place(f, layer, thread, threads)
        meet(f.counters, threads)
        _attend(f, layer, counters + SPLIT_COUNTER * 8, thread)
        meet(f.counters, threads)
        if f.parts > 1:
            _join(f, thread, threads)
            meet(f.counters, threads)
        _code(f, _matrix(f, layer, OUT), f.x, f.x_row, f.heads * f.size, thread, threads)
        _multiply(f, _matrix(f, layer, OUT), f.x, f.x_row, f.y, f.y_row, f.heads * f.size, counters + OUT * 8)
        meet(f.counters, threads)
        _add(f, f.y, f.y_row, thread, threads)
        _norms(f, 2 * layer + 1, thread, threads)
        meet(f.counters, threads)
        _gated(f, layer, counters + GATE * 8)
        meet(f.counters, threads)
        gated = f.y + 2 * _width(_matrix(f, layer, GATE)) * 4
        _code(f, _matrix(f, layer, DOWN), gated, f.y_row, f.ffn, thread, threads)
        _multiply(f, _matrix(f, layer, DOWN), gated, f.y_row, f.x, f.x_row, f.ffn, counters + DOWN * 8)
        meet(f.counters, threads)
        _add(f, f.x, f.x_row, thread, threads)
    if f.wanted > 0:
        _finish(f, thread, threads)


@compiled
def _matrix(f: Any, layer: int, which: int) -> int:
    return int(f.weights + (layer * MATRICES + which) * MATRIX_BYTES)


@compiled
def _width(matrix: int) -> int:
    """Returns the outputs of a matrix, filled up to whole blocks."""
    return number(matrix, 3) * OUTPUTS


@compiled
def _norms(f: Any, which: int, thread: int, threads: int) -> None:
    for row in range(thread, f.rows, threads):
        weight = f.norms + which * f.hidden * 4
        rows.norm(f.h + row * f.hidden * 4, weight, f.x + row * f.x_row, f.hidden, f.epsilon)
        rows.code(f.x + row * f.x_row, f.coded + row * f.coded_row, f.hidden)


@compiled
def _code(f: Any, matrix: int, x: int, x_row: int, inputs: int, thread: int, threads: int) -> None:
    """Codes all rows where the matrix that they are multiplied by takes them so."""
    if not takes_codes(matrix):
        return
    for row in range(thread, f.rows, threads):
        rows.code(x + row * x_row, f.coded + row * f.coded_row, inputs)
    meet(f.counters, threads)


@compiled
def _taken(f: Any, matrix: int, x: int, x_row: int) -> tuple[int, int]:
    """Returns the rows that a matrix takes, as an address and the bytes between two: `x`, or what was coded of it."""
    return (f.coded, f.coded_row) if takes_codes(matrix) else (x, x_row)


@compiled
def _multiply(f: Any, matrix: int, x: int, x_row: int, out: int, out_row: int, inputs: int, counter: int) -> None:
    x, x_row = _taken(f, matrix, x, x_row)
    multiply(matrix, f.rows, x, x_row, out, out_row, inputs, counter)


@compiled
def _add(f: Any, x: int, x_row: int, thread: int, threads: int) -> None:
    for row in range(thread, f.rows, threads):
        rows.add(f.h + row * f.hidden * 4, x + row * x_row, f.hidden)


@compiled
def _queries(f: Any, layer: int, counters: int) -> None:
    out = f.y
    for which in (Q, K, V):
        matrix = _matrix(f, layer, which)
        _multiply(f, matrix, f.x, f.x_row, out, f.y_row, f.hidden, counters + which * 8)
        out += _width(matrix) * 4


@compiled
def _place(f: Any, layer: int, thread: int, threads: int) -> None:
    """Turns queries and keys by their positions, scales and codes the queries, writes keys and values to the cache."""
    head_bytes, width = f.size * 4, f.kv_heads * f.size
    first_key = _width(_matrix(f, layer, Q)) * 4
    first_value = first_key + _width(_matrix(f, layer, K)) * 4
    scale = np.float32(np.log2(np.e)) / np.sqrt(np.float32(f.size))
    most_code = np.float32(min(32767, (1 << (31 - lay.CODE_BITS)) // f.size - 1))
    for row in range(thread, f.rows, threads):
        y, position = f.y + row * f.y_row, number(f.positions, row)
        cosine, sine = f.cosine + position * head_bytes, f.sine + position * head_bytes
        for head in range(f.heads):
            rows.turn(y + head * head_bytes, cosine, sine, f.size, scale)
            rows.code_head(y + head * head_bytes, f.size, most_code)
        for head in range(f.kv_heads):
            rows.turn(y + first_key + head * head_bytes, cosine, sine, f.size, np.float32(1.0))
        offset = number(f.slots, row) * width * 2
        rows.narrow(y + first_key, number(f.keys, layer) + offset, width)
        rows.narrow(y + first_value, number(f.values, layer) + offset, width)


@compiled
def _attend(f: Any, layer: int, counter: int, thread: int) -> None:
    """Attends tile by tile and key head by key head; where rows are few, part by part too.

    A thread takes all heads of a part, which lie together, once there are enough parts for all threads.
    """
    at, step = 0, f.kv_heads if f.parts >= MANY_PARTS else 1
    item = take(counter, step)
    for n in range(f.tiles):
        tile = f.tile + n * 5 * 8
        parts = number(tile, 4) // attend.PART + 1
        here = f.kv_heads * (parts if f.parts > 1 else 1)
        while item < at + here:
            for each in range(item - at, item - at + step):
                head, part = each % f.kv_heads, each // f.kv_heads
                _item(f, layer, tile, head, part if f.parts > 1 else -1, thread)
            item = take(counter, step)
        at += here


@compiled
def _item(f: Any, layer: int, tile: int, head: int, only: int, thread: int) -> None:
    """Attends for the queries of a key head: over one part of the context, which is kept, or (-1) over all of them."""
    first, count = number(tile, 0), number(tile, 1)
    group, state_bytes = f.heads // f.kv_heads, (attend.STATE + f.size) * 4
    states, row_bytes = f.totals + thread * f.total_row, group * state_bytes
    totals = states + f.total_row // 2
    if only >= 0:
        row_bytes = f.state_row
        states = f.states + first * row_bytes + (only * f.heads + head * group) * state_bytes
    for n in range(count * group if only < 0 else 0):
        attend.empty(totals + n * state_bytes, f.size)
    for part in range(max(only, 0), only + 1 if only >= 0 else number(tile, 4) // attend.PART + 1):
        _part(f, layer, tile, head, part, thread, states, row_bytes)
        for n in range(count * group if only < 0 else 0):
            if number(f.positions, first + n // group) >= part * attend.PART:
                attend.merge(totals + n * state_bytes, states + n * state_bytes, f.size)
    for n in range(count * group if only < 0 else 0):
        out = f.x + (first + n // group) * f.x_row + (head * group + n % group) * f.size * 4
        attend.finish(totals + n * state_bytes, out, f.size)


@compiled
def _join(f: Any, thread: int, threads: int) -> None:
    """Merges the parts of each query in their order."""
    state_bytes, total = (attend.STATE + f.size) * 4, f.totals + thread * f.total_row
    for item in range(thread, f.rows * f.heads, threads):
        row, head = item // f.heads, item % f.heads
        attend.empty(total, f.size)
        for part in range(number(f.positions, row) // attend.PART + 1):
            attend.merge(total, f.states + row * f.state_row + (part * f.heads + head) * state_bytes, f.size)
        attend.finish(total, f.x + row * f.x_row + head * f.size * 4, f.size)


@compiled
def _part(f: Any, layer: int, tile: int, head: int, part: int, thread: int, states: int, state_row: int) -> None:
    """Fills the states of a tile's rows with one part of their context, for the queries of one key head."""
    first, count, begin, known = number(tile, 0), number(tile, 1), number(tile, 2), number(tile, 3)
    size, group = f.size, f.heads // f.kv_heads
    row_bytes, state_bytes = f.kv_heads * size * 2, (attend.STATE + size) * 4
    keys, values = number(f.keys, layer) + head * size * 2, number(f.values, layer) + head * size * 2
    laid_out, padded = f.blocks + thread * lay.BLOCK * (size + 2) * 4, f.padded + thread * LANES * 8
    scores = f.scores + thread * 3 * lay.BLOCK * 4
    for row in range(count):
        for n in range(group):
            attend.empty(states + row * state_row + n * state_bytes, size)
    for start in range(part * attend.PART, min((part + 1) * attend.PART, number(tile, 4) + 1), lay.BLOCK):
        laid = False
        for row in range(first, first + count):
            seen = min(lay.BLOCK, number(f.positions, row) + 1 - start)
            if seen <= 0:
                continue
            mine = start >= number(f.own, 2 * row)
            if mine or not laid:
                at = number(f.own, 2 * row + 1) + start - number(f.own, 2 * row) if mine else begin + start
                held = seen if mine else min(lay.BLOCK, known - start)
                slots = f.sequence_slots + at * 8
                lay.lay(keys, values, slots, held, 0 if head else row_bytes, row_bytes, size, laid_out, padded)
                laid = not mine
            query, state = f.y + row * f.y_row + head * group * size * 4, states + (row - first) * state_row
            attend.attend_block(query, size * 4, group, seen, size, laid_out, state, scores)


@compiled
def _gated(f: Any, layer: int, counter: int) -> None:
    """Multiplies by gate and up, and gates what both gave, some blocks at a time."""
    gates, ups = _matrix(f, layer, GATE), _matrix(f, layer, UP)
    total, width = number(gates, 3), _width(gates) * 4
    while True:
        first = take(counter, CHUNK)
        if first >= total:
            return
        blocks = min(CHUNK, total - first)
        _multiply_blocks(f, gates, first, blocks, f.y)
        _multiply_blocks(f, ups, first, blocks, f.y + width)
        for row in range(f.rows):
            start = f.y + row * f.y_row + first * OUTPUTS * 4
            rows.gate(start, start + width, start + 2 * width, blocks * OUTPUTS)


@compiled
def _multiply_blocks(f: Any, matrix: int, first: int, blocks: int, out: int) -> None:
    x, x_row = _taken(f, matrix, f.x, f.x_row)
    multiply_blocks(matrix, first, blocks, f.rows, x, x_row, out, f.y_row, f.hidden)


@compiled
def _finish(f: Any, thread: int, threads: int) -> None:
    """Computes the logits of the wanted rows."""
    meet(f.counters, threads)
    hidden_row = f.hidden * 4
    for n in range(thread, f.wanted, threads):
        row = number(f.wanted_rows, n)
        rows.norm(f.h + row * hidden_row, f.last_norm, f.last_hidden + n * hidden_row, f.hidden, f.epsilon)
        rows.code(f.last_hidden + n * hidden_row, f.coded + n * f.coded_row, f.hidden)
    meet(f.counters, threads)
    counter = f.counters + (1 + f.layers * COUNTERS) * 8
    x, x_row = _taken(f, f.head, f.last_hidden, hidden_row)
    multiply(f.head, f.wanted, x, x_row, f.logits, f.logits_row, f.hidden, counter)
