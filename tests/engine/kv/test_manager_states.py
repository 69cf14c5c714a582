"""Any order of calls keeps the counts right and the contents of every page what its readers expect.

The model of a page is what a real one holds: per slot the whole token prefix that its key and value depend on.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.manager import CacheKey, CacheManager, Lease, pages_for

PAGES = 12
KEYS = st.builds(CacheKey, st.sampled_from("ab"), st.sampled_from("st"), st.sampled_from(["main", "x"]))
# Two symbols and short runs make common prefixes, and differences inside pages, frequent.
IDS = st.lists(st.sampled_from([(0,) * 11, (1,) * 7, (0, 1), (2,)]), min_size=1, max_size=9).map(
    lambda parts: [i for part in parts for i in part]
)
Slot = tuple[str, tuple[int, ...]] | None


class Machine(RuleBasedStateMachine):
    """Random steps of several sessions of two tenants on a pool of a few pages."""

    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.manager = CacheManager(PAGES)
        self.slots: list[list[Slot]] = [[None] * PAGE_TOKENS for _ in range(PAGES)]
        self.ids: dict[Lease, list[int]] = {}

    def _apply_ops(self) -> None:
        for source, target in self.manager.take_ops():
            self.slots[target] = [None] * PAGE_TOKENS if source is None else list(self.slots[source])

    @rule(target=running, key=KEYS, ids=IDS)
    def acquire(self, key: CacheKey, ids: list[int]) -> Lease:
        lease = self.manager.acquire(key, ids)
        assert lease.reused == lease.length <= len(ids) - 1
        self.ids[lease] = ids
        return lease

    @rule(lease=running, count=st.integers(1, 40))
    def compute(self, lease: Lease, count: int) -> None:
        """What a step does: pages, operations, writes."""
        ids = self.ids.get(lease)
        if ids is None:
            return
        stop = min(lease.length + count, len(ids))
        if not self.manager.extend(lease, stop):
            assert self.manager.available < pages_for(stop) - len(lease.pages)
            return
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
        child = self.manager.fork(lease, choice) if ids is not None else None
        if ids is None or child is None:
            return lease
        self.ids[child] = list(ids)
        return child

    @rule(lease=running)
    def publish(self, lease: Lease) -> None:
        if lease in self.ids:
            self.manager.publish(lease, self.ids[lease])

    @rule(lease=consumes(running), how=st.sampled_from(["commit", "release", "dirty"]))
    def end(self, lease: Lease, how: str) -> None:
        ids = self.ids.pop(lease, None)
        if ids is None:
            return
        if how == "commit":
            self.manager.commit(lease, ids)
        else:
            self.manager.release(lease, dirty=how == "dirty")

    @rule(pages=st.integers(1, PAGES))
    def evict(self, pages: int) -> None:
        expected = min(pages, self.manager.retained)
        assert self.manager.evict(pages) == expected

    @invariant()
    def accounts_agree(self) -> None:
        self.manager.check_integrity()

    @invariant()
    def every_lease_reads_its_own_prefix(self) -> None:
        self._apply_ops()
        for lease, ids in self.ids.items():
            for position in range(lease.length):
                page, offset = lease.pages[position // PAGE_TOKENS], position % PAGE_TOKENS
                assert self.slots[page][offset] == (lease.key.tenant, tuple(ids[: position + 1]))

    def teardown(self) -> None:
        for lease, ids in self.ids.items():
            self.manager.commit(lease, ids)
        assert self.manager.available == PAGES
        self.manager.evict(PAGES)
        assert self.manager.retained == 0
        self.manager.check_integrity()


class TestManagerStates(Machine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(
        max_examples=20, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.slow
class TestManagerStatesLong(Machine.TestCase):  # type: ignore[misc,valid-type]
    settings = settings(
        max_examples=400, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
