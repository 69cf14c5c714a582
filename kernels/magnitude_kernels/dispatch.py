"""Chooses for each operation between its Triton kernel and its plain torch reference.

A kernel runs where the tensors lie on a GPU that Triton has a driver for; everything else takes the reference.
`OPERATIONS` names every operation that has a kernel: tests and measurements go through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from magnitude_kernels.kv_copy import reference as kv_copy_reference
from magnitude_kernels.kv_copy.reference import PageMove, PageTensors
from magnitude_kernels.kv_quantise import reference as kv_quantise_reference
from magnitude_kernels.kv_quantise.reference import Quantised
from magnitude_kernels.sample import reference as sample_reference
from magnitude_kernels.sample.reference import Sampled, SampleParams

OPERATIONS = ("sample", "kv_copy", "kv_quantise")


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
