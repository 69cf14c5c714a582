"""Chooses for each operation between its Triton kernel and its plain torch reference.

A kernel runs where the tensors lie on a GPU that Triton has a driver for; everything else takes the reference.
`OPERATIONS` names every operation that has a kernel: tests and measurements go through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from magnitude_kernels.compact import reference as compact_reference
from magnitude_kernels.compact.reference import SlotMoves
from magnitude_kernels.gemv import reference as gemv_reference
from magnitude_kernels.gemv.reference import Packed
from magnitude_kernels.kv_copy import reference as kv_copy_reference
from magnitude_kernels.kv_copy.reference import PageMove, PageTensors
from magnitude_kernels.kv_quantise import reference as kv_quantise_reference
from magnitude_kernels.kv_quantise.reference import Quantised
from magnitude_kernels.norm_rope_write import reference as norm_rope_write_reference
from magnitude_kernels.norm_rope_write.reference import HeadNorms, Places
from magnitude_kernels.paged_attention import reference as paged_attention_reference
from magnitude_kernels.paged_attention.ragged import Cache, Ragged
from magnitude_kernels.sample import reference as sample_reference
from magnitude_kernels.sample.reference import Sampled, SampleParams
from magnitude_kernels.shared_prefix import reference as shared_prefix_reference
from magnitude_kernels.shared_prefix.reference import Shared
from magnitude_kernels.tree_attention import reference as tree_attention_reference
from magnitude_kernels.verify import reference as verify_reference
from magnitude_kernels.verify.reference import Accepted, Trees

OPERATIONS = (
    "sample",
    "kv_copy",
    "kv_quantise",
    "norm_rope_write",
    "paged_attention",
    "shared_prefix",
    "tree_attention",
    "verify",
    "compact",
    "gemv",
)


# Triton exists for Linux only.
HAS_TRITON = find_spec("triton") is not None


def uses_kernel(tensor: torch.Tensor) -> bool:
    """True when operations on `tensor` run as Triton kernels."""
    return tensor.is_cuda and HAS_TRITON


def sample(logits: torch.Tensor, params: SampleParams) -> Sampled:
    """Draws one token per row of `logits` (float32 [rows, vocab]); see `sample.reference` for the definition."""
    if uses_kernel(logits):
        from magnitude_kernels.sample.triton import sample as sample_triton

        return sample_triton(logits, params)
    return sample_reference.sample(logits, params)


def copy_pages(cache: PageTensors, moves: Sequence[PageMove]) -> None:
    """Moves and zeroes pages of `cache`, one after the other; see `kv_copy.reference` for this and the next two."""
    if uses_kernel(cache.table):
        from magnitude_kernels.kv_copy.triton import copy

        copy(cache, moves)
    else:
        kv_copy_reference.copy(cache, moves)


def gather_pages(cache: PageTensors, pages: Sequence[int], staging: torch.Tensor) -> torch.Tensor:
    """Fills `staging` (from `cache.staging`) with `pages`; returns their checksums, int64 [pages]."""
    if uses_kernel(cache.table):
        from magnitude_kernels.kv_copy.triton import gather

        return gather(cache, pages, staging)
    return kv_copy_reference.gather(cache, pages, staging)


def scatter_pages(cache: PageTensors, pages: Sequence[int], staging: torch.Tensor) -> torch.Tensor:
    """Fills `pages` from `staging`; returns the checksums of what was written, int64 [pages]."""
    if uses_kernel(cache.table):
        from magnitude_kernels.kv_copy.triton import scatter

        return scatter(cache, pages, staging)
    return kv_copy_reference.scatter(cache, pages, staging)


def quantise(x: torch.Tensor) -> Quantised:
    """Rounds rows [..., head_dim] to int8 with a scale each; see `kv_quantise.reference` for the error bound."""
    if uses_kernel(x):
        from magnitude_kernels.kv_quantise.triton import quantise as quantise_triton

        return quantise_triton(x)
    return kv_quantise_reference.quantise(x)


def dequantise(rows: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Returns rounded rows in `dtype`, NaN throughout where a row was not finite."""
    if uses_kernel(rows.codes):
        from magnitude_kernels.kv_quantise.triton import dequantise as dequantise_triton

        return dequantise_triton(rows, dtype)
    return kv_quantise_reference.dequantise(rows, dtype)


