"""A cache of real tensors with small pages: two layers' worth of one number per slot, which says what belongs there."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.kv.disk import DiskOptions, DiskTier
from magnitude_engine.kv.lease import CacheKey, Lease
from magnitude_engine.kv.manager import CacheManager
from magnitude_engine.kv.tiers import Fetch, Tiers
from testkit.disk import FILE, IDENTITY

BLOCK = 2 * PAGE_TOKENS * 8
FILE_BYTES = FILE - 512 + BLOCK
PATIENCE_S = 20.0
# What lies in memory that nobody has written to.
POISON = -1


def number(tenant: str, prefix: Sequence[int]) -> int:
    """Returns what the slot of the last token of `prefix` holds: it depends on the tenant and on every token."""
    text = f"{tenant} {list(prefix)}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


def paged_cache(
    pages: int,
    folder: Path | None = None,
    host_blocks: int = 0,
    disk_blocks: int = 1000,
    options: DiskOptions | None = None,
) -> PagedCache:
    """Returns a cache whose pages hold nonsense before they are written."""
    disk = None
    if folder is not None:
        disk = DiskTier.open(folder, IDENTITY, BLOCK, disk_blocks * FILE_BYTES, options)
    tiers = Tiers(IDENTITY, host_blocks * BLOCK, disk, BLOCK)
    tensor = torch.full((2, pages, PAGE_TOKENS), POISON, dtype=torch.int64)
    return PagedCache(CacheManager(pages, True, tiers), tiers, tensor)


def compute(cache: PagedCache, lease: Lease, ids: Sequence[int], stop: int) -> bool:
    """Does what a step does for the tokens up to `stop`; False where there are no pages."""
    if not cache.manager.extend(lease, stop):
        return False
    cache.apply()
    for position in range(lease.length, stop):
        page, offset = lease.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
        value = number(lease.key.tenant, ids[: position + 1])
        cache._pages[0, page, offset], cache._pages[1, page, offset] = value, ~value
    cache.manager.advance(lease, stop - lease.length)
    return True


def wrong_slots(cache: PagedCache, lease: Lease, ids: Sequence[int]) -> list[int]:
    """Returns the positions of a lease that do not hold what belongs there."""
    cache.apply()
    wrong = []
    for position in range(lease.length):
        page, offset = lease.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
        value = number(lease.key.tenant, ids[: position + 1])
        if cache._pages[:, page, offset].tolist() != [value, ~value]:
            wrong.append(position)
    return wrong


def fetched(cache: PagedCache, key: CacheKey, ids: Sequence[int]) -> Fetch | None:
    """Begins to read what is on disk, and waits until that is done."""
    ready = threading.Event()
    fetch = cache.fetch(key.tenant, ids, 0.0, ready.set)
    assert fetch is None or ready.wait(PATIENCE_S)
    return fetch


def retained(cache: PagedCache, key: CacheKey, ids: Sequence[int]) -> None:
    """Computes all of `ids` and retains it."""
    lease = cache.acquire(key, ids, fetched(cache, key, ids))
    assert compute(cache, lease, ids, len(ids))
    cache.manager.commit(lease, ids)


def evict(cache: PagedCache) -> None:
    """Takes everything that nobody leases off the device."""
    cache.manager.evict(cache.manager.total)
    cache.apply()


def save(cache: PagedCache) -> None:
    """Writes everything retained to disk."""
    assert cache.flush(PATIENCE_S)


def disk_threads(expected: int = 0) -> int:
    """Returns how many threads of disk tiers run, once there are no more than `expected` or a second has passed."""
    for _ in range(100):
        count = sum(1 for thread in threading.enumerate() if thread.name.startswith("kv-disk"))
        if count <= expected:
            break
        time.sleep(0.01)
    return count
