"""Whether pool, tree and leases tell the same story."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.lease import Lease
from magnitude_engine.kv.pool import IntegrityError, PagePool
from magnitude_engine.kv.radix import NO_PAGE, RadixTree


def check_accounts(pool: PagePool, tree: RadixTree, leases: Collection[Lease]) -> None:
    """Raises IntegrityError when the pool's counts are not those of the leases and trees."""
    pool.check_integrity()
    tree.check_integrity()
    held = Counter(p for lease in leases for p in lease.pages)
    held.update(p for p in range(pool.total) if tree.at(p) is not None)
    for page in range(pool.total):
        if pool.holders(page) != held[page]:
            raise IntegrityError(f"page {page} has {held[page]} holders, {pool.holders(page)} counted")
        node = tree.at(page)
        if node is not None and pool.spoiled(page):
            raise IntegrityError(f"page {page} holds broken numbers and is retained")
        if node is not None and not (node.children or node.queued or pool.leases(page)):
            raise IntegrityError(f"page {page} is an unused leaf that eviction would not find")
    for lease in leases:
        _check_lease(pool, tree, lease)


def _check_lease(pool: PagePool, tree: RadixTree, lease: Lease) -> None:
    full, rest = divmod(lease.length, PAGE_TOKENS)
    for page in lease.pages[full:]:
        node = tree.at(page)
        written = 0 if node is None else len(node.ids)
        if pool.leases(page) != 1 or written > rest:
            raise IntegrityError("a page that is written next is shared")
    for before, page in itertools.pairwise([NO_PAGE, *lease.pages]):
        node = tree.at(page)
        if node is not None and (node.parent is None or node.parent.page != before):
            raise IntegrityError(f"page {page} is leased without the page before it")
