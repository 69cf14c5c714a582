"""What a step reads and writes, as arrays for those who prepare it and as addresses for compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

# The matrices of a layer in the table of weights; the head is the first of the row behind the last layer.
Q, K, V, OUT, GATE, UP, DOWN = range(7)
MATRICES = 7
# Numbers of a matrix, and their bytes.
MATRIX_NUMBERS = 5
MATRIX_BYTES = 8 * MATRIX_NUMBERS
# Counters of a layer: one per matrix that is shared out by itself, and attention's.
COUNTERS = 8
SPLIT_COUNTER = 7
# Most rows that attend together: what is laid out of a block serves all of them.
TILE = 64
# Up to so many rows, the parts of a row's context go to several threads.
SPLIT_ROWS = 16
# From so many parts on a thread takes all key heads of one at a time.
MANY_PARTS = 6

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


class Model(NamedTuple):
    """What stays the same from step to step.

    Attributes:
        weights: int64 [layers + 1, 7, 5]: address of the product (`product.tiles`), of codes, of scales, blocks of 16
            outputs, and whether it takes coded rows.
        norms: float32 [2 * layers + 1, hidden]: before attention and before the gate of each layer, and the last.
        cosine, sine: float32 [context, head_dim]; the first half of the sines negated.
        epsilon: of the norms.
        heads, kv_heads, ffn: sizes.
    """

    weights: Indices
    norms: Floats
    cosine: Floats
    sine: Floats
    epsilon: float
    heads: int
    kv_heads: int
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
        own: int64 [rows, 2]: the position from which a node of a draft tree has slots of its own, a multiple of a
            block, and where they begin in `sequence_slots`; the position is past everything for other rows.
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
        coded: bytes [rows, groups of the widest input, CODED_GROUP]: the same as `rows.code` writes it.
        y: float32 [rows, widest output]: q, k and v; gate, up and what they gave.
        states: float32 [rows, parts, heads, STATE + head_dim]; one part where rows are many.
        blocks: float32 [threads, BLOCK * (head_dim + 2)]: a block that is laid out (`lay`).
        totals: float32 [threads, 2, TILE, heads per key head, STATE + head_dim].
        scores: float32 [threads, 3 * BLOCK].
        padded: int64 [threads, 8].
        hidden: float32 [wanted, hidden].
        logits: float32 [wanted, vocabulary rounded up to whole blocks].
    """

    counters: Indices
    x: Floats
    coded: Bytes
    y: Floats
    states: Floats
    blocks: Floats
    totals: Floats
    scores: Floats
    padded: Indices
    hidden: Floats
    logits: Floats


class Frame(NamedTuple):
    """The same as sizes, addresses, and bytes between rows (`…_row`); `size` is that of a head."""

    layers: int
    rows: int
    wanted: int
    tiles: int
    parts: int
    heads: int
    kv_heads: int
    size: int
    hidden: int
    ffn: int
    weights: int
    head: int
    norms: int
    last_norm: int
    cosine: int
    sine: int
    chosen: int
    keys: int
    values: int
    h: int
    positions: int
    slots: int
    sequence_slots: int
    tile: int
    own: int
    wanted_rows: int
    counters: int
    x: int
    x_row: int
    coded: int
    coded_row: int
    y: int
    y_row: int
    states: int
    state_row: int
    blocks: int
    totals: int
    total_row: int
    scores: int
    padded: int
    last_hidden: int
    logits: int
    logits_row: int
    epsilon: float


# A record is one pointer to compiled code, where tuples of arrays are hundreds of values.
_RECORD = np.dtype([(name, np.float32 if name == "epsilon" else np.int64) for name in Frame._fields], align=True)


def empty() -> npt.NDArray[Any]:
    """Returns what `forward.work` takes, for `fill`."""
    return np.zeros(1, _RECORD)


def fill(frames: npt.NDArray[Any], model: Model, step: Step, space: Space) -> None:
    """Makes a step the next one to be computed; its arrays have to outlive that.

    Raises:
        ValueError: an array is not laid out row after row.
    """
    arrays = [*_arrays(model), *_arrays(step), *_arrays(space)]
    scattered = [name for name, array in arrays if not array.flags.c_contiguous]
    if scattered:
        raise ValueError(f"{scattered[0]} must be contiguous")
    at = {name: array.ctypes.data for name, array in arrays}
    made = Frame(
        layers=len(step.layers),
        rows=step.h.shape[0],
        wanted=len(step.wanted),
        tiles=len(step.tiles),
        parts=space.states.shape[1],
        heads=model.heads,
        kv_heads=model.kv_heads,
        size=model.cosine.shape[1],
        hidden=step.h.shape[1],
        ffn=model.ffn,
        weights=at["weights"],
        head=model.weights[-1].ctypes.data,
        norms=at["norms"],
        last_norm=model.norms[-1].ctypes.data,
        cosine=at["cosine"],
        sine=at["sine"],
        chosen=at["layers"],
        keys=at["keys"],
        values=at["values"],
        h=at["h"],
        positions=at["positions"],
        slots=at["slots"],
        sequence_slots=at["sequence_slots"],
        tile=at["tiles"],
        own=at["own"],
        wanted_rows=at["wanted"],
        counters=at["counters"],
        x=at["x"],
        x_row=space.x.strides[0],
        coded=at["coded"],
        coded_row=space.coded.strides[0],
        y=at["y"],
        y_row=space.y.strides[0],
        states=at["states"],
        state_row=space.states.strides[0],
        blocks=at["blocks"],
        totals=at["totals"],
        total_row=space.totals.strides[0],
        scores=at["scores"],
        padded=at["padded"],
        last_hidden=at["hidden"],
        logits=at["logits"],
        logits_row=space.logits.strides[0],
        epsilon=model.epsilon,
    )
    frames[0] = made


def _arrays(values: Model | Step | Space) -> list[tuple[str, npt.NDArray[Any]]]:
    return [(name, value) for name, value in values._asdict().items() if isinstance(value, np.ndarray)]
