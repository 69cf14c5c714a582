"""The attention kernels: one reads keys and values for tiles of query rows, one adds up what its splits found.

A tile holds the query heads of one key head for some rows of one sequence, so that each key is read once for all of
them; row m of it is query row m // GROUP and query head m % GROUP. Keys go by in blocks from position 0, with the
running maximum and sum of a streaming softmax.

Sequences of few rows are read in splits, one program each, at fixed positions that widen with the context:

    position  0     256   512  ...  4096   4352  ...  8192     8704  ...
              |  0  |  1  |    ...  |  16  |     ...  |   32   |
              16 of 256 keys        16 of 256         16 of 512         16 of 1024 ...

and a second kernel adds the splits of each row in that order. Every block, split and sum has its place in the
sequence, whatever the batch, and keys past a row add exact zeros.

Scores, softmax and sums are float32. The second product takes the weights in the type of the values, as tensor cores
do: against the definition in float64 a result may be off by `TOLERANCE` times the same average of |v|.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2.0**-9, torch.bfloat16: 2.0**-7}
SPLIT_KEYS = 256
SPLITS_PER_OCTAVE = 16
# What a row sees of its context: keys up to its own position, or by its bits, or all.
CAUSAL, TREE, ALL = 0, 1, 2

_SPLIT_KEYS = tl.constexpr(SPLIT_KEYS)
_SPLITS_PER_OCTAVE = tl.constexpr(SPLITS_PER_OCTAVE)
_CAUSAL = tl.constexpr(CAUSAL)
_TREE = tl.constexpr(TREE)
_ALL = tl.constexpr(ALL)
_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _split(index):  # type: ignore[no-untyped-def]
    """Returns the first key of a split (one, or a block of them), and its number of keys."""
    octave = index // _SPLITS_PER_OCTAVE
    size = tl.full((), _SPLIT_KEYS, tl.int32) << tl.maximum(octave - 1, 0)
    return tl.where(octave > 0, size * _SPLITS_PER_OCTAVE, 0) + (index % _SPLITS_PER_OCTAVE) * size, size


@triton.jit  # type: ignore[untyped-decorator]
def _visible(keys, local, before, stop, bits, VIEW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns which of `keys` [N] the rows see whose place in their sequence is `local` [M]."""
    inside = (keys < stop)[None, :]
    if VIEW == _ALL:
        return inside & (local >= 0)[:, None]
    node = (keys - before)[None, :]
    if VIEW == _CAUSAL:
        return inside & (node <= local[:, None])
    shift = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
    return inside & ((node < 0) | (node == local[:, None]) | (((bits[:, None] >> shift) & 1) != 0))


