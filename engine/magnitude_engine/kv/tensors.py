"""Carries out the page operations of the cache manager on the cache's tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from magnitude_engine.kv.pool import PageOp


def apply_page_ops(ops: Sequence[PageOp], tensors: Iterable[torch.Tensor]) -> None:
    """Copies and zeroes whole pages, in order; each tensor is [pages, ...] and is changed in place."""
    runs = _zero_runs(ops)
    for tensor in tensors:
        for run in runs:
            if isinstance(run, PageOp):
                tensor[run.target].copy_(tensor[run.source])
            else:
                tensor.index_fill_(0, torch.tensor(run, device=tensor.device), 0)


def _zero_runs(ops: Sequence[PageOp]) -> list[PageOp | list[int]]:
    """Returns the operations with neighbouring zeroings joined into one list of pages."""
    joined: list[PageOp | list[int]] = []
    for op in ops:
        if op.source is not None:
            joined.append(op)
        elif joined and isinstance(joined[-1], list):
            joined[-1].append(op.target)
        else:
            joined.append([op.target])
    return joined
