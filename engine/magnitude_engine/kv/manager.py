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
nobody leases can all be evicted, from the leaves up; `retention.py` chooses. An evicted full page is spilled to the
lower tiers (`tiers.py`) unless they have it, and comes back from there into a new page.

Not thread-safe: the engine's thread owns it. `take_ops` returns what must be done to the tensors before the next
forward pass, in order.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.blocks import BlockName, chain, next_digest
from magnitude_engine.kv.integrity import check_accounts
from magnitude_engine.kv.lease import CacheKey, Evicted, Lease, pages_for
from magnitude_engine.kv.pool import CacheOp, Fill, PageOp, PagePool, Payload, Spill
from magnitude_engine.kv.radix import Node, RadixTree
from magnitude_engine.kv.report import stretches
from magnitude_engine.kv.retention import Candidate, Retention, SessionKey
from magnitude_engine.kv.tiers import Tiers

NOTHING: Mapping[bytes, Payload] = {}


class CacheManager:
    """Leases and retains the pages of a pool.

    Args:
        pages: how many there are.
        reuse: whether anything is retained.
        tiers: where evicted pages go and come back from; default: nowhere.
        clock: seconds, monotonic.

    Attributes:
        retention: what is known of the sessions; it chooses what is evicted.
        evicted: running totals.
    """

    def __init__(
        self, pages: int, reuse: bool = True, tiers: Tiers | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = PagePool(pages)
        self.reuse = reuse
        self._tiers = tiers or Tiers()
        self._clock = clock
        self._tree = RadixTree(self._tiers.identity, clock)
        self._leases: set[Lease] = set()
        self._ops: list[CacheOp] = []
        self._unsaved: deque[Node] = deque()
        self.retention = Retention(pages)
        self.evicted = Evicted()

    @property
    def total(self) -> int:
        """All pages."""
        return self._pool.total

    @property
    def available(self) -> int:
        """Pages that `extend` can hand out: the free ones and those that are only retained."""
        return self._pool.free + self._pool.idle

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return self._pool.free

    @property
    def retained(self) -> int:
        """Pages kept for later steps only."""
        return self._pool.idle

    @property
    def unsaved(self) -> int:
        """Retained pages that may have to be written to a lower tier yet."""
        return len(self._unsaved)

    def held_by(self, leases: Iterable[Lease]) -> int:
        """Returns how many pages are available when all these leases end; any thread may ask."""
        return self._pool.held_by(lease.pages for lease in leases)

    def recoverable(self, lease: Lease) -> int:
        """Returns how many pages become available when `lease` ends."""
        return sum(1 for page in lease.pages if self._pool.leases(page) == 1)

    def chain(self, tenant: str, ids: Sequence[int]) -> list[bytes]:
        """Returns the digests of the full pages of `ids`."""
        return chain(self._tree.root(tenant), ids)

    def cached_pages(self, chain: Sequence[bytes]) -> tuple[int, int]:
        """Returns how many of the pages with these digests are retained, and how many of those are in use.

        A page is retained, or in use, only with all pages before it, so both are found in O(log pages).
        """
        cached = bisect_left(chain, True, key=lambda digest: self._tree.page_of(digest) is None)
        return cached, bisect_left(chain, True, hi=cached, key=lambda digest: not self._in_use(digest))

    def path(self, digest: bytes) -> list[bytes]:
        """Returns the digests of a retained page and of all before it, the first page first."""
        return [node.digest for node in self._tree.path(digest)]

    def missing(self, tenant: str, ids: Sequence[int]) -> Iterator[BlockName]:
        """Yields the names of the full pages of `ids` that are not retained; the last token is never among them."""
        usable = len(ids) - 1
        digest, done = self._tree.root(tenant), 0
        for node in self._tree.follow(tenant, ids[:usable]):
            digest, done = node.digest, done + PAGE_TOKENS
        while done + PAGE_TOKENS <= usable:
            chunk = tuple(ids[done : done + PAGE_TOKENS])
            name = BlockName(next_digest(digest, chunk), digest, chunk)
            yield name
            digest, done = name.key, done + PAGE_TOKENS

    def acquire(self, key: CacheKey, ids: Sequence[int], fetched: Mapping[bytes, Payload] = NOTHING) -> Lease:
        """Returns a lease on the longest prefix of `ids` retained for the tenant, at most len(ids) - 1 tokens.

        Full pages are shared; where they end, host memory and `fetched` (by digest) are asked for more. A partial page
        is written on where all of it matches and nobody else does so, and copied otherwise.
        """
        lease = Lease(key)
        self._leases.add(lease)
        usable = ids[: len(ids) - 1]
        found = self._tree.match(key.tenant, usable)
        lease.pages = [node.page for node in found.full]
        self._pool.lease(lease.pages)
        lease.length = len(found.full) * PAGE_TOKENS
        digest = found.full[-1].digest if found.full else self._tree.root(key.tenant)
        self._restore(lease, digest, usable, fetched)
        if found.partial is not None and lease.length == len(found.full) * PAGE_TOKENS:
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
        """Frees up to `pages` idle pages, leaf by leaf as retention chooses; returns how many.

        Pages that are not wanted again go without a trace; others are spilled where a lower tier has room.
        """
        freed = dead = spilled = 0
        while freed < pages:
            node = self._tree.pop_unused(self._is_leased, self._choose)
            if node is None:
                break
            unwanted = self._unwanted(node)
            # What was only used with the chosen page would be chosen next.
            while node is not None:
                freed += 1
                dead += unwanted
                spilled += not unwanted and self._spill(node)
                self._pool.end_retention([node.page])
                node = self._tree.pop_behind(node, self._is_leased) if freed < pages else None
        total = self.evicted
        self.evicted = Evicted(total.pressure + freed - dead, total.dead + dead, total.spilled + spilled)
        return freed

    def leave(self, ends: Iterable[bytes]) -> None:
        """Notes that sequences with these last digests are not wanted again: their pages are the first to go."""
        for end in ends:
            self._tree.leave(end)

    def prune(self, session: SessionKey, ends: Iterable[bytes]) -> None:
        """Frees the pages that only this session used, in sequences with these last digests, as far as not leased."""
        gone = [node.page for end in ends for node in self._tree.uproot(session, end, self._is_leased)]
        self._pool.end_retention(gone)
        self.evicted = self.evicted._replace(dead=self.evicted.dead + len(gone))

    def take_unsaved(self, pages: int) -> list[Spill]:
        """Returns up to `pages` retained pages that no lower tier holds yet, the longest retained first."""
        due: list[Spill] = []
        while self._unsaved and len(due) < pages:
            node = self._unsaved.popleft()
            node.unsaved = False
            if self._tree.at(node.page) is node and node.name is not None and self._tiers.lacks(node.digest):
                due.append(Spill(node.page, node.name))
        return due

    def postpone(self, spills: Sequence[Spill]) -> None:
        """Puts back what `take_unsaved` returned and could not be saved."""
        for spill in reversed(spills):
            node = self._tree.at(spill.page)
            if node is not None and node.digest == spill.name.key:
                node.unsaved = True
                self._unsaved.appendleft(node)

    def runs(self) -> tuple[api.CacheRun, ...]:
        """Returns the retained pages as stretches without a fork, parents first."""
        return stretches(self._tree.roots(), self._is_leased, self._clock())

    def forget(self, lease: Lease) -> None:
        """Ends a lease whose numbers are broken: nothing that it computed or started from is found again.

        What was retained behind those pages depends on them and goes too. Others that lease them may go on, but
        what they hold of them is not retained either.
        """
        for node in filter(None, [*map(self._tree.at, lease.pages), lease.source]):
            removed = self._tree.remove(node)
            gone = [each.page for each in removed]
            self._pool.spoil(gone)
            self._pool.end_retention(gone)
            self._tiers.discard([each.digest for each in removed if each.digest])
        self._pool.spoil(lease.pages)
        self.release(lease)

    def reset(self) -> None:
        """Ends all leases and drops everything retained; all pages are zeroed before their next use."""
        self._pool = PagePool(self._pool.total, dirty=True)
        self._tree = RadixTree(self._tiers.identity, self._clock)
        for held in (self._leases, self._ops, self._unsaved):
            held.clear()

    def take_ops(self) -> list[CacheOp]:
        """Returns the page operations due before the next forward pass, and forgets them."""
        ops, self._ops = self._ops, []
        return ops

    def check_integrity(self) -> None:
        """Raises IntegrityError when the pool's counts are not those of the leases and trees."""
        check_accounts(self._pool, self._tree, self._leases)

    def _retain(self, lease: Lease, ids: Sequence[int], tokens: int) -> None:
        """Puts the first `tokens` tokens into the tree; full pages that are there already replace the lease's."""
        sound = next((i for i, page in enumerate(lease.pages) if self._pool.spoiled(page)), len(lease.pages))
        tokens = min(tokens, sound * PAGE_TOKENS)
        if not self.reuse or not tokens:
            return
        node = self._tree.begin(lease.key.tenant)
        for index, start in enumerate(range(0, tokens, PAGE_TOKENS)):
            chunk, page = tuple(ids[start : min(start + PAGE_TOKENS, tokens)]), lease.pages[index]
            node, added, superseded = self._tree.place(node, chunk, page)
            self._tree.own(node, lease.key.owner)
            if added:
                self._pool.retain([page])
            if node.digest and not node.unsaved and self._tiers.lacks(node.digest):
                node.unsaved = True
                self._unsaved.append(node)
            if superseded is not None:
                self._pool.end_retention([superseded.page])
            if node.page != page and len(chunk) == PAGE_TOKENS:
                self._replace(lease, index, node.page)

    def _restore(self, lease: Lease, digest: bytes, ids: Sequence[int], fetched: Mapping[bytes, Payload]) -> None:
        """Appends the pages that a lower tier has, as long as each goes on from the one before.

        They are retained at once: operations apply before anybody reads them.
        """
        while lease.length + PAGE_TOKENS <= len(ids):
            digest = next_digest(digest, ids[lease.length : lease.length + PAGE_TOKENS])
            payload = fetched.get(digest)
            from_disk = payload is not None
            if payload is None:
                payload = self._tiers.load(digest)
            if payload is None or not self._reserve(1):
                break
            (page,) = self._allocate(1, lease)
            self._ops.append(Fill(page, payload))
            lease.pages.append(page)
            lease.length += PAGE_TOKENS
            lease.from_disk += PAGE_TOKENS if from_disk else 0
            lease.from_host += 0 if from_disk else PAGE_TOKENS
        if lease.from_disk or lease.from_host:
            self._retain(lease, ids, lease.length)

    def _choose(self, leaves: Sequence[Node]) -> int:
        """Returns which of the least recently used leaves goes."""
        candidates = [Candidate(None if n.shared else n.session, n.used_at, n.left) for n in leaves]
        return self.retention.choose(candidates, self._clock())

    def _unwanted(self, node: Node) -> bool:
        if node.shared:
            return False
        return node.left or math.isinf(self.retention.expected_use_s(node.session, node.used_at, self._clock()))

    def _spill(self, node: Node) -> bool:
        """Has a page that leaves the tree handed to the lower tiers where they want it."""
        if node.name is None or not self._tiers.wants(node.digest):
            return False
        self._ops.append(Spill(node.page, node.name))
        return True

    def _is_leased(self, page: int) -> bool:
        return self._pool.leases(page) > 0

    def _in_use(self, digest: bytes) -> bool:
        page = self._tree.page_of(digest)
        return page is not None and self._is_leased(page)

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
