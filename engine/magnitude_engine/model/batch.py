"""The nouns between scheduler, cache and model: what one forward pass computes, and what it returns.

A step runs several rows per sequence: one while decoding, a chunk while prefilling, the nodes of a draft tree
while verifying. Rows of one sequence stand together, in the order of their cache slots:

    sequence 0          sequence 1      sequence 2
    |-- 4 rows --|      |- 1 row -|     |---- 256 rows ----|
    position 96..99     position 512    position 0..255

The nodes of a draft tree take the slots behind the known tokens in their own order; a node's position is that of its
depth, and it sees the known tokens and the nodes above it:

    slot       96 (known)   97   98   99        parents of the last three rows (-1, -1, 0)
    position   96           97   97   98
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import NamedTuple

import torch


class ModelShape(NamedTuple):
    """The sizes that cache and sampling need of a model."""

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    context: int


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows of one sequence in a step.

    Attributes:
        start, count: the rows `start .. start+count` of the step.
        context: tokens in the cache after this step (those computed now included).
        pages: page ids holding positions 0..context, `PAGE_TOKENS` each; the first cached pages may be shared
            with other sequences, the pages that this step writes never are.
        parents: the last rows are the nodes of a draft tree: for each the index among them of the node above, -1
            for the row before them; empty where every row sees all slots up to its own.
    """

    start: int
    count: int
    context: int
    pages: tuple[int, ...]
    parents: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One forward pass.

    Attributes:
        ids: int64 [rows], token per row.
        positions: int64 [rows], position of each row in its sequence.
        slots: int64 [rows], where each row's key and value go: page * PAGE_TOKENS + offset.
        sequences: one entry per sequence, in row order.
        logit_rows: int64 [wanted], the rows whose logits are needed.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    sequences: tuple[SequenceRows, ...]
    logit_rows: torch.Tensor


class StepOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
        logits: float32 [wanted, vocab].
        hidden: activations before the head, [wanted, hidden]; the tap for a trained draft head.
    """

    logits: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class KeyValueCache:
    """The tensors behind the page ids.

    Attributes:
        keys, values: per layer [pages, PAGE_TOKENS, kv_heads, head_dim]; consecutive page ids are consecutive
            in memory, so that a run of pages reads as one token-major matrix without a copy. Tensor
            parallelism shards the head axis.
        pages: all of them as one tensor, [2 * layers, pages, ...]: keys and values of the first layer, of the
            second, and so on.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    pages: torch.Tensor

    @classmethod
    def allocate(
        cls, shape: ModelShape, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> KeyValueCache:
        """Returns zeroed tensors for `pages` pages."""
        whole = _zeros((2 * shape.layers, pages, page_tokens, shape.kv_heads, shape.head_dim), dtype, device)
        return cls(tuple(whole[0::2]), tuple(whole[1::2]), whole)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros; on CPU in memory that the system gives only when it is written, unlike `torch.zeros`.

    It is given in small pieces: with huge pages the first token of a sequence would take 2 MiB in every layer, which on
    machines that hand free memory back to a host lasts seconds.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Only Linux has huge pages that come unasked.
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)
