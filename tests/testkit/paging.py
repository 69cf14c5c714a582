"""Caches to move pages in: random contents that no dtype's arithmetic survives, and a checksum of its own kind."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from magnitude_kernels.kv_copy.reference import PageMove

PAGE_TOKENS = 16
# "magnitud", as a number.
_START = int.from_bytes(b"magnitud", "big")


def random_cache(tensors: int, pages: int, heads: tuple[int, int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Returns tensors [pages, 16, *heads] whose bits are random: every NaN, denormal and negative zero there is."""
    draw = torch.Generator().manual_seed(seed)
    size = (pages, PAGE_TOKENS, heads[0], heads[1] * dtype.itemsize)
    return [torch.randint(0, 256, size, generator=draw, dtype=torch.uint8).view(dtype) for _ in range(tensors)]


def raw(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Returns the bytes of each tensor, which tell NaN from NaN."""
    return [t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]


def moved(tensors: Sequence[torch.Tensor], moves: Sequence[PageMove]) -> list[bytes]:
    """Returns the bytes of each tensor after `moves`, carried out on Python bytes."""
    results = []
    for content in raw(tensors):
        size = len(content) // tensors[0].shape[0]
        pages = [content[i : i + size] for i in range(0, len(content), size)]
        for source, target in moves:
            pages[target] = bytes(size) if source < 0 else pages[source]
        results.append(b"".join(pages))
    return results


def page_bytes(tensors: Sequence[torch.Tensor], page: int) -> bytes:
    """Returns the bytes of a page in all tensors, in their order."""
    return b"".join(raw([t[page] for t in tensors]))


def checksum(content: bytes) -> int:
    """Returns the checksum of a page's bytes as the definition has it, in whole numbers, as int64."""
    words: tuple[int, ...] = struct.unpack(f"<{len(content) // 4}I", content)
    total = (_START + sum((2 * i + 1) * word for i, word in enumerate(words))) % 2**64
    return total - 2**64 if total >> 63 else total


def compacted(pages: torch.Tensor, moves: Sequence[tuple[int, int]]) -> list[bytes]:
    """Returns the bytes of each tensor of `pages` after moving slots (source, target), one move after the other."""
    results = []
    for content in raw(tuple(pages)):
        size = len(content) // (pages.shape[1] * PAGE_TOKENS)
        slots = [content[i : i + size] for i in range(0, len(content), size)]
        for source, target in moves:
            slots[target] = slots[source]
        results.append(b"".join(slots))
    return results
