"""The cache manager: what is shared, what is copied, what is dropped."""

from __future__ import annotations

import pytest

from magnitude_engine.kv.manager import CacheKey, CacheManager, Lease, common_prefix, pages_for
from magnitude_engine.kv.pool import PageOp

MAIN = CacheKey("tenant", "session", "main")
IDS = tuple(range(100))


def computed(manager: CacheManager, key: CacheKey, ids: tuple[int, ...]) -> Lease:
    """Returns a lease all of whose tokens are computed."""
    lease = manager.acquire(key, ids)
    assert manager.extend(lease, len(ids))
    manager.advance(lease, len(ids) - lease.length)
    return lease


@pytest.mark.parametrize(("a", "b", "expected"), [([], [], 0), ([1, 2], [1, 2, 3], 2), (IDS, (*IDS[:70], 7), 70)])
def test_common_prefix(a: list[int], b: list[int], expected: int) -> None:
    assert common_prefix(a, b) == expected


def test_the_next_step_takes_the_pages_over_and_stays_in_one_run() -> None:
    manager = CacheManager(32)
    first = computed(manager, MAIN, IDS[:40])
    pages = list(first.pages)
    manager.commit(first, IDS[:40])
    assert (manager.available, manager.retained) == (32, 3)
    second = manager.acquire(MAIN, IDS[:90])
    assert (second.reused, second.pages) == (40, pages)
    assert manager.extend(second, 90)
    assert second.pages == list(range(pages[0], pages[0] + 6))
    assert manager.take_ops() == []
    manager.check_integrity()


def test_one_token_is_always_left_to_compute() -> None:
    manager = CacheManager(8)
    manager.commit(computed(manager, MAIN, IDS[:32]), IDS)
    again = manager.acquire(MAIN, IDS[:32])
    assert again.reused == 31
    manager.check_integrity()


def test_reuse_ends_at_the_first_different_id() -> None:
    manager = CacheManager(8)
    manager.commit(computed(manager, MAIN, IDS[:50]), IDS)
    lease = manager.acquire(MAIN, (*IDS[:37], 999, *IDS[38:60]))
    assert lease.reused == 37
    manager.check_integrity()


def test_a_second_step_of_the_session_shares_what_is_published() -> None:
    manager = CacheManager(16)
    first = computed(manager, MAIN, IDS[:40])
    manager.publish(first, IDS)
    second = manager.acquire(MAIN, IDS[:60])
    assert (second.reused, second.pages) == (32, first.pages[:2])
    assert manager.extend(second, 60)
    assert not set(second.pages[2:]) & set(first.pages)
    manager.check_integrity()
    manager.commit(second, IDS[:60])
    manager.advance(first, 3)
    manager.commit(first, IDS)
    manager.check_integrity()


def test_another_branch_copies_the_partial_page_and_leaves_the_entry() -> None:
    manager = CacheManager(16)
    manager.commit(computed(manager, MAIN, IDS[:40]), IDS)
    branch = manager.acquire(MAIN._replace(branch="other"), IDS[:60])
    source = branch.pages[1] + 1
    assert branch.reused == 40
    assert manager.take_ops() == [PageOp(source, branch.pages[2])]
    assert manager.acquire(MAIN, IDS[:60]).reused == 40
    manager.check_integrity()


def test_forks_share_full_pages_and_copy_the_partial_one() -> None:
    manager = CacheManager(16)
    root = computed(manager, MAIN, IDS[:20])
    child = manager.fork(root, 1)
    assert child is not None
    assert child.pages[0] == root.pages[0]
    assert manager.take_ops() == [PageOp(root.pages[1], child.pages[1])]
    assert (child.length, child.key.choice) == (20, 1)
    manager.check_integrity()


def test_a_fork_without_room_gives_everything_back() -> None:
    manager = CacheManager(2)
    root = computed(manager, MAIN, IDS[:20])
    assert manager.fork(root, 1) is None
    assert manager.take_ops() == []
    manager.check_integrity()
    manager.release(root)
    assert manager.available == 2


def test_the_least_recently_used_entry_loses_its_last_pages_first() -> None:
    manager = CacheManager(8)
    old, new = MAIN._replace(session="old"), MAIN._replace(session="new")
    manager.commit(computed(manager, old, IDS[:64]), IDS)
    manager.commit(computed(manager, new, IDS[:64]), IDS)
    lease = manager.acquire(MAIN, IDS[:33])
    assert manager.extend(lease, 33)
    assert manager.evicted_pages == 3
    manager.release(lease)
    assert manager.acquire(old, IDS[:64]).reused == 16
    assert manager.acquire(new, IDS[:64]).reused == 63
    manager.check_integrity()


def test_pages_in_use_are_never_evicted() -> None:
    manager = CacheManager(4)
    running = computed(manager, MAIN, IDS[:48])
    manager.publish(running, IDS)
    other = manager.acquire(MAIN._replace(session="other"), IDS)
    assert not manager.extend(other, 32)
    assert manager.extend(other, 16)
    manager.check_integrity()


def test_tenants_never_meet_and_their_pages_are_zeroed() -> None:
    manager = CacheManager(2)
    manager.commit(computed(manager, MAIN, IDS[:32]), IDS)
    foreign = manager.acquire(MAIN._replace(tenant="foreign"), IDS[:32])
    assert foreign.reused == 0
    assert manager.extend(foreign, 32)
    assert sorted(manager.take_ops()) == [PageOp(None, 0), PageOp(None, 1)]


def test_broken_numbers_are_not_found_again() -> None:
    manager = CacheManager(4)
    broken = computed(manager, MAIN, IDS[:40])
    manager.publish(broken, IDS)
    manager.forget("tenant", "session")
    manager.release(broken, dirty=True)
    lease = manager.acquire(MAIN, IDS[:40])
    assert lease.reused == 0
    assert manager.extend(lease, 40)
    assert {op for op in manager.take_ops() if op.source is None} == {PageOp(None, p) for p in lease.pages}


def test_without_reuse_nothing_is_retained() -> None:
    manager = CacheManager(4, reuse=False)
    first = computed(manager, MAIN, IDS[:40])
    manager.publish(first, IDS)
    manager.commit(first, IDS)
    assert (manager.retained, manager.available) == (0, 4)
    assert manager.acquire(MAIN, IDS[:40]).reused == 0


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens) == pages
