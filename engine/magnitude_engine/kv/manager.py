"""The one owner of the key-value cache: leases pages to sequences and retains what a session may reuse.

A sequence holds a `Lease`: pages for its tokens, of which the first `length` have their keys and values. Pages
before the one that holds position `length` may be shared with other leases and with retained entries; the page
that is written next never is:

    page 0          page 1          page 2          page 3
    |--------------- length ------------|. . . . . .|. . . .
    |-- may be shared --------------|-- this lease alone ---|

What a step leaves behind is retained under (tenant, session, branch, choice) until pages run out; then the least
recently used entries lose pages from their end. Callers ask by token ids (`acquire`) and hand back token ids
(`commit`), so that another index over prefixes fits behind the same calls. Entries of different tenants never
meet, since the tenant is part of the key, and pages that change tenants are zeroed before use.

Not thread-safe: the engine's thread owns it. `take_ops` returns the copies and zeroings that must be applied to
the tensors before the next forward pass.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.pool import IntegrityError, PageOp, PagePool


class CacheKey(NamedTuple):
    """Whose tokens these are; `choice` tells the answers of one step with n > 1 apart."""

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
    """

    key: CacheKey
    pages: list[int] = field(default_factory=list)
    length: int = 0
    reused: int = 0


@dataclass(slots=True)
class _Entry:
    ids: tuple[int, ...]
    pages: list[int]


def pages_for(tokens: int) -> int:
    """Returns how many pages hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many leading ids are equal."""
    size = min(len(a), len(b))
    for start in range(0, size, 64):
        stop = min(start + 64, size)
        if a[start:stop] != b[start:stop]:
            return next(i for i in range(start, stop) if a[i] != b[i])
    return size


