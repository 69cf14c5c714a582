"""One step of a packed decoder: what each thread does, phase by phase, for all layers.

    norm → q k v → rotary and cache → attention → merge → out, added → norm → gate and up → down, added

Threads share out the work of a phase by a counter and meet behind it. All sums are taken in fixed orders, so neither
the number of threads nor the rows that are computed together change a bit of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from magnitude_kernels.cpu import attend, rows
from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.product import CHUNK, OUTPUTS, multiply, multiply_blocks
from magnitude_kernels.cpu.threads import meet, take

# The matrices of a layer in the table of weights; the head is the first of the row behind the last layer.
Q, K, V, OUT, GATE, UP, DOWN = range(7)
MATRICES = 7
# Counters of a layer: one per matrix that is shared out by itself, and attention's.
COUNTERS = 8
_ATTENTION = 7
# Most rows that attend together: what is laid out of a block serves all of them.
TILE = 32
# Up to so many rows, the parts of a row's context go to several threads.
SPLIT_ROWS = 16

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


class Model(NamedTuple):
    """What stays the same from step to step.

    Attributes:
        weights: int64 [layers + 1, 7, 4]: kind, address of codes, address of scales, blocks of 16 outputs.
        norms: float32 [2 * layers + 1, hidden]: before attention and before the gate of each layer, and the last.
        cosine, sine: float32 [context, head_dim]; the first half of the sines negated.
        epsilon: of the norms.
        heads, kv_heads, head_dim, hidden, ffn: sizes.
    """

    weights: Indices
    norms: Floats
    cosine: Floats
    sine: Floats
    epsilon: float
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    ffn: int


class Step(NamedTuple):
    """What is computed.

    Attributes:
        layers: int64, the layers in order.
        keys, values: int64 [layers], addresses of slot 0 in each layer's cache, bfloat16 [slots, kv_heads, head_dim].
        h: float32 [rows, hidden], the embedded tokens; overwritten.
        positions, slots: int64 [rows].
        sequence_slots: int64, the slots of all sequences' keys, position by position.
        tiles: int64 [tiles, 5]: first row, rows, where the sequence's slots begin, how many there are, greatest
            position; rows that attend together.
        own: int64 [rows, 2]: the position from which a node of a draft tree has slots of its own, and where they
            begin in `sequence_slots`; the position is past everything for other rows.
        wanted: int64, the rows whose logits are needed.
    """

    layers: Indices
    keys: Indices
    values: Indices
    h: Floats
    positions: Indices
    slots: Indices
    sequence_slots: Indices
    tiles: Indices
    own: Indices
    wanted: Indices


class Space(NamedTuple):
    """Memory to work in.

    Attributes:
        counters: int64 [1 + (layers + 1) * COUNTERS], zero before a step.
        x: float32 [rows, widest input]: what is multiplied next.
        y: float32 [rows, widest output]: q, k and v; gate, up and what they gave.
        states: float32 [rows, parts, heads, STATE + head_dim]; one part where rows are many.
        blocks: float32 [threads, 2, BLOCK * head_dim]: a block's keys and values, laid out.
        totals: float32 [threads, 2, TILE, heads per key head, STATE + head_dim].
        scores: float32 [threads, 3 * BLOCK].
        padded: int64 [threads, BLOCK].
        hidden: float32 [wanted, hidden].
        logits: float32 [wanted, vocabulary rounded up to whole blocks].
    """

    counters: Indices
    x: Floats
    y: Floats
    states: Floats
    blocks: Floats
    totals: Floats
    scores: Floats
    padded: Indices
    hidden: Floats
    logits: Floats


@compiled
def run_step(model: Any, step: Any, space: Any, thread: int, threads: int) -> None:
    """Computes a step together with `threads - 1` others: fills the cache, `hidden` and `logits`."""
    count = step.h.shape[0]
    gathering = space.counters.ctypes.data
    for n in range(step.layers.shape[0]):
        layer = step.layers[n]
        counters = gathering + (1 + n * COUNTERS) * 8
        _norms(model, step.h, 2 * layer, space.x, thread, threads)
        meet(gathering, threads)
        _queries(model, layer, count, space, counters)
        meet(gathering, threads)
        _place(model, step, layer, space, thread, threads)
        meet(gathering, threads)
        _attend(model, step, layer, space, counters + _ATTENTION * 8, thread)
        meet(gathering, threads)
        if space.states.shape[1] > 1:
            _join(model, step, space, thread, threads)
            meet(gathering, threads)
        width = model.heads * model.head_dim
        _multiply(model.weights[layer, OUT], count, space.x, space.y, width, counters + OUT * 8)
        meet(gathering, threads)
        _add(step.h, space.y, thread, threads)
        _norms(model, step.h, 2 * layer + 1, space.x, thread, threads)
        meet(gathering, threads)
        _gated(model, layer, count, space, counters + GATE * 8)
        meet(gathering, threads)
        gated = space.y[:, 2 * model.weights[layer, GATE, 3] * OUTPUTS :]
        _multiply(model.weights[layer, DOWN], count, gated, space.x, model.ffn, counters + DOWN * 8)
        meet(gathering, threads)
        _add(step.h, space.x, thread, threads)
    if step.wanted.shape[0]:
        _finish(model, step, space, thread, threads)


@compiled
def _norms(model: Any, h: Any, which: int, out: Any, thread: int, threads: int) -> None:
    for row in range(thread, h.shape[0], threads):
        rows.norm(h[row], model.norms[which], model.epsilon, out[row])


@compiled
def _add(h: Any, x: Any, thread: int, threads: int) -> None:
    for row in range(thread, h.shape[0], threads):
        rows.add(h[row], x[row])


@compiled
def _multiply(matrix: Any, count: int, x: Any, out: Any, inputs: int, counter: int) -> None:
    multiply(matrix, count, x.ctypes.data, x.strides[0], out.ctypes.data, out.strides[0], inputs, counter)


@compiled
def _queries(model: Any, layer: int, count: int, space: Any, counters: int) -> None:
    start = 0
    for which in (Q, K, V):
        matrix = model.weights[layer, which]
        _multiply(matrix, count, space.x, space.y[:, start:], model.hidden, counters + which * 8)
        start += matrix[3] * OUTPUTS


@compiled
def _place(model: Any, step: Any, layer: int, space: Any, thread: int, threads: int) -> None:
    """Turns queries and keys by their positions, scales the queries, writes keys and values to the cache."""
    size, width = model.head_dim, model.kv_heads * model.head_dim
    first_key = model.weights[layer, Q, 3] * OUTPUTS
    first_value = first_key + model.weights[layer, K, 3] * OUTPUTS
    scale = np.float32(1.0) / np.sqrt(np.float32(size))
    for row in range(thread, step.h.shape[0], threads):
        y, cosine, sine = space.y[row], model.cosine[step.positions[row]], model.sine[step.positions[row]]
        for head in range(model.heads):
            rows.turn(y[head * size :], cosine, sine, scale)
        for head in range(model.kv_heads):
            rows.turn(y[first_key + head * size :], cosine, sine, np.float32(1.0))
        offset = step.slots[row] * width * 2
        rows.narrow(y[first_key:].ctypes.data, step.keys[layer] + offset, width)
        rows.narrow(y[first_value:].ctypes.data, step.values[layer] + offset, width)


@compiled
def _attend(model: Any, step: Any, layer: int, space: Any, counter: int, thread: int) -> None:
    """Attends tile by tile and key head by key head; where rows are few, part by part too."""
    split = space.states.shape[1] > 1
    item, at = take(counter, 1), 0
    for tile in range(step.tiles.shape[0]):
        parts = step.tiles[tile, 4] // attend.PART + 1
        here = model.kv_heads * (parts if split else 1)
        while item < at + here:
            head, part = (item - at) % model.kv_heads, (item - at) // model.kv_heads
            if split:
                _part(model, step, layer, space, tile, head, part, thread)
                _keep(model, step, space, tile, head, part, thread)
            else:
                _whole(model, step, layer, space, tile, head, thread)
            item = take(counter, 1)
        at += here


@compiled
def _whole(model: Any, step: Any, layer: int, space: Any, tile: int, head: int, thread: int) -> None:
    """Attends over a tile's whole context, for the queries of one key head."""
    group, size = model.heads // model.kv_heads, model.head_dim
    first, count, last = step.tiles[tile, 0], step.tiles[tile, 1], step.tiles[tile, 4]
    states, totals = space.totals[thread, 0], space.totals[thread, 1]
    totals[:count] = 0
    totals[:count, :, 0] = -np.inf
    for part in range(last // attend.PART + 1):
        _part(model, step, layer, space, tile, head, part, thread)
        for row in range(count):
            if step.positions[first + row] >= part * attend.PART:
                for n in range(group):
                    attend.merge(totals[row, n].ctypes.data, states[row, n].ctypes.data, size)
    for row in range(count):
        for n in range(group):
            out = space.x[first + row, (head * group + n) * size :]
            attend.finish(totals[row, n].ctypes.data, out.ctypes.data, size)


@compiled
def _keep(model: Any, step: Any, space: Any, tile: int, head: int, part: int, thread: int) -> None:
    """Keeps the states of a part until all parts are there."""
    group, first = model.heads // model.kv_heads, step.tiles[tile, 0]
    for row in range(step.tiles[tile, 1]):
        if step.positions[first + row] >= part * attend.PART:
            space.states[first + row, part, head * group : (head + 1) * group] = space.totals[thread, 0, row]


@compiled
def _join(model: Any, step: Any, space: Any, thread: int, threads: int) -> None:
    """Merges the parts of each query in their order."""
    size, total = model.head_dim, space.totals[thread, 1, 0, 0]
    for item in range(thread, step.h.shape[0] * model.heads, threads):
        row, head = item // model.heads, item % model.heads
        total[:] = 0
        total[0] = -np.inf
        for part in range(step.positions[row] // attend.PART + 1):
            attend.merge(total.ctypes.data, space.states[row, part, head].ctypes.data, size)
        attend.finish(total.ctypes.data, space.x[row, head * size :].ctypes.data, size)


@compiled
def _part(model: Any, step: Any, layer: int, space: Any, tile: int, head: int, part: int, thread: int) -> None:
    """Fills the states of a tile's rows with one part of their context, for the queries of one key head."""
    first, count, begin = step.tiles[tile, 0], step.tiles[tile, 1], step.tiles[tile, 2]
    known, last = step.tiles[tile, 3], step.tiles[tile, 4]
    size, group = model.head_dim, model.heads // model.kv_heads
    row_bytes, state_bytes = model.kv_heads * size * 2, group * (attend.STATE + size) * 4
    # What is called for every block gets numbers only: an array is many of them.
    positions, own, slots = step.positions, step.own, step.sequence_slots.ctypes.data
    keys, values = step.keys[layer] + head * size * 2, step.values[layer] + head * size * 2
    turned, padded = space.blocks[thread].ctypes.data, space.padded[thread].ctypes.data
    wide, scores = turned + attend.BLOCK * size * 4, space.scores[thread].ctypes.data
    queries, query_row = space.y.ctypes.data + head * group * size * 4, space.y.strides[0]
    states = space.totals[thread, 0]
    states[:count] = 0
    states[:count, :, 0] = -np.inf
    state = states.ctypes.data
    for start in range(part * attend.PART, min((part + 1) * attend.PART, last + 1), attend.BLOCK):
        laid = False
        for row in range(first, first + count):
            seen = min(attend.BLOCK, positions[row] + 1 - start)
            if seen <= 0:
                continue
            if start >= own[row, 0]:
                mine = slots + (own[row, 1] + start - own[row, 0]) * 8
                attend.lay(keys, values, mine, seen, row_bytes, size, turned, wide, padded)
                laid = False
            elif not laid:
                held = min(attend.BLOCK, known - start)
                attend.lay(keys, values, slots + (begin + start) * 8, held, row_bytes, size, turned, wide, padded)
                laid = True
            query, into = queries + row * query_row, state + (row - first) * state_bytes
            attend.attend_block(query, size * 4, group, seen, size, turned, wide, into, scores)


@compiled
def _gated(model: Any, layer: int, count: int, space: Any, counter: int) -> None:
    """Multiplies by gate and up, and gates what both gave, some blocks at a time."""
    gates, ups, inputs = model.weights[layer, GATE], model.weights[layer, UP], model.hidden
    width = gates[3] * OUTPUTS * 4
    x, x_row, y, y_row = space.x.ctypes.data, space.x.strides[0], space.y.ctypes.data, space.y.strides[0]
    while True:
        first = take(counter, CHUNK)
        if first >= gates[3]:
            return
        blocks = min(CHUNK, gates[3] - first)
        multiply_blocks(gates, first, blocks, count, x, x_row, y, y_row, inputs)
        multiply_blocks(ups, first, blocks, count, x, x_row, y + width, y_row, inputs)
        for row in range(count):
            start = y + row * y_row + first * OUTPUTS * 4
            rows.gate(start, start + width, start + 2 * width, blocks * OUTPUTS)


@compiled
def _finish(model: Any, step: Any, space: Any, thread: int, threads: int) -> None:
    """Computes the logits of the wanted rows."""
    gathering, last = space.counters.ctypes.data, model.norms.shape[0] - 1
    meet(gathering, threads)
    for n in range(thread, step.wanted.shape[0], threads):
        rows.norm(step.h[step.wanted[n]], model.norms[last], model.epsilon, space.hidden[n])
    meet(gathering, threads)
    counter = gathering + (1 + step.layers.shape[0] * COUNTERS) * 8
    head = model.weights[model.weights.shape[0] - 1, 0]
    _multiply(head, step.wanted.shape[0], space.hidden, space.logits, model.hidden, counter)
