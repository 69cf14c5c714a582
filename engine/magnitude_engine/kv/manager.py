"""The one owner of the key-value cache: leases pages to sequences and retains what later ones may reuse.

A sequence holds a `Lease`: pages for its tokens, of which the first `length` have their keys and values. Pages
before the one that holds position `length` may be shared with other leases and with what is retained; the page
that is written next has no other reader of the slots that are written:

    page 0          page 1          page 2          page 3
    |--------------- length ------------|. . . . . .|. . . .
    |-- may be shared --------------|-- written by this lease alone

What a step leaves behind is retained in the tenant's radix tree (`radix.py`) until pages run out: any sequence of
the tenant shares any prefix of it, full pages as they are, the beginning of another page as a copy. The partial
page at the end of a retained sequence is written on by the next sequence that goes on exactly there; until that
one is committed, others still find the tokens that were retained. Tenants never meet, since each has a tree of its
own, and pages that change tenants are zeroed before use.

A lease that holds a retained page holds all pages before it in the tree too, so that the retained pages which
nobody leases can all be evicted, from the leaves up.

Not thread-safe: the engine's thread owns it. `take_ops` returns the copies and zeroings that must be applied to
the tensors before the next forward pass.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.pool import IntegrityError, PageOp, PagePool
from magnitude_engine.kv.radix import NO_PAGE, Node, RadixTree


class CacheKey(NamedTuple):
    """Whose tokens these are; what is retained is shared within the tenant."""

    tenant: str
    session: str
    branch: str
    choice: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one sequence; changed by the manager only.

    Attributes:
        pages: page ids for positions 0, 16, 32, …
        length: tokens whose keys and values are in the pages.
        reused: tokens that `acquire` found in the cache.
        source: the retained page of which it began with a copy.
    """

    key: CacheKey
    pages: list[int] = field(default_factory=list)
    length: int = 0
    reused: int = 0
    source: Node | None = None


