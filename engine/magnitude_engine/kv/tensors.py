"""Carries out the operations of the cache manager on the cache's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from magnitude_engine.kv.blocks import BlockName
from magnitude_engine.kv.pool import CacheOp, Fill, PageOp, Payload, Spill


def apply_ops(ops: Sequence[CacheOp], pages: torch.Tensor, keep: Callable[[BlockName, Payload], object]) -> None:
    """Applies operations in order to `pages`, [2 * layers, pages, ...], in place; `keep` gets what is spilled."""
    for run in _zero_runs(ops):
        if isinstance(run, PageOp):
            pages[:, run.target].copy_(pages[:, run.source])
        elif isinstance(run, Spill):
            keep(run.name, read_page(pages, run.page))
        elif isinstance(run, Fill):
            write_page(pages, run.page, run.payload)
        else:
            pages.index_fill_(1, torch.tensor(run, device=pages.device), 0)


def read_page(pages: torch.Tensor, page: int) -> Payload:
    """Returns a copy of one page's keys and values of all layers, in main memory."""
    copy = pages[:, page].clone(memory_format=torch.contiguous_format).cpu()
    return copy.view(torch.uint8).numpy().tobytes()


def write_page(pages: torch.Tensor, page: int, payload: Payload) -> None:
    """Writes what `read_page` returned to a page."""
    target = pages[:, page]
    # Torch warns of memory that it could write to by mistake; it is only read here.
    target.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(pages.dtype).view(target.shape))


def _zero_runs(ops: Sequence[CacheOp]) -> list[CacheOp | list[int]]:
    """Returns the operations with neighbouring zeroings joined into one list of pages."""
    joined: list[CacheOp | list[int]] = []
    for op in ops:
        if not isinstance(op, PageOp) or op.source is not None:
            joined.append(op)
        elif joined and isinstance(joined[-1], list):
            joined[-1].append(op.target)
        else:
            joined.append([op.target])
    return joined
