"""Chooses for each operation between its Triton kernel and its plain torch reference.

A kernel runs where the tensors lie on a GPU that Triton has a driver for; everything else takes the reference.
`OPERATIONS` names every operation that has a kernel: tests and measurements go through it.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from magnitude_kernels.sample import reference as sample_reference
from magnitude_kernels.sample.reference import Sampled, SampleParams

OPERATIONS = ("sample",)


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
