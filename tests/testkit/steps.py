"""Runs a model by hand: sequences over pages of one cache, any number of rows of each per step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.model.batch import KeyValueCache, SequenceRows, StepBatch
from magnitude_engine.model.runner import Runner


class Walk:
    """One sequence: its ids, how many of them are computed, and the pages they lie in."""

    def __init__(self, ids: Sequence[int], pages: Sequence[int]) -> None:
        self.ids = list(ids)
        self.pages = tuple(pages)
        self.done = 0

    @property
    def left(self) -> int:
        return len(self.ids) - self.done


def run(start: int, tokens: int) -> range:
    """Returns consecutive page ids from `start` for `tokens` tokens."""
    return range(start, start + -(-tokens // PAGE_TOKENS))


def step(runner: Runner, cache: KeyValueCache, parts: Sequence[tuple[Walk, int]]) -> list[torch.Tensor]:
    """Computes the next `count` ids of each walk in one step; returns each walk's logits [count, vocab]."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sequences = []
    for walk, count in parts:
        span = range(walk.done, walk.done + count)
        sequences.append(SequenceRows(len(ids), count, span.stop, walk.pages))
        ids += walk.ids[span.start : span.stop]
        positions += span
        slots += [walk.pages[p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS for p in span]
        walk.done = span.stop
    batch = StepBatch(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        sequences=tuple(sequences),
        logit_rows=torch.arange(len(ids)),
    )
    logits = runner.forward(batch, cache).logits
    return list(torch.split(logits, [count for _, count in parts]))


def in_chunks(runner: Runner, cache: KeyValueCache, walk: Walk, sizes: Sequence[int]) -> torch.Tensor:
    """Computes a whole walk, its chunks cycling through `sizes`; returns the logits of every row."""
    rows: list[torch.Tensor] = []
    for size in itertools.cycle(sizes):
        if not walk.left:
            return torch.cat(rows)
        rows += step(runner, cache, [(walk, min(size, walk.left))])
    raise ValueError("sizes is empty")
