"""Attention of draft trees on a GPU: the kernels of `paged_attention` with the nodes' bits as mask.

The tolerance is that of `paged_attention.triton`. All trees are read in splits, whatever their size.
"""

from __future__ import annotations

import torch

from magnitude_kernels.paged_attention.launch import Partials, check, combine, of_run, read, workspace
from magnitude_kernels.paged_attention.ragged import Cache, Ragged
from magnitude_kernels.paged_attention.triton import TREE
from magnitude_kernels.tree_attention.reference import check_nodes


def tree_attention(
    queries: torch.Tensor, cache: Cache, ragged: Ragged, ancestors: torch.Tensor, scale: float
) -> torch.Tensor:
    """Returns [rows, heads, head_dim] in the type of `queries`, on a GPU; see `reference.tree_attention`."""
    out = torch.zeros(queries.shape, dtype=queries.dtype, device=queries.device)
    launch(queries, cache, ragged, ancestors, scale, out, workspace(queries, cache, ragged))
    return out


def launch(
    queries: torch.Tensor,
    cache: Cache,
    ragged: Ragged,
    ancestors: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    partials: Partials,
) -> None:
    """Writes `out`, contiguous [rows, heads, head_dim]; padding is left as it is."""
    check(queries, cache, scale)
    check_nodes(ragged)
    sequence, row = 0, 0
    for run in ragged.runs:
        reading = of_run(ragged, run, sequence, row + run.rows)._replace(view=TREE, ancestors=ancestors)
        read(queries, cache, reading, scale, partials.values, partials.marks)
        combine(reading, out, partials)
        sequence, row = sequence + run.sequences, row + run.rows
