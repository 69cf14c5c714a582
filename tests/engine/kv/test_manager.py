"""The cache manager: what is shared, what is copied, what is dropped."""

from __future__ import annotations

import pytest

from magnitude_engine.kv.lease import CacheKey, Lease, pages_for
from magnitude_engine.kv.manager import CacheManager
from magnitude_engine.kv.pool import Fill, IntegrityError, PageOp, Spill
from magnitude_engine.kv.tiers import Tiers

MAIN = CacheKey("tenant", "session", "main")
IDS = tuple(range(100))


def computed(manager: CacheManager, key: CacheKey, ids: tuple[int, ...]) -> Lease:
    """Returns a lease all of whose tokens are computed."""
    lease = manager.acquire(key, ids)
    assert manager.extend(lease, len(ids))
    manager.advance(lease, len(ids) - lease.length)
    return lease


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


@pytest.mark.parametrize("key", [MAIN, MAIN._replace(branch="other"), MAIN._replace(session="other")])
def test_only_one_sequence_writes_on_the_last_page_and_others_copy_it(key: CacheKey) -> None:
    manager = CacheManager(16)
    manager.commit(computed(manager, MAIN, IDS[:40]), IDS)
    writer = manager.acquire(MAIN, IDS[:60])
    other = manager.acquire(key, (*IDS[:40], 7, 8, 9))
    assert (writer.reused, other.reused) == (40, 40)
    assert other.pages[:2] == writer.pages[:2]
    assert manager.take_ops() == [PageOp(writer.pages[2], other.pages[2])]
    manager.check_integrity()
    manager.advance(writer, 5)
    manager.commit(writer, IDS)
    manager.advance(other, 2)
    manager.commit(other, (*IDS[:40], 7, 8, 9))
    manager.check_integrity()
    assert manager.retained == 4
    assert manager.acquire(key, IDS[:60]).reused == 45
    assert manager.acquire(key, (*IDS[:40], 7, 8, 9)).reused == 42


def test_what_a_released_writer_started_from_is_still_found() -> None:
    manager = CacheManager(16)
    manager.commit(computed(manager, MAIN, IDS[:20]), IDS)
    writer = computed(manager, MAIN, IDS[:60])
    manager.release(writer)
    assert manager.retained == 2
    assert manager.acquire(MAIN, IDS[:60]).reused == 20
    manager.check_integrity()


def test_the_beginning_of_a_full_page_is_copied() -> None:
    manager = CacheManager(16)
    manager.commit(computed(manager, MAIN, IDS[:64]), IDS)
    lease = manager.acquire(MAIN._replace(session="other"), (*IDS[:35], 500, 501))
    assert (lease.reused, len(lease.pages)) == (35, 3)
    assert [op.target for op in manager.take_ops()] == lease.pages[2:]
    manager.check_integrity()


@pytest.mark.thorough
def test_sixteen_branches_store_a_long_prefix_once() -> None:
    manager = CacheManager(400)
    prefix = tuple(range(6000))
    manager.commit(computed(manager, MAIN, prefix), prefix)
    assert manager.available - manager.retained == 400 - 375
    branches = []
    for number in range(16):
        ids = (*prefix, *range(10_000 + number, 10_010 + number))
        branch = computed(manager, MAIN._replace(branch=str(number)), ids)
        assert branch.reused == 6000
        branches.append((branch, ids))
    assert manager.available == 400 - 375 - 16
    for branch, ids in branches:
        manager.commit(branch, ids)
    assert (manager.available, manager.retained) == (400, 375 + 16)
    manager.check_integrity()


def test_two_that_computed_the_same_keep_it_once() -> None:
    manager = CacheManager(16)
    first = computed(manager, MAIN, IDS[:40])
    second = computed(manager, MAIN._replace(session="other"), IDS[:40])
    manager.publish(first, IDS)
    manager.publish(second, IDS)
    assert second.pages[:2] == first.pages[:2]
    assert manager.available == 16 - 4
    manager.check_integrity()
    manager.commit(second, IDS)
    manager.commit(first, IDS)
    assert manager.retained == 3
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


