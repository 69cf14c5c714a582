"""Attention of sequences that share a prefix on a GPU, by the kernels of `paged_attention`.

The rows of a group are stacked into tiles that read the splits of the prefix, each row's sequence reads the splits
after it, and one sum over all splits in their order makes the result:

    split      0        1        2        3        4
               |--- group's tiles ---|-- each sequence --|
    prefix     |xxxxxxxxxxxxxxxxxxxxxxxxxx|

A split that is shared in part only is each sequence's own. Splits and sums are those of `paged_attention`, and so
is the tolerance. Sequences in runs of more than SHORT_ROWS rows read all they see themselves.
"""

from __future__ import annotations

import torch

from magnitude_kernels.paged_attention.launch import Partials, Reading, check, combine, of_run, read, workspace
from magnitude_kernels.paged_attention.ragged import Cache, Ragged
from magnitude_kernels.paged_attention.triton import ALL
from magnitude_kernels.shared_prefix.reference import Shared


def shared_prefix(queries: torch.Tensor, cache: Cache, ragged: Ragged, shared: Shared, scale: float) -> torch.Tensor:
    """Returns [rows, heads, head_dim] in the type of `queries`, on a GPU; see `reference.shared_prefix`."""
    out = torch.zeros(queries.shape, dtype=queries.dtype, device=queries.device)
    launch(queries, cache, ragged, shared, scale, out, workspace(queries, cache, ragged))
    return out


def launch(
    queries: torch.Tensor,
    cache: Cache,
    ragged: Ragged,
    shared: Shared,
    scale: float,
    out: torch.Tensor,
    partials: Partials,
) -> None:
    """Writes `out`, contiguous [rows, heads, head_dim]; padding is left as it is."""
    check(queries, cache, scale)
    if partials.values.shape[0]:
        read(queries, cache, _prefixes(ragged, shared, partials), scale, partials.values, partials.marks)
    sequence, row = 0, 0
    for run in ragged.runs:
        reading = of_run(ragged, run, sequence, row + run.rows)
        if reading.split:
            own = reading._replace(shared=shared.tokens[sequence : sequence + run.sequences])
            read(queries, cache, own, scale, partials.values, partials.marks)
            combine(reading, out, partials)
        else:
            read(queries, cache, reading, scale, out, None)
        sequence, row = sequence + run.sequences, row + run.rows


def _prefixes(ragged: Ragged, shared: Shared, partials: Partials) -> Reading:
    """Returns what the groups read; rows beyond the partials are in long runs."""
    return Reading(
        starts=shared.starts,
        counts=shared.counts,
        contexts=ragged.contexts,
        table=ragged.table,
        most_rows=shared.most_rows,
        view=ALL,
        split=True,
        shared=shared.tokens,
        leaders=shared.leaders,
        ancestors=None,
        limit=partials.values.shape[0],
    )
