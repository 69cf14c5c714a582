"""Any order of calls on a cache of three tiers: every slot that a sequence reads holds what belongs there, and what was
retained is found as long as a plain dictionary of prefixes says so, wherever it went meanwhile.

`AmpleTiers` never has to drop a block, so there everything must be found; `TightTiers` drops most, so there nothing
may be found that was not retained, and nothing may be wrong.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.lease import CacheKey, Lease, pages_for
from magnitude_engine.kv.radix import Node
from testkit.cache import compute, disk_threads, evict, fetched, paged_cache, wrong_slots
from testkit.disk import MEMORY

pytestmark = pytest.mark.thorough

PAGES = 10
KEYS = st.builds(CacheKey, st.sampled_from("ab"), st.sampled_from("st"), st.sampled_from(["main", "x"]))
# Long common beginnings that fill pages, and short ends that differ inside of them.
BASES = [[0] * 80, [0] * 30 + [1, 2] * 25, list(range(80))]
ENDS = [[], [0, 1], [7] * 20]
IDS = st.builds(
    lambda base, cut, end: [*base[:cut], *end], st.sampled_from(BASES), st.integers(1, 80), st.sampled_from(ENDS)
)
Prefix = tuple[str, tuple[int, ...]]
HOW = ("fetch", "fetch", "no fetch", "cancelled fetch")


def pages_of(tenant: str, ids: Iterable[int]) -> list[Prefix]:
    """Returns the prefixes that end with a full page, the shortest first."""
    whole = tuple(ids)
    return [(tenant, whole[:end]) for end in range(PAGE_TOKENS, len(whole) + 1, PAGE_TOKENS)]


def begins(prefix: Prefix, other: Prefix) -> bool:
    """Returns whether `other` goes on from `prefix`, or is it."""
    return other[0] == prefix[0] and other[1][: len(prefix[1])] == prefix[1]


class Tiers(RuleBasedStateMachine):
    """Random steps of several sessions of two tenants on a few pages with two tiers below.

    Attributes:
        kept: the dictionary of prefixes that must be found where tiers are ample.
        possible: those that may be found.
        durable: those that were on disk when it was flushed last.
        found: how many tokens came from where.
    """

    HOST_BLOCKS = 0
    DISK_BLOCKS = 0
    AMPLE = False
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.threads = disk_threads()
        self.home = Path(tempfile.mkdtemp(dir=MEMORY))
        self.folder = self.home / "0"
        self.cache = paged_cache(PAGES, self.folder, self.HOST_BLOCKS, self.DISK_BLOCKS)
        self.ids: dict[Lease, list[int]] = {}
        self.kept: set[Prefix] = set()
        self.possible: set[Prefix] = set()
        self.durable: set[Prefix] = set()
        self.found = {"device": 0, "host": 0, "disk": 0, "evicted": 0, "killed": 0}

    @rule(target=running, key=KEYS, ids=IDS, how=st.sampled_from(HOW))
    def acquire(self, key: CacheKey, ids: list[int], how: str) -> Lease:
        fetch = None
        if how == "fetch":
            fetch = fetched(self.cache, key, ids)
        elif how == "cancelled fetch":
            fetch = self.cache.fetch(key.tenant, ids, 0.0, lambda: None)
            if fetch is not None:
                fetch.ticket.cancel()
        lease = self.cache.acquire(key, ids, fetch)
        self.ids[lease] = ids
        wanted = pages_of(key.tenant, ids[:-1])
        full = lease.reused // PAGE_TOKENS
        assert full <= _leading(wanted, self.possible)
        if self.AMPLE and how == "fetch":
            assert full >= _leading(wanted, self.kept) or self.cache.manager.available == 0
        assert lease.reused == lease.length
        assert lease.from_host + lease.from_disk <= lease.reused
        self.found["host"] += lease.from_host
        self.found["disk"] += lease.from_disk
        self.found["device"] += lease.reused - lease.from_host - lease.from_disk
        return lease

    @rule(lease=running, count=st.integers(1, 60))
    def compute(self, lease: Lease, count: int) -> None:
        ids = self.ids.get(lease)
        if ids is not None:
            stop = min(lease.length + count, len(ids))
            free = self.cache.manager.available
            assert compute(self.cache, lease, ids, stop) == (pages_for(stop) - len(lease.pages) <= free)

    @rule(lease=running, ids=IDS)
    def generate(self, lease: Lease, ids: list[int]) -> None:
        if lease in self.ids:
            self.ids[lease] = self.ids[lease] + ids

    @rule(target=running, lease=running, choice=st.integers(1, 3))
    def fork(self, lease: Lease, choice: int) -> Lease:
        ids = self.ids.get(lease)
        child = None if ids is None else self.cache.manager.fork(lease, choice)
        if ids is None or child is None:
            return lease
        self.ids[child] = list(ids)
        return child

    @rule(lease=running)
    def publish(self, lease: Lease) -> None:
        if lease in self.ids:
            self._keep(lease)
            self.cache.manager.publish(lease, self.ids[lease])

    @rule(lease=consumes(running), how=st.sampled_from(["commit", "commit", "release"]))
    def end(self, lease: Lease, how: str) -> None:
        """A sequence ends; `release` is a rollback: what it computed since it was published last is dropped."""
        if lease not in self.ids:
            return
        if how == "commit":
            self._keep(lease)
            self.cache.manager.commit(lease, self.ids[lease])
        else:
            self.cache.manager.release(lease)
        del self.ids[lease]

    @rule(lease=consumes(running))
    def forget(self, lease: Lease) -> None:
        """Its numbers are broken: what it held is found nowhere, on no tier, nor what is built on it on the device."""
        if lease not in self.ids:
            return
        tree = self.cache.manager._tree
        held = [node for node in map(tree.at, lease.pages) if node is not None]
        if lease.source is not None and tree.at(lease.source.page) is lease.source:
            held.append(lease.source)
        broken = [_spelled(node) for node in held]
        nodes = [node for page in range(PAGES) if (node := tree.at(page)) is not None]
        gone = {p for p in map(_spelled, nodes) if any(begins(b, p) for b in broken)}
        self.cache.manager.forget(lease)
        self.kept -= {p for p in self.kept if any(begins(b, p) for b in broken)}
        self.possible -= gone
        self.durable &= self.kept
        del self.ids[lease]

    @rule(pages=st.integers(1, PAGES))
    def evict(self, pages: int) -> None:
        expected = min(pages, self.cache.manager.retained)
        assert self.cache.manager.evict(pages) == expected
        self.found["evicted"] += expected

    @rule(pages=st.integers(1, PAGES))
    def save(self, pages: int) -> None:
        self.cache.save(pages)

    @rule()
    def flush(self) -> None:
        assert self.cache.flush(20)
        self.durable = set(self.kept)

    @rule()
    def reset(self) -> None:
        """The device's pages are in doubt; what is below is not."""
        self.cache.manager.reset()
        self.ids.clear()
        self._stays_below()

    @rule()
    def restart(self) -> None:
        """Ends and starts on the same folder; the next process' memory holds nonsense."""
        self.cache.close()
        self._start()

    @rule()
    def kill(self) -> None:
        """Goes on with what is in the folder in the midst of everything."""
        copy = self.home / str(len(list(self.home.iterdir())))
        shutil.copytree(self.folder, copy, copy_function=_copied)
        self.cache.close()
        self.folder = copy
        self._start()
        self._stays_below()
        if self.AMPLE:
            assert self.durable <= self.kept
        self.found["killed"] += 1

    def _start(self) -> None:
        self.ids.clear()
        self.cache = paged_cache(PAGES, self.folder, self.HOST_BLOCKS, self.DISK_BLOCKS)

    def _stays_below(self) -> None:
        """Forgets the prefixes that no lower tier holds."""
        tiers = self.cache.tiers
        assert tiers._disk is not None
        assert tiers._host is not None
        keys = {prefix: self.cache.manager.chain(*prefix)[-1] for prefix in self.possible}
        below = {p for p, key in keys.items() if key in tiers._host or tiers._disk.holds(key)}
        self.kept &= below
        self.possible &= below

    def _keep(self, lease: Lease) -> None:
        """Notes what a lease retains: its full pages before the first with broken numbers."""
        pool = self.cache.manager._pool
        sound = next((i for i, page in enumerate(lease.pages) if pool.spoiled(page)), len(lease.pages))
        prefixes = pages_of(lease.key.tenant, self.ids[lease][: min(lease.length, sound * PAGE_TOKENS)])
        self.kept.update(prefixes)
        self.possible.update(prefixes)

    @invariant()
    def every_sequence_reads_its_own_prefix(self) -> None:
        for lease, ids in self.ids.items():
            assert wrong_slots(self.cache, lease, ids) == []

    @invariant()
    def accounts_agree(self) -> None:
        self.cache.apply()
        self.cache.manager.check_integrity()
        host, disk = self.cache.tiers._host, self.cache.tiers._disk
        assert host is not None
        assert disk is not None
        assert host.bytes == sum(len(block.payload) for block in host._blocks.values()) <= host.limit_bytes
        assert host.rejected == disk.stats.rejected == 0

    def teardown(self) -> None:
        manager = self.cache.manager
        for lease, ids in self.ids.items():
            manager.commit(lease, ids)
        assert manager.available == PAGES
        evict(self.cache)
        assert (manager.free, manager.retained, len(manager._leases)) == (PAGES, 0, 0)
        manager.check_integrity()
        disk = self.cache.tiers._disk
        self.cache.close()
        assert disk is not None
        assert len(disk._reader._tickets) == 0
        assert disk_threads(self.threads) <= self.threads
        shutil.rmtree(self.home)


