"""The compaction kernel on a GPU: right to the bit, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from magnitude_kernels import dispatch
from magnitude_kernels.compact.reference import lay_out
from testkit.gpu import Case
from testkit.paging import PAGE_TOKENS, compacted, random_cache, raw


class Model(NamedTuple):
    """A cache's sizes; bfloat16."""

    name: str
    layers: int
    kv_heads: int
    head_dim: int


MODELS = (Model("SmolLM2", 30, 3, 64), Model("Llama 3 8B", 32, 8, 128))
SEQUENCES = (1, 8, 64)
# A path of eight nodes, the first at its place, in a tree of sixteen.
PATH = (0, 2, 3, 5, 8, 11, 13, 15)


def check(device: torch.device) -> list[str]:
    """Returns which moves leave other bytes than Python's."""
    wrong = []
    for heads, dtype in (((1, 2), torch.float32), ((3, 80), torch.bfloat16), ((33, 64), torch.float32)):
        cache = torch.stack(random_cache(6, 40, heads, dtype, seed=heads[1])).to(device)
        moves = [_path(sequence) for sequence in range(20)] + [[], [(639, 639), (620, 638), (630, 620)]]
        expected = compacted(cache, [move for own in moves for move in own])
        dispatch.compact(cache, lay_out(moves, device))
        if raw(tuple(cache)) != expected:
            wrong.append(f"moves in slots of {heads} {dtype}")
    return wrong


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the sizes to time; each slot that moves is read once and written once."""
    for model in MODELS:
        size = (max(SEQUENCES), PAGE_TOKENS, model.kv_heads, model.head_dim)
        cache = torch.zeros((2 * model.layers, *size), dtype=torch.bfloat16, device=device)
        for sequences in SEQUENCES:
            yield _case(f"{model.name}, {sequences} paths", cache, sequences)


def _case(name: str, cache: torch.Tensor, sequences: int) -> Case:
    pairs = [_path(sequence) for sequence in range(sequences)]
    moves = lay_out(pairs, cache.device)
    moving = torch.tensor([move for own in pairs for move in own if move[0] != move[1]], device=cache.device)
    slots = cache.flatten(1, 2)

    def kernel(turn: int) -> tuple[()]:
        dispatch.compact(cache, moves)
        return ()

    def plain(turn: int) -> torch.Tensor:
        slots[:, moving[:, 1]] = slots[:, moving[:, 0]]
        return slots

    return Case(name, kernel, plain, 2 * moving.shape[0] * slots[:, 0].numel() * slots.itemsize)


def _path(sequence: int) -> list[tuple[int, int]]:
    """Returns the moves of a path in the page of `sequence`."""
    return [(sequence * PAGE_TOKENS + node, sequence * PAGE_TOKENS + place) for place, node in enumerate(PATH)]
