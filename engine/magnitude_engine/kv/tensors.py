"""Carries out the operations of the cache manager on the cache's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from magnitude_engine.kv.blocks import BlockName
from magnitude_engine.kv.pool import CacheOp, Fill, PageOp, Payload, Spill
from magnitude_kernels import dispatch
from magnitude_kernels.compact.reference import lay_out
from magnitude_kernels.kv_copy.reference import ZEROS, PageMove, PageTensors


class SlotMove(NamedTuple):
    """What slot `source` (page * PAGE_TOKENS + offset) holds is to stand in slot `target`."""

    source: int
    target: int


def apply_ops(
    ops: Sequence[CacheOp], pages: torch.Tensor, words: PageTensors, keep: Callable[[BlockName, Payload], object]
) -> None:
    """Applies operations in order to `pages`, [2 * layers, pages, ...], in place; `keep` gets what is spilled.

    `words` are the same tensors as `dispatch.copy_pages` takes them.
    """
    for moves, run in groupby(ops, lambda op: isinstance(op, PageOp)):
        if moves:
            dispatch.copy_pages(words, [_move(op) for op in run if isinstance(op, PageOp)])
            continue
        for op in run:
            if isinstance(op, Spill):
                keep(op.name, read_page(pages, op.page))
            elif isinstance(op, Fill):
                write_page(pages, op.page, op.payload)


def read_page(pages: torch.Tensor, page: int) -> Payload:
    """Returns a copy of one page's keys and values of all layers, in main memory."""
    copy = pages[:, page].clone(memory_format=torch.contiguous_format).cpu()
    return copy.view(torch.uint8).numpy().tobytes()


def write_page(pages: torch.Tensor, page: int, payload: Payload) -> None:
    """Writes what `read_page` returned to a page."""
    target = pages[:, page]
    # Torch warns of memory that it could write to by mistake; it is only read here.
    target.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8).view(pages.dtype).view(target.shape))


def move_slots(pages: torch.Tensor, moves: Sequence[Sequence[SlotMove]]) -> None:
    """Moves the keys and values of single tokens of each sequence, in order, within `pages`, [2 * layers, pages, ...].

    Raises:
        ValueError: a slot is of two sequences, or is read after it was written.
    """
    dispatch.compact(pages, lay_out(moves, pages.device))


def _move(op: PageOp) -> PageMove:
    return PageMove(ZEROS if op.source is None else op.source, op.target)