def test_the_least_recently_used_leaf_loses_its_last_pages_first() -> None:
    manager = CacheManager(8)
    old, new = IDS[:64], IDS[30:94]
    manager.commit(computed(manager, MAIN, old), old)
    manager.commit(computed(manager, MAIN, new), new)
    lease = manager.acquire(MAIN._replace(tenant="another"), IDS[:33])
    assert manager.extend(lease, 33)
    assert manager.evicted.pages == 3
    manager.release(lease)
    assert manager.acquire(MAIN, old).reused == 16
    assert manager.acquire(MAIN, new).reused == 63
    manager.check_integrity()


def test_a_shared_prefix_outlives_the_branch_that_was_not_used() -> None:
    manager = CacheManager(8)
    left, right = IDS[:64], (*IDS[:32], *range(500, 532))
    manager.commit(computed(manager, MAIN, left), left)
    manager.commit(computed(manager, MAIN._replace(branch="right"), right), right)
    assert manager.evict(4) == 4
    manager.check_integrity()
    assert manager.acquire(MAIN, left).reused == 32
    assert manager.acquire(MAIN, right).reused == 32


@pytest.mark.slow
def test_thousands_of_pages_are_evicted_one_by_one() -> None:
    manager = CacheManager(4000)
    for number in range(1000):
        ids = tuple(range(number * 64, number * 64 + 64))
        manager.commit(computed(manager, MAIN, ids), ids)
    seen = 0
    while manager.evict(1):
        seen += 1
    assert (seen, manager.retained, manager.available) == (4000, 0, 4000)
    manager.check_integrity()


def test_forks_go_on_together_with_the_retained_pages() -> None:
    manager = CacheManager(16)
    root = computed(manager, MAIN, IDS[:32])
    child = manager.fork(root, 1)
    assert child is not None
    manager.commit(computed(manager, MAIN._replace(session="other"), IDS[:16]), IDS)
    manager.publish(root, IDS)
    assert child.pages == root.pages
    manager.check_integrity()
    manager.commit(root, IDS)
    assert manager.evict(16) == 0
    manager.release(child)
    assert manager.evict(16) == 2


def test_pages_in_use_are_never_evicted() -> None:
    manager = CacheManager(4)
    running = computed(manager, MAIN, IDS[:48])
    manager.publish(running, IDS)
    other = manager.acquire(MAIN._replace(tenant="other"), IDS)
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
    manager.forget(broken)
    lease = manager.acquire(MAIN, IDS[:40])
    assert lease.reused == 0
    assert manager.extend(lease, 40)
    assert {op for op in manager.take_ops() if op.source is None} == {PageOp(None, p) for p in lease.pages}
    manager.check_integrity()


def test_what_a_broken_sequence_started_from_goes_with_all_behind_it() -> None:
    manager = CacheManager(16)
    other = (*IDS[:20], *range(500, 520))
    kept = tuple(range(700, 740))
    for ids in (IDS[:40], other, kept):
        manager.commit(computed(manager, MAIN, ids), ids)
    manager.forget(computed(manager, MAIN, IDS[:60]))
    assert [manager.acquire(MAIN, ids).reused for ids in (IDS[:40], other, kept)] == [0, 0, 39]
    manager.check_integrity()


def test_the_source_of_a_broken_copy_is_not_found_again() -> None:
    manager = CacheManager(16)
    manager.commit(computed(manager, MAIN, IDS[:30]), IDS)
    broken = manager.acquire(MAIN, (*IDS[:9], 500))
    assert broken.reused == 9
    manager.forget(broken)
    assert manager.retained == 0
    assert manager.acquire(MAIN, IDS[:30]).reused == 0
    manager.check_integrity()


def test_a_sequence_beside_a_broken_one_retains_nothing_of_their_shared_pages() -> None:
    manager = CacheManager(16)
    root = computed(manager, MAIN, IDS[:40])
    child = manager.fork(root, 1)
    assert child is not None
    manager.forget(root)
    assert manager.extend(child, 60)
    manager.advance(child, 20)
    manager.publish(child, IDS)
    manager.check_integrity()
    manager.commit(child, IDS)
    assert (manager.retained, manager.available) == (0, 16)
    manager.check_integrity()


