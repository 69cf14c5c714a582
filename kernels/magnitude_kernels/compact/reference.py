"""Moves single slots of the cache in plain torch: the definition of the operation, and its path on CPU.

A step writes the keys and values of a draft's nodes behind the known tokens, node after node. Of a tree only a path
is kept, and what comes next expects it without gaps:

    slots       known | node 0 | node 1 | node 2 | node 3        accepted path: nodes 1, 3
    afterwards  known | node 1 | node 3 | left over

The rows of one slot, in every layer's keys and values, go from `source` to `target`. Along a path nodes rise, so
a target never lies behind its source, and no slot is read after it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from magnitude_kernels.verify.reference import Accepted, Trees


class SlotMoves(NamedTuple):
    """Which slots become the content of which; int64 tensors on the cache's device.

    A slot is page * page_tokens + offset. Sequences share no slot, and no sequence reads a slot that it has written.

    Attributes:
        sources, targets: [sequences, width], in the order of the moves; a move of a slot to itself does nothing.
        counts: [sequences], how many of the row count.
    """

    sources: torch.Tensor
    targets: torch.Tensor
    counts: torch.Tensor


def lay_out(moves: Sequence[Sequence[tuple[int, int]]], device: torch.device) -> SlotMoves:
    """Returns the moves (source, target) of each sequence.

    Raises:
        ValueError: a slot is negative, is read after it was written, is written twice, or belongs to two sequences.
    """
    owners: dict[int, int] = {}
    for sequence, own in enumerate(moves):
        _check(own)
        for slot in (slot for move in own for slot in move):
            if owners.setdefault(slot, sequence) != sequence:
                raise ValueError(f"slot {slot} is moved for sequences {owners[slot]} and {sequence}: it belongs to one")
    width = max(map(len, moves), default=0)
    padded = [[*own, *[(0, 0)] * (width - len(own))] for own in moves]
    columns = torch.tensor(padded, dtype=torch.int64).view(len(moves), width, 2).movedim(2, 0).contiguous().to(device)
    counts = torch.tensor([len(own) for own in moves], dtype=torch.int64, device=device)
    return SlotMoves(columns[0], columns[1], counts)


def path_moves(slots: torch.Tensor, trees: Trees, accepted: Accepted) -> SlotMoves:
    """Returns the moves that bring accepted paths together, without waiting for the device.

    `slots` is int64 [rows], where the step put the keys and values of each row of `trees`.
    """
    first = trees.starts[:-1, None] + 1
    order = torch.arange(trees.most_nodes, device=slots.device)
    last = max(slots.numel() - 1, 0)
    # Behind a path stands NO_NODE, and a small tree ends before `most_nodes`: such moves do not count.
    return SlotMoves(slots[first + accepted.nodes], slots[(first + order).clamp(max=last)], accepted.counts)


def compact(pages: torch.Tensor, moves: SlotMoves) -> None:
    """Carries out `moves` in `pages`, contiguous [tensors, pages, page_tokens, ...].

    Raises:
        IndexError: a slot lies beyond the pages.
    """
    check_moves(pages, moves)
    slots = pages.flatten(1, 2)
    for sources, targets, count in zip(*(column.tolist() for column in moves), strict=True):
        for source, target in zip(sources[:count], targets[:count], strict=True):
            slots[:, target].copy_(slots[:, source])


def check_moves(pages: torch.Tensor, moves: SlotMoves) -> None:
    """Raises ValueError where the moves are not of the same sequences, or the pages have gaps."""
    if moves.sources.shape != moves.targets.shape or moves.counts.shape != moves.sources.shape[:1]:
        shapes = [tuple(column.shape) for column in moves]
        raise ValueError(f"sources, targets and counts must be of the same sequences, not {shapes}")
    if pages.dim() < 4 or not pages.is_contiguous():
        raise ValueError(
            f"compact needs one contiguous tensor [tensors, pages, page_tokens, ...], not {tuple(pages.shape)} "
            f"with strides {pages.stride()}"
        )


def _check(moves: Sequence[tuple[int, int]]) -> None:
    written: set[int] = set()
    for source, target in moves:
        if source < 0 or target < 0:
            raise ValueError(f"cannot move slot {source} to {target}: slots are not negative")
        if source in written or target in written:
            raise ValueError(f"cannot move slot {source} to {target}: one of them was written by an earlier move")
        written.add(target)