class CacheManager:
    """Leases and retains the pages of a pool of `pages` pages; with `reuse` off nothing is retained."""

    def __init__(self, pages: int, reuse: bool = True) -> None:
        self._pool = PagePool(pages)
        self._reuse = reuse
        self._entries: OrderedDict[CacheKey, _Entry] = OrderedDict()
        self._leases: set[Lease] = set()
        self._ops: list[PageOp] = []
        self.evicted_pages = 0

    @property
    def total(self) -> int:
        """All pages."""
        return self._pool.total

    @property
    def available(self) -> int:
        """Pages that `extend` can hand out: the free ones and those that only retained entries hold."""
        return self._pool.free + self._pool.idle

    @property
    def retained(self) -> int:
        """Pages kept for later steps only."""
        return self._pool.idle

    def recoverable(self, lease: Lease) -> int:
        """Returns how many pages become available when `lease` ends."""
        return sum(1 for page in lease.pages if self._pool.leases(page) == 1)

    def acquire(self, key: CacheKey, ids: Sequence[int]) -> Lease:
        """Returns a lease on the longest retained prefix of `ids` in this session, at most len(ids) - 1 tokens.

        Full pages are shared. A partial last page is taken over from the same branch's entry where nobody else
        holds it (the entry then ends before it), and copied otherwise.
        """
        lease = Lease(key)
        self._leases.add(lease)
        found, matched = self._longest(key, ids)
        if found is None:
            return lease
        entry = self._entries[found]
        self._entries.move_to_end(found)
        full, rest = divmod(matched, PAGE_TOKENS)
        lease.pages = entry.pages[:full]
        self._pool.lease(lease.pages)
        lease.length = full * PAGE_TOKENS
        if rest:
            page = entry.pages[full]
            if found[:3] == key[:3] and self._pool.holders(page) == 1:
                self._pool.lease([page])
                lease.pages.append(page)
                self._shorten(found, full)
                lease.length = matched
            elif self._copy_page(page, lease):
                lease.length = matched
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
        child.length = lease.length
        return child

    def publish(self, lease: Lease, ids: Sequence[int]) -> None:
        """Retains the full pages of a lease that goes on, so that concurrent steps of its session share them."""
        full = lease.length // PAGE_TOKENS
        if self._reuse and full:
            self._retain(lease.key, tuple(ids[: full * PAGE_TOKENS]), lease.pages[:full])

    def commit(self, lease: Lease, ids: Sequence[int]) -> None:
        """Ends the lease and retains its tokens; `ids` are the sequence's tokens, at least `lease.length`."""
        if self._reuse and lease.length:
            self._retain(lease.key, tuple(ids[: lease.length]), lease.pages[: pages_for(lease.length)])
        self.release(lease)

    def release(self, lease: Lease, dirty: bool = False) -> None:
        """Ends the lease without retaining anything; `dirty` when its numbers must not be read again."""
        self._leases.discard(lease)
        self._pool.end_lease(lease.pages, dirty)
        lease.pages, lease.length = [], 0

    def evict(self, pages: int) -> int:
        """Frees up to `pages` idle pages, least recently used entries first, each from its end; returns how many."""
        goal = self._pool.free + pages
        before = self._pool.free
        for key in list(self._entries):
            held = self._entries[key].pages
            keep = len(held)
            # Leases hold prefixes of entries, so the idle pages of an entry are its last ones.
            while keep and self._pool.free < goal and not self._pool.leases(held[keep - 1]):
                keep -= 1
                self._shorten(key, keep)
            if self._pool.free >= goal:
                break
        freed = self._pool.free - before
        self.evicted_pages += freed
        return freed

    def forget(self, tenant: str, session: str) -> None:
        """Drops everything retained for a session."""
        for key in [k for k in self._entries if k[:2] == (tenant, session)]:
            self._shorten(key, 0)

    def reset(self) -> None:
        """Ends all leases and drops everything retained; all pages are zeroed before their next use."""
        self._pool = PagePool(self._pool.total, dirty=True)
        self._entries.clear()
        self._leases.clear()
        self._ops.clear()

    def take_ops(self) -> list[PageOp]:
        """Returns the page operations due before the next forward pass, and forgets them."""
        ops, self._ops = self._ops, []
        return ops

    def check_integrity(self) -> None:
        """Raises IntegrityError when the pool's counts are not those of the leases and retained entries."""
        self._pool.check_integrity()
        held = Counter(p for lease in self._leases for p in lease.pages)
        held.update(p for entry in self._entries.values() for p in entry.pages)
        for page in range(self._pool.total):
            if self._pool.holders(page) != held[page]:
                raise IntegrityError(f"page {page} has {held[page]} holders, {self._pool.holders(page)} counted")
        for lease in self._leases:
            if any(self._pool.holders(p) != 1 for p in lease.pages[lease.length // PAGE_TOKENS :]):
                raise IntegrityError("a page that is written next is shared")

    def _longest(self, key: CacheKey, ids: Sequence[int]) -> tuple[CacheKey | None, int]:
        """Returns the session's entry with the longest common prefix; among equals the same branch, then choice."""
        wanted = tuple(ids[: len(ids) - 1])
        best: CacheKey | None = None
        rank: tuple[int, bool, bool] = (0, False, False)
        for candidate, entry in self._entries.items():
            if candidate[:2] != key[:2]:
                continue
            score = (common_prefix(entry.ids, wanted), candidate.branch == key.branch, candidate == key)
            if score[0] and score > rank:
                best, rank = candidate, score
        return best, rank[0]

    def _retain(self, key: CacheKey, ids: tuple[int, ...], pages: list[int]) -> None:
        """Makes (ids, pages) the entry of `key`, in place of the one before."""
        self._pool.retain(pages)
        previous = self._entries.pop(key, None)
        self._entries[key] = _Entry(ids, list(pages))
        if previous is not None:
            self._pool.end_retention(previous.pages)

    def _shorten(self, key: CacheKey, pages: int) -> None:
        """Cuts an entry to its first `pages` pages; an entry without pages is gone."""
        entry = self._entries[key]
        dropped, entry.pages = entry.pages[pages:], entry.pages[:pages]
        entry.ids = entry.ids[: pages * PAGE_TOKENS]
        if not entry.pages:
            del self._entries[key]
        self._pool.end_retention(dropped)

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