@pytest.mark.parametrize("damage", ["ids", "page", "link", "holder"])
def test_damaged_accounts_are_found(damage: str) -> None:
    manager = CacheManager(8)
    manager.commit(computed(manager, MAIN, IDS[:40]), IDS)
    lease = manager.acquire(MAIN, IDS[:60])
    node = manager._tree.at(lease.pages[1])
    assert node is not None
    if damage == "ids":
        node.ids = node.ids[:5]
    elif damage == "page":
        node.page = lease.pages[0]
    elif damage == "link":
        node.children[0].parent = None
    else:
        lease.pages.append(lease.pages[0])
    with pytest.raises(IntegrityError):
        manager.check_integrity()


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


def test_what_a_session_left_behind_goes_first_and_what_others_share_stays() -> None:
    manager = CacheManager(32)
    retention = manager.retention
    old, new = IDS[:80], (*IDS[:32], *range(500, 548))
    for ids in (old, new):
        manager.leave(retention.resumed(MAIN.owner, manager.chain("tenant", ids), 0.0))
        manager.commit(computed(manager, MAIN, ids), ids)
        retention.paused(MAIN.owner, manager.chain("tenant", ids), [], 0.0)
    other = MAIN._replace(session="other")
    manager.commit(computed(manager, other, IDS[:48]), IDS[:48])
    assert manager.evict(2) == 2
    assert manager.evicted.dead == 2
    assert manager.cached_pages(manager.chain("tenant", old)) == (3, 0)
    assert manager.cached_pages(manager.chain("tenant", new)) == (5, 0)
    manager.leave(retention.pruned("tenant", "session", None, 1.0))
    assert manager.evict(3) == 3
    assert manager.cached_pages(manager.chain("tenant", IDS[:48])) == (3, 0)
    assert manager.evicted == (0, 5, 0)
    manager.check_integrity()


def test_pages_are_spilled_when_they_are_evicted_and_filled_when_they_are_needed_again() -> None:
    identity = b"i" * 32
    tiers = Tiers(identity, host_bytes=4 * 64, block_bytes=64)
    manager = CacheManager(8, tiers=tiers)
    manager.commit(computed(manager, MAIN, IDS[:70]), IDS)
    assert manager.evict(8) == 5
    spills = [op for op in manager.take_ops() if isinstance(op, Spill)]
    assert len(spills) == 4
    for spill in spills:
        tiers.keep(spill.name, bytes([spill.page]) * 64)
    lease = manager.acquire(MAIN, IDS[:90])
    assert (lease.length, lease.from_host, lease.from_disk) == (64, 64, 0)
    fills = [op for op in manager.take_ops() if isinstance(op, Fill)]
    pages = {spill.name.ids: spill.page for spill in spills}
    assert [fill.payload[0] for fill in fills] == [pages[IDS[at : at + 16]] for at in range(0, 64, 16)]
    assert manager.acquire(MAIN._replace(tenant="another"), IDS[:90]).length == 0
    manager.check_integrity()


def test_a_pruned_branch_frees_what_nobody_else_used_and_nobody_leases() -> None:
    manager = CacheManager(32)
    one, two = MAIN._replace(branch="one"), MAIN._replace(branch="two")
    ends = {}
    manager.commit(computed(manager, MAIN, IDS[:40]), IDS)
    for key in (one, two):
        ids = (*IDS[:40], *range(200, 230), *([key == one] * 25))
        lease = computed(manager, key, ids)
        chain = manager.chain(key.tenant, ids)
        manager.retention.resumed(key.owner, chain, 0.0)
        manager.commit(lease, ids)
        manager.retention.paused(key.owner, chain, (), 0.0)
        ends[key] = manager.retention.pruned(key.tenant, key.session, key.branch, 0.0)
    held = manager.total - manager.free
    running = manager.acquire(one, (*IDS[:40], *range(200, 230), *([True] * 25), 7))
    manager.prune(one.owner, ends[one])
    assert manager.total - manager.free >= held
    manager.release(running)
    manager.prune(one.owner, ends[one])
    # Four pages and a part hold what both branches begin with, and the beginnings of `one`'s own tokens.
    assert held - (manager.total - manager.free) == 2
    manager.check_integrity()
    manager.prune(two.owner, ends[two])
    assert manager.total - manager.free == 4
    assert manager.evicted.dead == 4
    manager.check_integrity()
    assert manager.acquire(MAIN, IDS[:60]).reused == 40
