"""Attention of draft trees in plain torch: the definition of the operation, and its path on CPU.

The rows of a sequence are the nodes of a tree, parents before children, and their keys are the last of its context, in
the order of the rows:

    keys      |------------- context before the tree -------------| node 0 | node 1 | node 2 |
    node 2    |  all                                              | where its bit is set | itself

Otherwise it is `paged_attention`. A chain, whose node i has the bits 0 .. i, is causal attention.
"""

from __future__ import annotations

import torch

from magnitude_kernels.paged_attention.ragged import Cache, Ragged
from magnitude_kernels.paged_attention.reference import attend, gather, lengths

MOST_NODES = 64


def tree_attention(
    queries: torch.Tensor, cache: Cache, ragged: Ragged, ancestors: torch.Tensor, scale: float
) -> torch.Tensor:
    """Returns [rows, heads, head_dim] in the type of `queries` ([rows, heads, head_dim]); zero for padding.

    `ancestors` is int64 [rows]: bit j of a row says that it sees node j of its tree. A node always sees itself, and
    bits past the tree mean nothing. Raises ValueError where a tree may have more than MOST_NODES nodes.
    """
    check_nodes(ragged)
    out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for index, (start, count, context) in enumerate(lengths(ragged)):
        tokens = gather(cache, ragged.table[index], context)
        nodes = torch.arange(count, device=queries.device)
        bits = ancestors[start : start + count, None] >> nodes
        drafts = (bits & 1).bool() | (nodes == nodes[:, None])
        before = torch.ones(count, context - count, dtype=torch.bool, device=queries.device)
        visible = torch.cat([before, drafts], 1)
        out[start : start + count] = attend(queries[start : start + count], tokens, visible, scale)
    return out


def check_nodes(ragged: Ragged) -> None:
    """Raises ValueError where a run admits trees that the bits of `ancestors` cannot name."""
    most = max((run.most_rows for run in ragged.runs), default=0)
    if most > MOST_NODES:
        raise ValueError(f"tree_attention takes trees of at most {MOST_NODES} nodes, not {most}: draft fewer")
