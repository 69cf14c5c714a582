"""Launches the attention kernels: what is read for whom, in which sizes, and where splits leave what they found.

The grid depends on the shape of the tensors and on `Ragged.runs` only, all lengths are read on the device: a captured
graph serves any step that fits. `shared_prefix` and `tree_attention` launch the same kernels.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from magnitude_kernels.paged_attention.ragged import SHORT_ROWS, Cache, Ragged, Run, kind
from magnitude_kernels.paged_attention.triton import (
    ALL,
    CAUSAL,
    SPLIT_KEYS,
    SPLITS_PER_OCTAVE,
    TOLERANCE,
    attend_kernel,
    combine_kernel,
)

LARGEST_HEAD_DIM = 256


class Sizes(NamedTuple):
    """How much a program takes at once: tile rows, keys per block; and how it is run."""

    rows: int
    keys: int
    warps: int
    stages: int


class Partials(NamedTuple):
    """What splits found, per row, head and split: weighted values, float32 [rows, heads, splits, head_dim], and the
    largest score with the sum of weights, float32 [rows, heads, splits, 2]."""

    values: torch.Tensor
    marks: torch.Tensor


class Reading(NamedTuple):
    """What one launch reads for whom; tensors are slices that start at its first sequence.

    Attributes:
        table: int32 [sequences, pages] of all sequences that `leaders` may name.
        view: CAUSAL, TREE or ALL.
        split: whether the context is read in splits.
        shared: int32, how many first tokens are another launch's; those tokens alone where view is ALL.
        leaders: int32, which row of `table` is read; None for each its own.
        ancestors: int64 [rows], for TREE.
        limit: no row past it is written.
    """

    starts: torch.Tensor
    counts: torch.Tensor
    contexts: torch.Tensor
    table: torch.Tensor
    most_rows: int
    view: int
    split: bool
    shared: torch.Tensor | None
    leaders: torch.Tensor | None
    ancestors: torch.Tensor | None
    limit: int


def paged_attention(queries: torch.Tensor, cache: Cache, ragged: Ragged, scale: float) -> torch.Tensor:
    """Returns [rows, heads, head_dim] in the type of `queries`, on a GPU; see `reference.paged_attention`."""
    out = torch.zeros(queries.shape, dtype=queries.dtype, device=queries.device)
    launch(queries, cache, ragged, scale, out, workspace(queries, cache, ragged))
    return out


def workspace(queries: torch.Tensor, cache: Cache, ragged: Ragged) -> Partials:
    """Returns uninitialised partials for all rows up to the last short run."""
    rows, ends = 0, 0
    for run in ragged.runs:
        ends += run.rows
        rows = ends if run.most_rows <= SHORT_ROWS else rows
    splits = split_count(ragged.table.shape[1] * cache.keys.shape[1])
    size = (rows, queries.shape[1], splits)
    values = torch.empty((*size, queries.shape[2]), dtype=torch.float32, device=queries.device)
    return Partials(values, torch.empty((*size, 2), dtype=torch.float32, device=queries.device))


def launch(
    queries: torch.Tensor, cache: Cache, ragged: Ragged, scale: float, out: torch.Tensor, partials: Partials
) -> None:
    """Writes `out`, contiguous [rows, heads, head_dim]; padding is left as it is."""
    check(queries, cache, scale)
    sequence, row = 0, 0
    for run in ragged.runs:
        reading = of_run(ragged, run, sequence, row + run.rows)
        if reading.split:
            read(queries, cache, reading, scale, partials.values, partials.marks)
            combine(reading, out, partials)
        else:
            read(queries, cache, reading, scale, out, None)
        sequence, row = sequence + run.sequences, row + run.rows


def of_run(ragged: Ragged, run: Run, first: int, limit: int) -> Reading:
    """Returns what is read for a run whose first sequence is `first`, causally and by itself."""
    own = slice(first, first + run.sequences)
    return Reading(
        starts=ragged.starts[own],
        counts=ragged.counts[own],
        contexts=ragged.contexts[own],
        table=ragged.table[own],
        most_rows=run.most_rows,
        view=CAUSAL,
        split=run.most_rows <= SHORT_ROWS,
        shared=None,
        leaders=None,
        ancestors=None,
        limit=limit,
    )


def check(queries: torch.Tensor, cache: Cache, scale: float) -> None:
    """Raises ValueError for tensors that the kernels cannot read."""
    keys, values = cache
    if not scale > 0:
        raise ValueError(f"attention needs a scale above 0, not {scale}: it is usually head_dim ** -0.5")
    types = {queries.dtype, keys.dtype, values.dtype}
    if len(types) > 1 or queries.dtype not in TOLERANCE:
        raise ValueError(
            f"attention needs queries, keys and values of one type of {[*TOLERANCE]}, not {types}: "
            "convert the queries to the cache's type"
        )
    if any(tensor.stride(-1) != 1 for tensor in (queries, keys, values)) or keys.stride() != values.stride():
        raise ValueError("attention needs heads without gaps, and values laid out as the keys: make them contiguous")
    if queries.shape[1] % keys.shape[2] or not 0 < queries.shape[2] == keys.shape[3] <= LARGEST_HEAD_DIM:
        raise ValueError(
            f"attention of {tuple(queries.shape)} queries over {tuple(keys.shape)} keys: heads must be a multiple of "
            f"the key heads, and of the same size, at most {LARGEST_HEAD_DIM}"
        )


def split_count(context: int) -> int:
    """Returns how many splits hold `context` keys."""
    splits, first, size = 0, 0, SPLIT_KEYS
    while first < context:
        splits, first = splits + 1, first + size
        if splits % SPLITS_PER_OCTAVE == 0 and splits > SPLITS_PER_OCTAVE:
            size *= 2
    return splits


def block_dim(head_dim: int) -> int:
    """Returns the power of two that holds a head."""
    return max(16, 1 << (head_dim - 1).bit_length())


def sizes(head_dim: int, wide: bool, most_rows: int, group: int, tight: bool) -> Sizes:
    """Returns the largest sizes at which no target spills; found by compiling.

    `wide` is for float32; `tight` for devices whose products take their operands from registers.
    """
    least = max(16, 1 << (group - 1).bit_length())
    large = block_dim(head_dim) > 128
    if kind(most_rows) == 0:
        return Sizes(least, 16 if wide and large else 32, 4, 3 if wide else 2)
    if wide:
        return Sizes(max(least, 16 if large else 32), 16 if large else 32, 8 if block_dim(head_dim) <= 64 else 4, 2)
    if large:
        return Sizes(max(least, 64), 32, 8, 2)
    if kind(most_rows) == 1:
        return Sizes(max(least, 64), 32, 4, 2)
    return Sizes(max(least, 128), 32 if tight and block_dim(head_dim) > 64 else 64, 8, 2)


def group_rows(tight: bool) -> int:
    """Returns for how many rows the sizes of tiles over a shared prefix are chosen; found by compiling, too."""
    return SHORT_ROWS + 1 if tight else SHORT_ROWS


def is_tight(device: torch.device) -> bool:
    """True for AMD, and for NVIDIA before compute capability 9."""
    return device.type == "cuda" and (bool(torch.version.hip) or torch.cuda.get_device_capability(device)[0] < 9)


def precision() -> str:
    """Returns how float32 is multiplied: on NVIDIA as three TF32 products, since its plain form spills."""
    return "ieee" if torch.version.hip else "tf32x3"


def read(
    queries: torch.Tensor,
    cache: Cache,
    reading: Reading,
    scale: float,
    target: torch.Tensor,
    marks: torch.Tensor | None,
) -> None:
    """Runs the reading kernel into `target`: partials with their `marks`, or the result where `marks` is None."""
    _, heads, head_dim = queries.shape
    kv_heads = cache.keys.shape[2]
    group = heads // kv_heads
    tight = is_tight(queries.device)
    rows = reading.most_rows if reading.view != ALL else group_rows(tight)
    size = sizes(head_dim, queries.dtype == torch.float32, rows, group, tight)
    tiles = -(-reading.most_rows // (size.rows // group))
    grid = (reading.counts.numel() * tiles, kv_heads, target.shape[2] if marks is not None else 1)
    if 0 in grid:
        return
    attend_kernel[grid](
        queries,
        cache.keys,
        cache.values,
        reading.starts,
        reading.counts,
        reading.contexts,
        reading.shared,
        reading.leaders,
        reading.table,
        reading.ancestors,
        target,
        marks,
        scale * math.log2(math.e),
        reading.limit,
        tiles,
        *queries.stride()[:2],
        *cache.keys.stride()[:3],
        reading.table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=cache.keys.shape[1],
        VIEW=reading.view,
        # The interpreter multiplies bf16 wrongly.
        WIDE=triton.knobs.runtime.interpret and queries.dtype == torch.bfloat16,
        PRECISION=precision(),
        BLOCK_M=size.rows,
        BLOCK_N=size.keys,
        BLOCK_D=block_dim(head_dim),
        num_warps=size.warps,
        num_stages=size.stages,
    )


def combine(reading: Reading, out: torch.Tensor, partials: Partials) -> None:
    """Adds up the splits of each row of `reading` into `out`."""
    _, heads, splits, head_dim = partials.values.shape
    grid = (reading.counts.numel() * reading.most_rows, heads)
    if 0 in grid or splits == 0:
        return
    combine_kernel[grid](
        partials.values,
        partials.marks,
        out,
        reading.starts,
        reading.counts,
        reading.contexts,
        splits,
        reading.most_rows,
        HEAD_DIM=head_dim,
        VIEW=reading.view,
        BLOCK_D=block_dim(head_dim),
        num_warps=4,
    )