def rope_write(
    qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor, norms: HeadNorms | None = None
) -> torch.Tensor:
    """Writes a step's keys and values into a layer's cache; returns the turned queries, [rows, heads, head_dim].

    See `norm_rope_write.reference` for this and for `add_norm`.
    """
    if uses_kernel(qkv):
        from magnitude_kernels.norm_rope_write.triton import rope_write as rope_write_triton

        return rope_write_triton(qkv, places, keys, values, norms)
    return norm_rope_write_reference.rope_write(qkv, places, keys, values, norms)


def add_norm(
    h: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> torch.Tensor:
    """Adds `x` to the residual stream `h` in place; returns its normalised rows in `dtype`."""
    if uses_kernel(h):
        from magnitude_kernels.norm_rope_write.triton import add_norm as add_norm_triton

        return add_norm_triton(h, x, weight, epsilon, dtype)
    return norm_rope_write_reference.add_norm(h, x, weight, epsilon, dtype)


def paged_attention(queries: torch.Tensor, cache: Cache, ragged: Ragged, scale: float) -> torch.Tensor:
    """Returns causal attention of `queries` [rows, heads, head_dim] over pages, in their shape and type."""
    if uses_kernel(queries):
        from magnitude_kernels.paged_attention.launch import paged_attention as paged_attention_triton

        return paged_attention_triton(queries, cache, ragged, scale)
    return paged_attention_reference.paged_attention(queries, cache, ragged, scale)


def shared_prefix(queries: torch.Tensor, cache: Cache, ragged: Ragged, shared: Shared, scale: float) -> torch.Tensor:
    """Returns what `paged_attention` does, and reads the keys that sequences share once for all of them."""
    if uses_kernel(queries):
        from magnitude_kernels.shared_prefix.triton import shared_prefix as shared_prefix_triton

        return shared_prefix_triton(queries, cache, ragged, shared, scale)
    return shared_prefix_reference.shared_prefix(queries, cache, ragged, shared, scale)


def tree_attention(
    queries: torch.Tensor, cache: Cache, ragged: Ragged, ancestors: torch.Tensor, scale: float
) -> torch.Tensor:
    """Returns attention of draft trees whose nodes see the context and the nodes in `ancestors` (int64 [rows])."""
    if uses_kernel(queries):
        from magnitude_kernels.tree_attention.triton import tree_attention as tree_attention_triton

        return tree_attention_triton(queries, cache, ragged, ancestors, scale)
    return tree_attention_reference.tree_attention(queries, cache, ragged, ancestors, scale)


def verify(trees: Trees, drawn: torch.Tensor) -> Accepted:
    """Returns how far the tokens drawn at each row (int64 [rows]) follow the step's drafts."""
    if uses_kernel(drawn):
        from magnitude_kernels.verify.triton import verify as verify_triton

        return verify_triton(trees, drawn)
    return verify_reference.verify(trees, drawn)


def compact(pages: torch.Tensor, moves: SlotMoves) -> None:
    """Moves single slots of every layer in place; see `compact.reference` for how moves come of accepted paths."""
    if uses_kernel(pages):
        from magnitude_kernels.compact.triton import compact as compact_triton

        compact_triton(pages, moves)
    else:
        compact_reference.compact(pages, moves)


def gemv(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Returns x @ weight.T for a few rows and packed weights, [rows, outputs] in the type of `x`."""
    if uses_kernel(x):
        from magnitude_kernels.gemv.triton import gemv as gemv_triton

        return gemv_triton(x, weight)
    return gemv_reference.gemv(x, weight)
