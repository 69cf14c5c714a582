"""Any order of calls keeps the counts right, the contents of every page what its readers expect, and what is found
equal to what a plain dictionary of prefixes holds.

The model of a page is what a real one holds: per slot the whole token prefix that its key and value depend on.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.lease import CacheKey, Lease, pages_for
from magnitude_engine.kv.manager import CacheManager

pytestmark = pytest.mark.thorough

PAGES = 12
KEYS = st.builds(CacheKey, st.sampled_from("ab"), st.sampled_from("st"), st.sampled_from(["main", "x"]))
# Two symbols and short runs make common prefixes, and differences inside pages, frequent.
PARTS = [(0,) * 11, (1,) * 7, (0, 1), (2,)]
IDS = st.lists(st.sampled_from(PARTS), min_size=1, max_size=9).map(lambda parts: [i for part in parts for i in part])
Prefix = tuple[str, tuple[int, ...]]
Slot = Prefix | None


def shared(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Returns the length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class Retained:
    """A dictionary from (tenant, prefix) to [page of its last tokens, number of its last use]; scans everything."""

    def __init__(self) -> None:
        self.entries: dict[Prefix, list[int]] = {}
        self.clock = 0

    def path(self, key: Prefix) -> list[Prefix]:
        """Returns the entries of the pages that hold a prefix, the first page first."""
        tenant, ids = key
        cuts = [*range(PAGE_TOKENS, len(ids), PAGE_TOKENS), len(ids)] if ids else []
        return [(tenant, ids[:cut]) for cut in cuts]

    def longest(self, tenant: str, ids: tuple[int, ...]) -> tuple[int, Prefix | None]:
        """Returns the longest common prefix with any entry, and the entry whose page holds the end of it.

        Of several the one next before `ids` in the order of ids, as the tree's choice is told by what it evicts.
        """
        common = {k: shared(k[1], ids) for k in self.entries if k[0] == tenant}
        best = max(common.values(), default=0)
        if not best:
            return 0, None
        end = pages_for(best) * PAGE_TOKENS
        ties = {k[1][:end] for k, length in common.items() if length == best}
        before = [k for k in ties if k < ids[:end]]
        return best, (tenant, max(before) if before else min(ties))

    def use(self, key: Prefix, length: int) -> None:
        """Counts the pages that serve the first `length` tokens of `key` as used."""
        self.clock += 1
        for entry in self.path(key):
            if len(entry[1]) - length < PAGE_TOKENS and entry in self.entries:
                self.entries[entry][1] = self.clock

    def add(self, tenant: str, ids: tuple[int, ...], pages: list[int]) -> None:
        """Retains a sequence; of two prefixes within one page the longer one stays."""
        self.clock += 1
        for key, page in zip(self.path((tenant, ids)), pages, strict=False):
            covering = [k for k in self.entries if k[0] == tenant and k[1][: len(key[1])] == key[1]]
            covering = [k for k in covering if pages_for(len(k[1])) == pages_for(len(key[1]))]
            if covering:
                self.entries[min(covering)][1] = self.clock
                continue
            for shorter in [k for k in self.entries if k[0] == tenant and key[1][: len(k[1])] == k[1]]:
                if len(shorter[1]) % PAGE_TOKENS:
                    del self.entries[shorter]
            self.entries[key] = [page, self.clock]

    def below(self, key: Prefix) -> list[Prefix]:
        """Returns the entries that begin with `key`, itself included."""
        return [k for k in self.entries if k[0] == key[0] and k[1][: len(key[1])] == key[1]]


class Machine(RuleBasedStateMachine):
    """Random steps of several sessions of two tenants on a pool of a few pages."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.manager = CacheManager(PAGES)
        self.model = Retained()
        self.slots: list[list[Slot]] = [[None] * PAGE_TOKENS for _ in range(PAGES)]
        self.ids: dict[Lease, list[int]] = {}
        self.found = 0
        # How many tokens of a lease may be retained, where it shares pages with one whose numbers were broken.
        self.spoiled: dict[Lease, int] = {}

    def _apply_ops(self) -> None:
        for source, target in self.manager.take_ops():
            self.slots[target] = [None] * PAGE_TOKENS if source is None else list(self.slots[source])

    def _in_use(self) -> set[int]:
        return {page for lease in self.ids for page in lease.pages}

    def _follow_evictions(self, before: int, in_use: set[int]) -> None:
        """What was evicted is any entry that nobody used and nothing depended on; retention chooses which."""
        gone = [key for key, (page, _) in self.model.entries.items() if self._spelled(page) != key]
        assert len(gone) == self.manager.evicted.pages - before
        for key in sorted(gone, key=lambda key: -len(key[1])):
            assert self.model.entries[key][0] not in in_use
            assert self.model.below(key) == [key]
            del self.model.entries[key]

    def _spelled(self, page: int) -> Prefix | None:
        """Returns what the tree says that a page holds the end of."""
        node, tenant, ids = self.manager._tree.at(page), "", ()
        if node is None:
            return None
        while node is not None:
            tenant, ids, node = node.tenant, node.ids + ids, node.parent
        return tenant, ids

    def _retained(self, lease: Lease, length: int) -> None:
        """The model's part of publish and commit: nothing is retained from a spoiled page on."""
        length = min(length, self.spoiled.get(lease, length))
        if length:
            self.model.add(lease.key.tenant, tuple(self.ids[lease][:length]), list(lease.pages))

    @rule(target=running, key=KEYS, ids=IDS)
    def acquire(self, key: CacheKey, ids: list[int]) -> Lease:
        wanted = tuple(ids[: len(ids) - 1])
        expected, entry = self.model.longest(key.tenant, wanted)
        before, in_use = self.manager.evicted.pages, self._in_use()
        lease = self.manager.acquire(key, ids)
        if entry is not None:
            self.model.use(entry, expected)
        full = [self.model.entries[k][0] for k in self.model.path((key.tenant, wanted[: expected // 16 * 16]))]
        assert lease.pages[: len(full)] == full
        if lease.reused != expected:
            assert (lease.reused, self.manager.available) == (expected // 16 * 16, 0)
        assert lease.reused == lease.length
        self._follow_evictions(before, in_use | set(full))
        self.ids[lease] = ids
        self.found += lease.reused > 0
        return lease

    @rule(lease=running, count=st.integers(1, 40))
    def compute(self, lease: Lease, count: int) -> None:
        """What a step does: pages, operations, writes."""
        ids = self.ids.get(lease)
        if ids is None:
            return
        stop = min(lease.length + count, len(ids))
        before, in_use = self.manager.evicted.pages, self._in_use()
        if not self.manager.extend(lease, stop):
            assert self.manager.available < pages_for(stop) - len(lease.pages)
            return
        self._follow_evictions(before, in_use)
        self._apply_ops()
        for position in range(lease.length, stop):
            page, offset = lease.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
            self.slots[page][offset] = (lease.key.tenant, tuple(ids[: position + 1]))
        self.manager.advance(lease, stop - lease.length)

    @rule(lease=running, ids=IDS)
    def generate(self, lease: Lease, ids: list[int]) -> None:
        """The sequence grows."""
        if lease in self.ids:
            self.ids[lease] = self.ids[lease] + ids

    @rule(target=running, lease=running, choice=st.integers(1, 3))
    def fork(self, lease: Lease, choice: int) -> Lease:
        ids = self.ids.get(lease)
        if ids is None:
            return lease
        before, in_use = self.manager.evicted.pages, self._in_use()
        child = self.manager.fork(lease, choice)
        self._follow_evictions(before, in_use)
        if child is None:
            assert self.manager.available == 0
            return lease
        self.ids[child] = list(ids)
        if lease in self.spoiled:
            self.spoiled[child] = self.spoiled[lease]
        return child

    @rule(lease=running)
    def publish(self, lease: Lease) -> None:
        if lease not in self.ids:
            return
        full = lease.length // PAGE_TOKENS * PAGE_TOKENS
        self._retained(lease, full)
        self.manager.publish(lease, self.ids[lease])
        sound = min(full, self.spoiled.get(lease, full))
        path = self.model.path((lease.key.tenant, tuple(self.ids[lease][:sound])))
        assert [self.model.entries[k][0] for k in path] == lease.pages[: len(path)]

    @rule(lease=consumes(running), how=st.sampled_from(["commit", "commit", "release"]))
    def end(self, lease: Lease, how: str) -> None:
        if lease not in self.ids:
            return
        if how == "commit":
            self._retained(lease, lease.length)
            self.manager.commit(lease, self.ids[lease])
        else:
            self.manager.release(lease)
        del self.ids[lease]

    @rule(lease=consumes(running))
    def forget(self, lease: Lease) -> None:
        """The sequence's numbers are broken: what it held goes, and what was built on it."""
        if lease not in self.ids:
            return
        broken = set(lease.pages)
        tainted = [k for k, (page, _) in self.model.entries.items() if page in broken or self._is_source(lease, k)]
        for key in tainted:
            for gone in self.model.below(key):
                broken.add(self.model.entries.pop(gone)[0])
        self.manager.forget(lease)
        del self.ids[lease]
        for other in self.ids:
            first = next((i for i, page in enumerate(other.pages) if page in broken), None)
            if first is not None:
                self.spoiled[other] = min(first * PAGE_TOKENS, self.spoiled.get(other, first * PAGE_TOKENS))

    def _is_source(self, lease: Lease, key: Prefix) -> bool:
        """Whether an entry is the retained page that the lease began with a copy of."""
        node = lease.source
        return node is not None and key[0] == node.tenant and self.manager._tree.at(self.model.entries[key][0]) is node

    @rule(pages=st.integers(1, PAGES))
    def evict(self, pages: int) -> None:
        expected = min(pages, self.manager.retained)
        before = self.manager.evicted.pages
        assert self.manager.evict(pages) == expected
        self._follow_evictions(before, self._in_use())

    @invariant()
    def accounts_agree(self) -> None:
        self.manager.check_integrity()
        assert self.manager.available - self.manager.retained == PAGES - len(
            self._in_use() | {page for page, _ in self.model.entries.values()}
        )

    @invariant()
    def the_tree_is_what_the_dictionary_says(self) -> None:
        spelled = {page: self._spelled(page) for page in range(PAGES) if self.manager._tree.at(page) is not None}
        assert spelled == {page: key for key, (page, _) in self.model.entries.items()}

    @invariant()
    def every_lease_reads_its_own_prefix(self) -> None:
        self._apply_ops()
        for lease, ids in self.ids.items():
            for position in range(lease.length):
                page, offset = lease.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                assert self.slots[page][offset] == (lease.key.tenant, tuple(ids[: position + 1]))

    @invariant()
    def every_retained_page_holds_what_was_committed(self) -> None:
        for (tenant, ids), (page, _) in self.model.entries.items():
            for position in range((len(ids) - 1) // PAGE_TOKENS * PAGE_TOKENS, len(ids)):
                assert self.slots[page][position % PAGE_TOKENS] == (tenant, ids[: position + 1])

    def teardown(self) -> None:
        for lease, ids in self.ids.items():
            self.manager.commit(lease, ids)
        assert self.manager.available == PAGES
        self.manager.evict(PAGES)
        assert self.manager.retained == 0
        self.manager.check_integrity()


def walk(seed: int, steps: int) -> Machine:
    """Takes random steps with few leases at once, so that, unlike Hypothesis' programs, most find and evict."""
    draw = random.Random(seed)
    machine = Machine()
    leases: list[Lease] = []

    def ids() -> list[int]:
        return [i for _ in range(draw.randint(1, 9)) for i in draw.choice(PARTS)]

    def step(kind: str) -> None:
        if kind == "acquire" and len(leases) < 4:
            leases.append(machine.acquire(CacheKey(draw.choice("ab"), draw.choice("st"), "main"), ids()))
        elif kind == "evict":
            machine.evict(draw.randint(1, 3))
        elif kind != "acquire" and leases:
            lease = draw.choice(leases)
            if kind == "compute":
                machine.compute(lease, draw.randint(1, 100))
            elif kind == "generate":
                machine.generate(lease, ids()[:20])
            elif kind == "fork":
                leases.append(machine.fork(lease, 1))
            elif kind == "publish":
                machine.publish(lease)
            else:
                leases.remove(lease)
                machine.forget(lease) if kind == "forget" else machine.end(lease, kind)

    kinds = {"acquire": 4, "compute": 8, "commit": 5, "release": 3, "generate": 2, "fork": 3, "publish": 4}
    for kind in draw.choices([*kinds, "forget", "evict"], [*kinds.values(), 1, 2], k=steps):
        step(kind)
        machine.accounts_agree()
        machine.the_tree_is_what_the_dictionary_says()
        machine.every_lease_reads_its_own_prefix()
        machine.every_retained_page_holds_what_was_committed()
    machine.teardown()
    return machine


def test_random_walks() -> None:
    machines = [walk(seed, 100) for seed in range(25)]
    assert sum(m.found for m in machines) > 25
    assert sum(m.manager.evicted.pages for m in machines) > 25


@pytest.mark.slow
def test_many_random_walks() -> None:
    for seed in range(1000, 3000):
        walk(seed, 150)


class TestManagerStates(Machine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(
        max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.slow
class TestManagerStatesLong(Machine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(
        max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