class AmpleTiers(Tiers):
    """Below the pages there is room for everything."""

    HOST_BLOCKS = 2000
    DISK_BLOCKS = 2000
    AMPLE = True


class TightTiers(Tiers):
    """Blocks are dropped on every tier all the time."""

    HOST_BLOCKS = 3
    DISK_BLOCKS = 8


def _leading(wanted: list[Prefix], known: set[Prefix]) -> int:
    return next((i for i, prefix in enumerate(wanted) if prefix not in known), len(wanted))


def _spelled(node: Node) -> Prefix:
    """Returns what a page holds the end of."""
    tenant, ids, at = node.tenant, node.ids, node.parent
    while at is not None:
        ids, at = at.ids + ids, at.parent
    return tenant, ids


def _copied(source: str, target: str) -> None:
    """Copies a file unless it has gone or was renamed meanwhile, as it may while the writer goes on."""
    try:
        shutil.copyfile(source, target)
    except FileNotFoundError:
        return


def walk(machine: Tiers, seed: int, steps: int) -> Tiers:
    """Takes random steps with few leases at once, so that, unlike Hypothesis' programs, most find and evict."""
    draw = random.Random(seed)
    leases: list[Any] = []

    def ids() -> list[int]:
        return [*draw.choice(BASES)[: draw.randint(1, 80)], *draw.choice(ENDS)]

    def step(kind: str) -> None:
        if kind == "acquire" and len(leases) < 4:
            key = CacheKey(draw.choice("ab"), draw.choice("st"), "main")
            leases.append(machine.acquire(key, ids(), draw.choice(HOW)))
        elif kind in ("evict", "save"):
            getattr(machine, kind)(draw.randint(1, PAGES))
        elif kind in ("flush", "reset", "restart", "kill"):
            getattr(machine, kind)()
        elif kind != "acquire" and leases:
            lease = draw.choice(leases)
            if kind == "compute":
                machine.compute(lease, draw.randint(20, 120))
            elif kind == "generate":
                machine.generate(lease, ids()[:20])
            elif kind == "fork":
                leases.append(machine.fork(lease, 1))
            elif kind == "publish":
                machine.publish(lease)
            else:
                leases.remove(lease)
                machine.forget(lease) if kind == "forget" else machine.end(lease, kind)

    kinds = {"acquire": 20, "compute": 32, "commit": 20, "release": 6, "generate": 6, "fork": 8, "publish": 10}
    rare = {"forget": 2, "evict": 8, "save": 4, "flush": 2, "reset": 1, "restart": 1, "kill": 1}
    for kind in draw.choices([*kinds, *rare], [*kinds.values(), *rare.values()], k=steps):
        step(kind)
        leases = [lease for lease in leases if lease in machine.ids]
        machine.accounts_agree()
        machine.every_sequence_reads_its_own_prefix()
    machine.teardown()
    return machine


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AmpleTiers, TightTiers])
def test_random_walks(kind: type[Tiers]) -> None:
    machines = [walk(kind(), seed, 120) for seed in range(5)]
    for what in ("device", "host", "disk", "evicted", "killed"):
        assert sum(m.found[what] for m in machines) > 0, what


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AmpleTiers, TightTiers])
def test_many_random_walks(kind: type[Tiers]) -> None:
    for seed in range(1000, 1050):
        walk(kind(), seed, 200)


QUICK = settings(max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
LONG = settings(QUICK, max_examples=60, stateful_step_count=60)


class TestAmpleTiers(AmpleTiers.TestCase):  # type: ignore[misc,valid-type]
    settings = QUICK


class TestTightTiers(TightTiers.TestCase):  # type: ignore[misc,valid-type]
    settings = QUICK


@pytest.mark.slow
class TestAmpleTiersLong(AmpleTiers.TestCase):  # type: ignore[misc,valid-type]
    settings = LONG


@pytest.mark.slow
class TestTightTiersLong(TightTiers.TestCase):  # type: ignore[misc,valid-type]
    settings = LONG
