"""Moves whole pages in plain torch: the definition of the operation, and its path on CPU.

A cache is a tuple of equal tensors [pages, ...] (every layer's keys, then every layer's values), here seen as int32
words [pages, words], so that the dtype does not matter. Three moves:

    copy      page to page inside the cache, or zeros into a page
    gather    listed pages of all tensors into one staging buffer [pages, tensors, bytes]
    scatter   from such a buffer into listed pages

Gather and scatter return a checksum of each page they moved. With u_i the page's words in the order of the staging
buffer, as unsigned numbers, i = 0, 1, 2, ...:

    checksum = START + sum of (2 i + 1) * u_i   modulo 2**64

The weights are odd, different and below 2**31, and words below 2**32, so that no product below reaches 2**63 and each
is 0 modulo 2**64 only where it is 0. So it is certain, not only likely, that the checksum tells from the true page
every page with

    one word changed         by d: (2 i + 1) d is not 0
    one or two bits flipped  2**a (2 i + 1) equals 2**b (2 j + 1) only where i = j and a = b
    two words swapped        2 (i - j) (u_i - u_j) is 0 only where the words are equal

START keeps a page of zeros from having the checksum of a header of zeros. It finds accidents, not attacks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

ZEROS = -1
# The letters "magnitud".
START = 0x6D61676E69747564
# Up to here a word's weight is below 2**31, on which the checksum's promises rest.
MOST_WORDS = 1 << 30
_WORD_BYTES = 4


class PageMove(NamedTuple):
    """Page `source` becomes the content of page `target`; `ZEROS` as source fills it with zeros."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class PageTensors:
    """A cache as this operation sees it; build it once per cache.

    Attributes:
        words: each tensor as int32 [pages, words per page], sharing its memory.
        table: int64 [tensors], the addresses of the tensors, on their device.
    """

    words: tuple[torch.Tensor, ...]
    table: torch.Tensor

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> PageTensors:
        """Returns the view of contiguous tensors of one shape, dtype and device; raises ValueError for others."""
        first = tensors[0]
        for tensor in tensors:
            if (tensor.shape, tensor.dtype, tensor.device) != (first.shape, first.dtype, first.device):
                raise ValueError(f"cache tensors must be alike, not {_kind(first)} and {_kind(tensor)}")
            if not tensor.is_contiguous():
                raise ValueError(f"cache tensors must be contiguous, but one of {_kind(tensor)} is not")
        page_bytes = first[0].numel() * first.itemsize if first.shape[0] else 0
        # Sixteen tokens make this so for every dtype; kernels move sixteen bytes at once.
        if page_bytes % 16 or any(t.data_ptr() % 16 for t in tensors):
            raise ValueError(f"pages must begin at multiples of 16 bytes and have as many, not {page_bytes} bytes")
        if page_bytes // _WORD_BYTES * len(tensors) > MOST_WORDS:
            raise ValueError(
                f"a page may have {MOST_WORDS} words over all tensors, not {len(tensors)} x {page_bytes} bytes"
            )
        words = tuple(t.view(t.shape[0], -1).view(torch.int32) for t in tensors)
        table = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=first.device)
        return cls(words, table)

    @property
    def pages(self) -> int:
        """How many pages there are."""
        return self.words[0].shape[0]

    @property
    def page_words(self) -> int:
        """Words of a page in one tensor."""
        return self.words[0].shape[1]

    def staging(self, pages: int) -> torch.Tensor:
        """Returns a buffer for `pages` pages beside the cache, uint8 [pages, tensors, bytes]."""
        size = (pages, len(self.words), self.page_words * _WORD_BYTES)
        return torch.empty(size, dtype=torch.uint8, device=self.table.device)


def copy(cache: PageTensors, moves: Sequence[PageMove]) -> None:
    """Carries out `moves` one after the other; raises ValueError for pages that the cache does not have."""
    check_moves(cache, moves)
    for source, target in moves:
        for words in cache.words:
            if source == ZEROS:
                words[target].zero_()
            else:
                words[target].copy_(words[source])


def gather(cache: PageTensors, pages: Sequence[int], staging: torch.Tensor) -> torch.Tensor:
    """Fills `staging` with the contents of `pages`; returns their checksums, int64 [pages]."""
    buffer = staging_words(cache, pages, staging)
    index = torch.tensor(pages, dtype=torch.int64, device=buffer.device)
    for number, words in enumerate(cache.words):
        buffer[:, number] = words[index]
    return checksums(staging)


def scatter(cache: PageTensors, pages: Sequence[int], staging: torch.Tensor) -> torch.Tensor:
    """Fills `pages`, each named once, from `staging`; returns the checksums of what was written, int64 [pages]."""
    buffer = staging_words(cache, pages, staging)
    check_distinct(pages)
    index = torch.tensor(pages, dtype=torch.int64, device=buffer.device)
    for number, words in enumerate(cache.words):
        words[index] = buffer[:, number]
    return checksums(staging)


def checksums(staging: torch.Tensor) -> torch.Tensor:
    """Returns the checksum of each page of a staging buffer (uint8 [pages, tensors, bytes]), int64 [pages]."""
    page_words = staging.shape[1] * staging.shape[2] // _WORD_BYTES
    words = staging.reshape(staging.shape[0], staging.shape[1] * staging.shape[2]).view(torch.int32)
    weights = torch.arange(1, 2 * page_words, 2, dtype=torch.int64, device=staging.device)
    return ((words.to(torch.int64) & 0xFFFFFFFF) * weights).sum(1) + START


def rounds(moves: Sequence[PageMove]) -> Iterator[list[PageMove]]:
    """Yields `moves` cut where order matters: within a round no page is written that the round also reads or writes."""
    current: list[PageMove] = []
    read: set[int] = set()
    written: set[int] = set()
    for move in moves:
        if move.source in written or move.target in written or move.target in read:
            yield current
            current, read, written = [], set(), set()
        current.append(move)
        written.add(move.target)
        read.add(move.source)
    if current:
        yield current


def check_moves(cache: PageTensors, moves: Sequence[PageMove]) -> None:
    """Raises ValueError where a move names a page that the cache does not have."""
    for source, target in moves:
        if not (0 <= target < cache.pages and (source == ZEROS or 0 <= source < cache.pages)):
            raise ValueError(f"cannot move page {source} to {target}: the cache has pages 0 to {cache.pages - 1}")


def check_distinct(pages: Sequence[int]) -> None:
    """Raises ValueError where a page is named twice, since it would be undefined which content it gets."""
    if len(set(pages)) != len(pages):
        twice = sorted({page for page in pages if pages.count(page) > 1})
        raise ValueError(f"pages {twice} are to be filled more than once: name each page once")


def staging_words(cache: PageTensors, pages: Sequence[int], staging: torch.Tensor) -> torch.Tensor:
    """Returns `staging` as int32 [pages, tensors, words]; raises ValueError where it, or a page, does not fit."""
    wanted = (len(pages), len(cache.words), cache.page_words * _WORD_BYTES)
    if tuple(staging.shape) != wanted or staging.dtype != torch.uint8 or not staging.is_contiguous():
        raise ValueError(f"the staging buffer must be contiguous uint8 {wanted}, not {_kind(staging)}")
    if staging.device != cache.table.device:
        raise ValueError(f"the staging buffer lies on {staging.device}, the cache on {cache.table.device}")
    for page in pages:
        if not 0 <= page < cache.pages:
            raise ValueError(f"there is no page {page}: the cache has pages 0 to {cache.pages - 1}")
    return staging.view(torch.int32)


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
