"""Pages over three tiers: nothing that was computed is lost on the way down, and what comes back is what went."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from magnitude_engine.errors import ConfigError
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.kv.disk import DiskOptions, DiskTier
from magnitude_engine.kv.lease import CacheKey
from magnitude_engine.kv.tiers import HostBlock
from testkit.cache import BLOCK, compute, evict, fetched, paged_cache, retained, save, wrong_slots
from testkit.disk import IDENTITY

KEY = CacheKey("a", "s", "main")
IDS = list(range(100))


def served(cache: PagedCache, ids: list[int], key: CacheKey = KEY) -> tuple[int, int, int]:
    """Returns how many tokens a sequence gets: in all, from host memory and from disk; checks what they are."""
    lease = cache.acquire(key, ids, fetched(cache, key, ids))
    assert wrong_slots(cache, lease, ids) == []
    cache.manager.check_integrity()
    figures = lease.reused, lease.from_host, lease.from_disk
    cache.manager.release(lease)
    return figures


def test_from_the_device_then_host_memory_then_disk(tmp_path: Path) -> None:
    cache = paged_cache(12, tmp_path, host_blocks=12)
    retained(cache, KEY, IDS)
    assert served(cache, IDS) == (99, 0, 0)
    evict(cache)
    assert served(cache, IDS) == (96, 96, 0)
    cache.close()
    again = paged_cache(12, tmp_path, host_blocks=12)
    assert served(again, IDS) == (96, 0, 96)
    assert served(again, [*IDS[:50], 7]) == (48 + 2, 0, 0)
    again.close()


def test_what_was_evicted_before_it_was_saved_is_there_after_a_restart(tmp_path: Path) -> None:
    cache = paged_cache(12, tmp_path, host_blocks=12)
    retained(cache, KEY, IDS)
    evict(cache)
    cache.close()
    again = paged_cache(12, tmp_path)
    assert served(again, IDS) == (96, 0, 96)
    again.close()


def test_a_page_that_was_evicted_just_now_is_found_below() -> None:
    cache = paged_cache(6, host_blocks=12)
    retained(cache, KEY, IDS[:49])
    other = cache.acquire(CacheKey("b", "s", "main"), IDS)
    assert cache.manager.extend(other, 80)
    cache.manager.release(other)
    assert served(cache, IDS[:49]) == (48, 32, 0)


def test_everything_is_written_also_where_the_queue_is_short(tmp_path: Path) -> None:
    options = DiskOptions(queue_bytes=2 * BLOCK)
    cache = paged_cache(12, tmp_path, options=options)
    retained(cache, KEY, IDS)
    assert cache.unsaved
    save(cache)
    assert not cache.unsaved
    evict(cache)
    assert served(cache, IDS) == (96, 0, 96)
    cache.close()


def test_a_disk_that_takes_nothing_does_not_hold_up_the_end(tmp_path: Path) -> None:
    options = DiskOptions(queue_bytes=0)
    cache = paged_cache(12, tmp_path, options=options)
    retained(cache, KEY, IDS)
    assert not cache.flush(60)
    assert cache.unsaved
    cache.close()


def test_a_damaged_block_in_host_memory_is_a_miss() -> None:
    cache = paged_cache(12, host_blocks=12)
    retained(cache, KEY, IDS)
    digests = cache.manager.chain("a", IDS)
    evict(cache)
    host = cache.tiers._host
    assert host is not None
    block = host._blocks[digests[2]]
    changed = bytes([block.payload[0] ^ 1]) + bytes(block.payload[1:])
    host._blocks[digests[2]] = HostBlock(block.name, changed, block.checksum)
    assert served(cache, IDS) == (32, 32, 0)
    assert host.rejected == 1


def test_a_sequence_with_few_pages_gets_the_beginning_of_what_is_below() -> None:
    cache = paged_cache(6, host_blocks=12)
    retained(cache, KEY, IDS[:90])
    evict(cache)
    busy = cache.acquire(CacheKey("b", "s", "main"), IDS)
    assert compute(cache, busy, IDS, 60)
    assert served(cache, IDS[:90]) == (32, 32, 0)
    assert wrong_slots(cache, busy, IDS) == []
    cache.manager.release(busy)


def test_what_a_broken_sequence_held_is_found_nowhere(tmp_path: Path) -> None:
    cache = paged_cache(12, tmp_path, host_blocks=12)
    retained(cache, KEY, IDS)
    save(cache)
    evict(cache)
    lease = cache.acquire(KEY, IDS, fetched(cache, KEY, IDS))
    assert lease.reused == 96
    cache.manager.forget(lease)
    assert served(cache, IDS) == (0, 0, 0)
    cache.close()
    again = paged_cache(12, tmp_path)
    assert served(again, IDS) == (0, 0, 0)
    again.close()


@pytest.mark.thorough
def test_a_folder_is_waited_for_while_its_owner_ends(tmp_path: Path) -> None:
    owner = DiskTier.open(tmp_path, IDENTITY, BLOCK, 10**6)
    ending = threading.Timer(0.2, owner.close)
    ending.start()
    heir = DiskTier.open(tmp_path, IDENTITY, BLOCK, 10**6, DiskOptions(lock_wait_s=20))
    with pytest.raises(ConfigError, match=r"another process .* uses the cache folder .* give this one another folder"):
        DiskTier.open(tmp_path, IDENTITY, BLOCK, 10**6, DiskOptions(lock_wait_s=0.1))
    heir.close()
    ending.join()