@triton.jit  # type: ignore[untyped-decorator]
def _load(ptr, mask, PADDED: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns keys or values, zero where `mask` is False."""
    if PADDED or MASKED:
        loaded = tl.load(ptr, mask=mask, other=0.0)
    else:
        loaded = tl.load(ptr)
    return loaded.to(tl.float32) if WIDE else loaded


@triton.jit  # type: ignore[untyped-decorator]
def _advance(  # type: ignore[no-untyped-def]
    state,
    query,
    cache,
    first,
    stop,
    rows,
    scale,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    VIEW: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Returns the state (largest score, sum of weights, weighted values) after the blocks from `first` on."""
    largest, total, result = state
    keys_ptr, values_ptr, pages_ptr, page_stride, token_stride = cache
    local, before, bits = rows
    BLOCK_D: tl.constexpr = query.shape[1]
    dims = tl.arange(0, BLOCK_D)
    for block in range(BLOCKS):
        keys = first + block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = keys < stop
        if MASKED:
            page = tl.load(pages_ptr + keys // PAGE, mask=inside, other=0)
        else:
            page = tl.load(pages_ptr + keys // PAGE)
        slots = page.to(tl.int64) * page_stride + (keys % PAGE) * token_stride
        held = inside[None, :] & (dims < HEAD_DIM)[:, None]
        key = _load(keys_ptr + slots[None, :] + dims[:, None], held, HEAD_DIM < BLOCK_D, MASKED, WIDE)
        scores = tl.dot(query, key, input_precision=PRECISION)
        if MASKED:
            scores = tl.where(_visible(keys, local, before, stop, bits, VIEW), scores, -_INFINITY)
        peak = tl.maximum(largest, tl.max(scores, 1))
        # Rows that have seen nothing yet keep weights of zero.
        offset = tl.where(peak == -_INFINITY, 0.0, peak * scale)
        weights = tl.exp2(scores * scale - offset[:, None])
        decay = tl.exp2(largest * scale - offset)
        held = inside[:, None] & (dims < HEAD_DIM)[None, :]
        value = _load(values_ptr + slots[:, None] + dims[None, :], held, HEAD_DIM < BLOCK_D, MASKED, WIDE)
        result = tl.dot(weights.to(value.dtype), value, result * decay[:, None], input_precision=PRECISION)
        total = total * decay + tl.sum(weights, 1)
        largest = peak
    return largest, total, result


@triton.jit  # type: ignore[untyped-decorator]
def _reach(  # type: ignore[no-untyped-def]
    count,
    context,
    shared,
    tile_row,
    TILE: tl.constexpr,
    VIEW: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Returns the keys `first .. stop` that a program reads; all rows of its tile see those before `full`."""
    before = context - count
    stop = context
    full = before
    if VIEW == _CAUSAL:
        stop = tl.minimum(context, before + tile_row + TILE)
        full = before + tile_row + 1
    if VIEW == _ALL:
        stop = shared
        full = shared
    first = tl.full((), 0, tl.int32)
    if SPLIT:
        first, size = _split(tl.program_id(2))
        stop = tl.minimum(stop, first + size)
        if HAS_SHARED:
            # A split belongs to the group where all of it is shared.
            theirs = first + size <= shared
            stop = tl.where(theirs if VIEW == _ALL else theirs == 0, stop, first)
    stop = tl.where(tile_row < count, stop, first)
    return first, stop, tl.minimum(full, stop)


@triton.jit  # type: ignore[untyped-decorator]
def _queries(ptr, held, HEAD_DIM: tl.constexpr, WIDE: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the query heads at `ptr` [M], zero where not held."""
    dims = tl.arange(0, BLOCK_D)
    return _load(ptr[:, None] + dims[None, :], held[:, None] & (dims < HEAD_DIM)[None, :], True, True, WIDE)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query,
    cache,
    reach,
    rows,
    scale,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    VIEW: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Returns the state after the keys of `reach`, SPLIT_KEYS at a time, without masks where all rows see all."""
    first, stop, full = reach
    BLOCKS: tl.constexpr = _SPLIT_KEYS // BLOCK_N
    largest = tl.full((query.shape[0],), -_INFINITY, tl.float32)
    state = (largest, tl.zeros((query.shape[0],), tl.float32), tl.zeros(query.shape, tl.float32))
    while first + _SPLIT_KEYS <= full:
        state = _advance(
            state, query, cache, first, stop, rows, scale, HEAD_DIM, PAGE, VIEW, WIDE, PRECISION, BLOCK_N, BLOCKS, False
        )
        first += _SPLIT_KEYS
    while first < stop:
        state = _advance(
            state, query, cache, first, stop, rows, scale, HEAD_DIM, PAGE, VIEW, WIDE, PRECISION, BLOCK_N, BLOCKS, True
        )
        first += _SPLIT_KEYS
    return state


@triton.jit  # type: ignore[untyped-decorator]
def _store(state, target_ptr, marks_ptr, place, held, scale, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes a split's values with their marks, or the average where there are no marks, to `place` [M]."""
    largest, total, result = state
    dims = tl.arange(0, BLOCK_D)
    if marks_ptr is None:
        result = result / total[:, None]
    else:
        tl.store(marks_ptr + place * 2, largest * scale, mask=held)
        tl.store(marks_ptr + place * 2 + 1, total, mask=held)
    mask = held[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(target_ptr + place[:, None] * HEAD_DIM + dims[None, :], result.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def attend_kernel(  # type: ignore[no-untyped-def]
    queries_ptr,
    keys_ptr,
    values_ptr,
    starts_ptr,
    counts_ptr,
    contexts_ptr,
    shared_ptr,
    leaders_ptr,
    table_ptr,
    ancestors_ptr,
    target_ptr,
    marks_ptr,
    scale,
    limit,
    tiles,
    query_stride,
    query_head_stride,
    page_stride,
    token_stride,
    key_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    VIEW: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Reads for tile `program_id(0)`, key head `program_id(1)` and split `program_id(2)`; without marks, all keys.

    `scale` is that of the operation times log2(e), which turns exp into exp2. Later tiles see more keys and go first.
    """
    item = tl.program_id(0) // tiles
    tile_row = (tiles - 1 - tl.program_id(0) % tiles) * (BLOCK_M // GROUP)
    count = tl.load(counts_ptr + item)
    source = item if leaders_ptr is None else tl.load(leaders_ptr + item)
    shared = 0 if shared_ptr is None else tl.load(shared_ptr + source)
    context = tl.load(contexts_ptr + source)
    SPLIT: tl.constexpr = marks_ptr is not None
    HAS_SHARED: tl.constexpr = shared_ptr is not None
    reach = _reach(count, context, shared, tile_row, BLOCK_M // GROUP, VIEW, HAS_SHARED, SPLIT)
    # Nothing to read shows in the masks alone: a return before the loops makes the compiler spill.
    written = tl.where(reach[0] < reach[1], count, 0)
    local = tile_row + tl.arange(0, BLOCK_M) // GROUP
    head = tl.program_id(1) * GROUP + tl.arange(0, BLOCK_M) % GROUP
    row = (tl.load(starts_ptr + item) + local).to(tl.int64)
    held = (tl.arange(0, BLOCK_M) < BLOCK_M // GROUP * GROUP) & (local < written) & (row < limit)
    query = _queries(queries_ptr + row * query_stride + head * query_head_stride, held, HEAD_DIM, WIDE, BLOCK_D)
    bits = tl.load(ancestors_ptr + row, mask=held, other=0) if VIEW == _TREE else row
    heads = tl.program_id(1).to(tl.int64) * key_head_stride
    table_ptr += source.to(tl.int64) * table_stride
    cache = (keys_ptr + heads, values_ptr + heads, table_ptr, page_stride, token_stride)
    rows = (local, context - count, bits)
    state = _attend(query, cache, reach, rows, scale, HEAD_DIM, PAGE, VIEW, WIDE, PRECISION, BLOCK_N)
    place = (row * (tl.num_programs(1) * GROUP) + head) * tl.num_programs(2) + tl.program_id(2)
    _store(state, target_ptr, marks_ptr, place, held, scale, HEAD_DIM, BLOCK_D)


@triton.jit  # type: ignore[untyped-decorator]
def combine_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    marks_ptr,
    out_ptr,
    starts_ptr,
    counts_ptr,
    contexts_ptr,
    splits,
    most_rows,
    HEAD_DIM: tl.constexpr,
    VIEW: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds the splits of row `program_id(0)` of a run, at head `program_id(1)`, an octave at a time."""
    item = tl.program_id(0) // most_rows
    local = tl.program_id(0) % most_rows
    count = tl.load(counts_ptr + item)
    if local >= count:
        return
    stop = tl.load(contexts_ptr + item)
    if VIEW == _CAUSAL:
        stop = stop - count + local + 1
    place = (tl.load(starts_ptr + item) + local).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    largest = tl.full((), -_INFINITY, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    result = tl.zeros((BLOCK_D,), tl.float32)
    begin = tl.full((), 0, tl.int32)
    first, _ = _split(begin)
    while first < stop:
        index = begin + tl.arange(0, _SPLITS_PER_OCTAVE)
        inside = _split(index)[0] < stop
        part = place * splits + index
        found = tl.load(marks_ptr + part * 2, mask=inside, other=-_INFINITY)
        sums = tl.load(marks_ptr + part * 2 + 1, mask=inside, other=0.0)
        mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
        values = tl.load(values_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
        peak = tl.maximum(largest, tl.max(found, 0))
        weights = tl.exp2(found - peak)
        decay = tl.exp2(largest - peak)
        total = total * decay + tl.sum(weights * sums, 0)
        result = result * decay + tl.sum(weights[:, None] * values, 0)
        largest = peak
        begin += _SPLITS_PER_OCTAVE
        first, _ = _split(begin)
    tl.store(out_ptr + place * HEAD_DIM + dims, (result / total).to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)
