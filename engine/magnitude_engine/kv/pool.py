"""Accounts for the pages of the key-value cache: who holds each page, which are free, which must be zeroed.

A page has two kinds of holders: leases (sequences that a step may read or write) and the radix tree of what is
retained. Its state follows from the two counts:

    leases 0, retained 0    free
    leases 0, retained > 0  idle: may be evicted at any time
    leases > 0              in use

Only numbers live here; `tensors.py` does what the returned operations say to the tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from magnitude_engine.errors import EngineError
from magnitude_engine.kv.blocks import BlockName

Payload = bytes | memoryview


class OutOfPages(EngineError):
    """More pages were asked for than are free; `free` says how many there are."""


class IntegrityError(EngineError):
    """The page accounts contradict each other."""


class PageOp(NamedTuple):
    """Copy page `source` to `target`, or zero `target` where `source` is None. Operations apply in order."""

    source: int | None
    target: int


class Spill(NamedTuple):
    """Hand the numbers of `page` to the lower tiers, which know them as `name`."""

    page: int
    name: BlockName


class Fill(NamedTuple):
    """Write `payload`, the numbers of one page from a lower tier, to `page`."""

    page: int
    payload: Payload


CacheOp = PageOp | Spill | Fill


class Allocation(NamedTuple):
    """Freshly leased pages, and those among them that hold another tenant's (or broken) numbers."""

    pages: tuple[int, ...]
    to_zero: tuple[int, ...]


class PagePool:
    """`total` pages with reference counts; free pages are kept as runs of consecutive ids.

    Sequences grow page by page, and attention reads a run of consecutive pages as one view. So a growing
    sequence continues in the page after its last one where that is free, and a new sequence starts in the
    middle of the largest free run, which leaves room to the sequence before it.
    """

    def __init__(self, total: int, dirty: bool = False) -> None:
        """`dirty` when the pages' contents are unknown, so that each is zeroed before its first use."""
        self.total = total
        self._leases = [0] * total
        self._retained = [0] * total
        self._tenant: list[str | None] = [None] * total
        self._dirty = set(range(total)) if dirty else set()
        self._starts = [0] if total else []
        self._ends = [total] if total else []
        self._free = total
        self._idle = 0

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._free

    @property
    def idle(self) -> int:
        """Pages that are only retained."""
        return self._idle

    def leases(self, page: int) -> int:
        """Returns how many leases hold `page`."""
        return self._leases[page]

    def held_by(self, shares: Iterable[Sequence[int]]) -> int:
        """Returns how many pages nobody leases but these leases; any thread may ask."""
        counts = Counter(page for pages in shares for page in list(pages))
        return sum(1 for page, count in counts.items() if self._leases[page] == count)

    def holders(self, page: int) -> int:
        """Returns how many leases, and the tree, hold `page`."""
        return self._leases[page] + self._retained[page]

    def allocate(self, count: int, tenant: str, after: int | None = None) -> Allocation:
        """Leases `count` free pages, beginning with the page after `after` where that is free.

        Raises:
            OutOfPages: fewer are free; nothing changed.
        """
        if count > self._free:
            raise OutOfPages(f"{count} cache pages are needed and {self._free} are free")
        pages = self._continue_run(after + 1, count) if after is not None else []
        while len(pages) < count:
            pages.extend(self._from_largest_run(count - len(pages)))
        to_zero = tuple(p for p in pages if p in self._dirty or self._tenant[p] not in (None, tenant))
        for page in pages:
            self._leases[page] = 1
            self._tenant[page] = tenant
        self._dirty.difference_update(to_zero)
        return Allocation(tuple(pages), to_zero)

    def lease(self, pages: Iterable[int]) -> None:
        """Adds a lease to pages that are held already."""
        for page in pages:
            if self._leases[page] == 0:
                self._idle -= 1
            self._leases[page] += 1

    def retain(self, pages: Iterable[int]) -> None:
        """Notes that leased pages are in the tree."""
        for page in pages:
            self._retained[page] += 1

    def spoil(self, pages: Iterable[int]) -> None:
        """Notes that held pages have numbers nobody may read again: they are zeroed before their next use."""
        self._dirty.update(pages)

    def spoiled(self, page: int) -> bool:
        """Returns whether `page` was spoiled and not handed out since."""
        return page in self._dirty

    def end_lease(self, pages: Iterable[int]) -> None:
        """Takes a lease from pages."""
        for page in pages:
            self._leases[page] -= 1
            if self._leases[page] == 0:
                if self._retained[page]:
                    self._idle += 1
                else:
                    self._give_back(page)

    def end_retention(self, pages: Iterable[int]) -> None:
        """Notes that pages are no longer in the tree."""
        for page in pages:
            self._retained[page] -= 1
            if self._leases[page] == 0 and self._retained[page] == 0:
                self._idle -= 1
                self._give_back(page)

    def check_integrity(self) -> None:
        """Raises IntegrityError when counts, free runs and totals disagree."""
        in_runs = [p for start, end in zip(self._starts, self._ends, strict=True) for p in range(start, end)]
        unheld = [p for p in range(self.total) if self._leases[p] == 0 and self._retained[p] == 0]
        idle = sum(1 for p in range(self.total) if self._leases[p] == 0 and self._retained[p] > 0)
        if in_runs != unheld or self._free != len(unheld):
            raise IntegrityError(f"free runs hold {len(in_runs)} pages, {len(unheld)} are unheld, {self._free} counted")
        if idle != self._idle:
            raise IntegrityError(f"{idle} pages are idle, {self._idle} counted")
        if min(self._leases, default=0) < 0 or min(self._retained, default=0) < 0:
            raise IntegrityError("a page was given back more often than it was taken")

    def _continue_run(self, start: int, count: int) -> list[int]:
        index = bisect_left(self._starts, start)
        if index == len(self._starts) or self._starts[index] != start:
            return []
        return self._carve(index, start, min(count, self._ends[index] - start))

    def _from_largest_run(self, count: int) -> list[int]:
        index = max(range(len(self._starts)), key=lambda i: self._ends[i] - self._starts[i])
        start, spare = self._starts[index], self._ends[index] - self._starts[index] - count
        if spare <= 0:
            return self._carve(index, start, self._ends[index] - start)
        roomy = start > 0 and spare >= 2 * count
        return self._carve(index, start + spare // 2 if roomy else start, count)

    def _carve(self, index: int, start: int, count: int) -> list[int]:
        """Takes `start .. start+count` out of free run `index`."""
        left, right = self._starts[index], self._ends[index]
        rest = [(a, b) for a, b in ((left, start), (start + count, right)) if a < b]
        self._starts[index : index + 1] = [a for a, _ in rest]
        self._ends[index : index + 1] = [b for _, b in rest]
        self._free -= count
        return list(range(start, start + count))

    def _give_back(self, page: int) -> None:
        """Adds a page to the free runs, joining its neighbours."""
        index = bisect_left(self._starts, page)
        joins_left = index > 0 and self._ends[index - 1] == page
        joins_right = index < len(self._starts) and self._starts[index] == page + 1
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends.pop(index)
            self._starts.pop(index)
        elif joins_left:
            self._ends[index - 1] = page + 1
        elif joins_right:
            self._starts[index] = page
        else:
            self._starts.insert(index, page)
            self._ends.insert(index, page + 1)
        self._free += 1