def pages_for(tokens: int) -> int:
    """Returns how many pages hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


class CacheManager:
    """Leases and retains the pages of a pool of `pages` pages; with `reuse` off nothing is retained."""

    def __init__(self, pages: int, reuse: bool = True) -> None:
        self._pool = PagePool(pages)
        self._reuse = reuse
        self._tree = RadixTree()
        self._leases: set[Lease] = set()
        self._ops: list[PageOp] = []
        self.evicted_pages = 0

    @property
    def total(self) -> int:
        """All pages."""
        return self._pool.total

    @property
    def available(self) -> int:
        """Pages that `extend` can hand out: the free ones and those that are only retained."""
        return self._pool.free + self._pool.idle

    @property
    def retained(self) -> int:
        """Pages kept for later steps only."""
        return self._pool.idle

    def recoverable(self, lease: Lease) -> int:
        """Returns how many pages become available when `lease` ends."""
        return sum(1 for page in lease.pages if self._pool.leases(page) == 1)

    def acquire(self, key: CacheKey, ids: Sequence[int]) -> Lease:
        """Returns a lease on the longest prefix of `ids` retained for the tenant, at most len(ids) - 1 tokens.

        Full pages are shared. A partial page is written on where all of it matches and nobody else does so, and
        copied otherwise.
        """
        lease = Lease(key)
        self._leases.add(lease)
        found = self._tree.match(key.tenant, ids[: len(ids) - 1])
        lease.pages = [node.page for node in found.full]
        self._pool.lease(lease.pages)
        lease.length = len(found.full) * PAGE_TOKENS
        if found.partial is not None:
            page = found.partial.page
            if found.common == len(found.partial.ids) and not self._pool.leases(page):
                self._pool.lease([page])
                lease.pages.append(page)
                lease.length += found.common
            elif self._copy_page(page, lease):
                lease.source = found.partial
                lease.length += found.common
        lease.reused = lease.length
        return lease

    def extend(self, lease: Lease, tokens: int) -> bool:
        """Gives `lease` pages for `tokens` tokens, evicting as needed; False (and no change) if there are too few."""
        need = pages_for(tokens) - len(lease.pages)
        if need <= 0:
            return True
        if not self._reserve(need):
            return False
        lease.pages.extend(self._allocate(need, lease))
        return True

    def advance(self, lease: Lease, tokens: int) -> None:
        """Notes that the keys and values of `tokens` more tokens were written."""
        lease.length += tokens

    def fork(self, lease: Lease, choice: int) -> Lease | None:
        """Returns a second lease on the same tokens, its partial page copied; None if there is no page for it."""
        full, rest = divmod(lease.length, PAGE_TOKENS)
        child = Lease(lease.key._replace(choice=choice), lease.pages[:full], full * PAGE_TOKENS)
        self._pool.lease(child.pages)
        self._leases.add(child)
        if rest and not self._copy_page(lease.pages[full], child):
            self.release(child)
            return None
        child.length, child.source = lease.length, lease.source
        return child

    def publish(self, lease: Lease, ids: Sequence[int]) -> None:
        """Retains the full pages of a lease that goes on, so that concurrent sequences share them.

        Pages whose tokens are retained already are given back: the lease goes on with the retained ones.
        """
        self._retain(lease, ids, lease.length // PAGE_TOKENS * PAGE_TOKENS)

    def commit(self, lease: Lease, ids: Sequence[int]) -> None:
        """Ends the lease and retains its tokens; `ids` are the sequence's tokens, at least `lease.length`."""
        self._retain(lease, ids, lease.length)
        self.release(lease)

    def release(self, lease: Lease) -> None:
        """Ends the lease without retaining more than is."""
        self._leases.discard(lease)
        self._pool.end_lease(lease.pages)
        for page in lease.pages:
            if not self._pool.leases(page):
                self._tree.offer(page)
        lease.pages, lease.length, lease.source = [], 0, None

    def evict(self, pages: int) -> int:
        """Frees up to `pages` idle pages, the least recently used leaf first each time; returns how many."""
        freed = 0
        while freed < pages:
            node = self._tree.pop_unused(lambda page: self._pool.leases(page) > 0)
            if node is None:
                break
            self._pool.end_retention([node.page])
            freed += 1
        self.evicted_pages += freed
        return freed

    def forget(self, lease: Lease) -> None:
        """Ends a lease whose numbers are broken: nothing that it computed or started from is found again.

        What was retained behind those pages depends on them and goes too. Others that lease them may go on, but
        what they hold of them is not retained either.
        """
        held = [node for node in map(self._tree.at, lease.pages) if node is not None]
        if lease.source is not None:
            held.append(lease.source)
        for node in held:
            gone = [each.page for each in self._tree.remove(node)]
            self._pool.spoil(gone)
            self._pool.end_retention(gone)
        self._pool.spoil(lease.pages)
        self.release(lease)

    def reset(self) -> None:
        """Ends all leases and drops everything retained; all pages are zeroed before their next use."""
        self._pool = PagePool(self._pool.total, dirty=True)
        self._tree = RadixTree()
        self._leases.clear()
        self._ops.clear()

    def take_ops(self) -> list[PageOp]:
        """Returns the page operations due before the next forward pass, and forgets them."""
        ops, self._ops = self._ops, []
        return ops

    def check_integrity(self) -> None:
        """Raises IntegrityError when the pool's counts are not those of the leases and trees."""
        self._pool.check_integrity()
        self._tree.check_integrity()
        held = Counter(p for lease in self._leases for p in lease.pages)
        held.update(p for p in range(self._pool.total) if self._tree.at(p) is not None)
        for page in range(self._pool.total):
            if self._pool.holders(page) != held[page]:
                raise IntegrityError(f"page {page} has {held[page]} holders, {self._pool.holders(page)} counted")
            node = self._tree.at(page)
            if node is not None and self._pool.spoiled(page):
                raise IntegrityError(f"page {page} holds broken numbers and is retained")
            if node is not None and not (node.children or node.queued or self._pool.leases(page)):
                raise IntegrityError(f"page {page} is an unused leaf that eviction would not find")
        for lease in self._leases:
            self._check_lease(lease)

    def _check_lease(self, lease: Lease) -> None:
        full, rest = divmod(lease.length, PAGE_TOKENS)
        for page in lease.pages[full:]:
            node = self._tree.at(page)
            written = 0 if node is None else len(node.ids)
            if self._pool.leases(page) != 1 or written > rest:
                raise IntegrityError("a page that is written next is shared")
        for before, page in itertools.pairwise([NO_PAGE, *lease.pages]):
            node = self._tree.at(page)
            if node is not None and (node.parent is None or node.parent.page != before):
                raise IntegrityError(f"page {page} is leased without the page before it")

    def _retain(self, lease: Lease, ids: Sequence[int], tokens: int) -> None:
        """Puts the first `tokens` tokens into the tree; full pages that are there already replace the lease's."""
        sound = next((i for i, page in enumerate(lease.pages) if self._pool.spoiled(page)), len(lease.pages))
        tokens = min(tokens, sound * PAGE_TOKENS)
        if not self._reuse or not tokens:
            return
        node = self._tree.begin(lease.key.tenant)
        for index, start in enumerate(range(0, tokens, PAGE_TOKENS)):
            chunk, page = tuple(ids[start : min(start + PAGE_TOKENS, tokens)]), lease.pages[index]
            node, added, superseded = self._tree.place(node, chunk, page)
            if added:
                self._pool.retain([page])
            if superseded is not None:
                self._pool.end_retention([superseded.page])
            if node.page != page and len(chunk) == PAGE_TOKENS:
                self._replace(lease, index, node.page)

    def _replace(self, lease: Lease, index: int, page: int) -> None:
        """Gives `page` in place of another to a lease, and to the forks that share that one with it.

        Whoever shares a page also shares all pages before it; so it stays true for what is retained behind it.
        """
        old = lease.pages[index]
        alone = self._pool.leases(old) == 1
        for each in [lease] if alone else [x for x in self._leases if x.pages[index : index + 1] == [old]]:
            self._pool.lease([page])
            self._pool.end_lease([old])
            each.pages[index] = page

    def _copy_page(self, source: int, lease: Lease) -> bool:
        """Appends a copy of `source` to the lease; False if there is no page for it.

        The source may be evicted to make room, or even be the page handed out: operations apply in order and
        before anything is written, so its numbers are still there.
        """
        if not self._reserve(1):
            return False
        (target,) = self._allocate(1, lease)
        self._ops.append(PageOp(source, target))
        lease.pages.append(target)
        return True

    def _reserve(self, pages: int) -> bool:
        if self.available < pages:
            return False
        if pages > self._pool.free:
            self.evict(pages - self._pool.free)
        return True

    def _allocate(self, count: int, lease: Lease) -> tuple[int, ...]:
        after = lease.pages[-1] if lease.pages else None
        allocation = self._pool.allocate(count, lease.key.tenant, after)
        self._ops.extend(PageOp(None, page) for page in allocation.to_zero)
        return allocation.pages
