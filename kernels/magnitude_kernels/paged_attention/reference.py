"""Causal attention over pages in plain torch: the definition of the operation, and its path on CPU.

For row i of a sequence, at position p, and query head h, whose key head is h // (heads / kv_heads):

    out = sum_j w_j v_j / sum_j w_j,   w_j = exp(scale * <q, k_j>),   j = 0 .. p

in float32 whatever the type of the tensors. A row depends on its own sequence alone.
"""

from __future__ import annotations

import torch

from magnitude_kernels.paged_attention.ragged import Cache, Ragged


def paged_attention(queries: torch.Tensor, cache: Cache, ragged: Ragged, scale: float) -> torch.Tensor:
    """Returns [rows, heads, head_dim] in the type of `queries` ([rows, heads, head_dim]); zero for padding."""
    out = torch.zeros_like(queries, memory_format=torch.contiguous_format)
    for index, (start, count, context) in enumerate(lengths(ragged)):
        keys, values = gather(cache, ragged.table[index], context)
        own = torch.arange(context - count, context, device=queries.device)
        visible = torch.arange(context, device=queries.device) <= own[:, None]
        out[start : start + count] = attend(queries[start : start + count], Cache(keys, values), visible, scale)
    return out


def lengths(ragged: Ragged) -> list[tuple[int, int, int]]:
    """Returns (first row, rows, context) per sequence."""
    columns = (ragged.starts.tolist(), ragged.counts.tolist(), ragged.contexts.tolist())
    return list(zip(*columns, strict=True))


def gather(cache: Cache, pages: torch.Tensor, context: int) -> Cache:
    """Returns the first `context` keys and values of a sequence, [context, kv_heads, head_dim] each."""
    used = pages[: -(-context // cache.keys.shape[1])].long()
    return Cache(cache.keys[used].flatten(0, 1)[:context], cache.values[used].flatten(0, 1)[:context])


def attend(queries: torch.Tensor, tokens: Cache, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns float32 [rows, heads, head_dim]; `visible` (bool [rows, context]) says which keys a row sees."""
    group = queries.shape[1] // tokens.keys.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, 1) for tensor in tokens)
    scores = torch.einsum("rhd,chd->hrc", queries.float(), keys) * scale
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hrc,chd->rhd", weights, values)
