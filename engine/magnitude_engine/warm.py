"""Prefill ahead of requests: prompts that sessions will probably send, computed while nothing else wants to run.

A task is a prefix of a session's next prompt. It is computed in small chunks, and only while no request runs or
waits; then it holds its lease, with pages for what the tool is expected to say, until the session is back, something
newer is known, a request needs the pages, or its time is over. Whatever was computed is retained in any case.

What it is good for is measured per tenant: where too little of it is used, it is tried only now and then.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.kv.lease import CacheKey, Lease
from magnitude_engine.kv.radix import common_prefix
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.kv.tiers import Fetch, reading
from magnitude_engine.scheduler import Warm, plan_warm

# Few enough rows that a request which comes meanwhile is not kept waiting.
CHUNK = 64
MAX_TASKS = 256
HOLD_S = 60.0
TRIAL = 8
WORTH = 0.25
ENOUGH_TOKENS = 1024


class WarmAsk(NamedTuple):
    """Have the keys and values of `ids` ready.

    Attributes:
        reserve: tokens that are expected after them.
        due: when they are probably needed, seconds of the engine's clock; infinite where that is not known.
        hold: whether the session comes back for them; otherwise they are only retained.
        done: called when the task has ended.
    """

    owner: SessionKey
    ids: tuple[int, ...]
    reserve: int = 0
    due: float = math.inf
    hold: bool = True
    done: Callable[[], None] = lambda: None


@dataclass(slots=True, eq=False)
class WarmTask:
    """One prefix on its way.

    Attributes:
        until: when it ends if nothing happens.
        tried: whether the disk was asked.
        reached: tokens that were in the cache when its lease was last at work, `computed` of them by it.
    """

    ask: WarmAsk
    until: float
    lease: Lease | None = None
    fetch: Fetch | None = None
    tried: bool = False
    reached: int = 0
    computed: int = 0

    @property
    def missing(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.ask.ids) - (self.lease.length if self.lease else 0)

    @property
    def view(self) -> Warm:
        """What the scheduler sees of it."""
        held = len(self.lease.pages) if self.lease else 0
        return Warm(self.ask.owner, self.ask.due, len(self.ask.ids), len(self.ask.ids) - self.missing, held)


class Usefulness:
    """How much of what was computed ahead was used, by tenant; old figures fade."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._asked = 0

    def note(self, tenant: str, computed: int, used: int) -> None:
        """Counts one task that ended."""
        if not computed:
            return
        before = self._tenants.pop(tenant, (0.0, 0.0))
        fade = 0.5 if before[0] > 4 * ENOUGH_TOKENS else 1.0
        self._tenants[tenant] = (before[0] * fade + computed, before[1] * fade + used)
        if len(self._tenants) > MAX_TASKS:
            self._tenants.popitem(last=False)

    def worth(self, tenant: str) -> bool:
        """Whether to compute ahead for a tenant; where it does not pay, one of `TRIAL` is tried."""
        computed, used = self._tenants.get(tenant, (0.0, 0.0))
        if computed < ENOUGH_TOKENS or used >= WORTH * computed:
            return True
        self._asked += 1
        return self._asked % TRIAL == 0


class WarmShare(NamedTuple):
    """Rows of a task to compute in one step."""

    task: WarmTask
    rows: int


Fetcher = Callable[[str, Sequence[int]], Fetch | None]


class WarmQueue:
    """The tasks of all sessions, one each. Owned by the engine's thread.

    Attributes:
        computed, used: tokens computed ahead, and those of them that a request used; running totals.
    """

    def __init__(self, cache: PagedCache) -> None:
        self._cache = cache
        self._tasks: OrderedDict[SessionKey, WarmTask] = OrderedDict()
        self._useful = Usefulness()
        self.computed = 0
        self.used = 0

    def __len__(self) -> int:
        return len(self._tasks)

    def leases(self) -> list[Lease]:
        """Returns the leases of all tasks; any thread may ask."""
        return [task.lease for task in list(self._tasks.values()) if task.lease is not None]

    @property
    def holding(self) -> bool:
        """Whether any task holds pages."""
        return any(task.lease is not None for task in self._tasks.values())

    @property
    def reading(self) -> bool:
        """Whether blocks are being read for a task."""
        return any(reading(task.fetch) for task in self._tasks.values())

    def ask(self, ask: WarmAsk, now: float) -> None:
        """Takes a prefix in; it replaces what was asked for the session before."""
        if ask.hold and not self._useful.worth(ask.owner.tenant):
            ask.done()
            return
        task = self._tasks.pop(ask.owner, None)
        if task is not None and ask.ids[: task.reached] != task.ask.ids[: task.reached]:
            self._judge(task, ())
            self._let_go(task)
            task.ask.done()
            task = None
        if task is None:
            task = WarmTask(ask, now)
        else:
            task.ask.done()
        task.ask = ask
        task.until = max(now, ask.due if ask.due < math.inf else now) + HOLD_S if ask.hold else math.inf
        self._tasks[ask.owner] = task
        if len(self._tasks) > MAX_TASKS:
            self.end(next(iter(self._tasks.values())))

    def next(self, now: float) -> WarmShare | None:
        """Returns what to compute now, if there is anything; tasks whose time is over end."""
        for task in list(self._tasks.values()):
            if now > task.until:
                self._judge(task, ())
                self.end(task)
        views = [task.view for task in self._tasks.values() if not reading(task.fetch)]
        share = plan_warm(0, views, self._cache.manager.available, CHUNK)
        return None if share is None else WarmShare(self._tasks[share.name], share.rows)

    def read_ahead(self, owner: SessionKey, fetch: Fetcher) -> None:
        """A session is expected soon: what it will need from disk is read, even while others run."""
        task = self._tasks.get(owner)
        if task is not None and task.lease is None and not task.tried:
            task.fetch, task.tried = fetch(owner.tenant, task.ask.ids), True

    def open(self, task: WarmTask, fetch: Fetcher) -> Lease | None:
        """Gives a task its lease; None while its blocks are read from disk (`fetch` begins that)."""
        if task.lease is None and not task.tried:
            task.fetch, task.tried = fetch(task.ask.owner.tenant, task.ask.ids), True
        if task.lease is None and not reading(task.fetch):
            task.lease = self._cache.acquire(CacheKey(*task.ask.owner), task.ask.ids, task.fetch)
            task.fetch = None
        return task.lease

    def advanced(self, task: WarmTask, lease: Lease, rows: int) -> None:
        """Notes that `rows` tokens were computed; a task that is complete gets its reserve, or ends."""
        manager = self._cache.manager
        manager.advance(lease, rows)
        task.reached = lease.length
        task.computed += rows
        self.computed += rows
        if task.missing:
            return
        manager.publish(lease, task.ask.ids)
        if not task.ask.hold:
            self.end(task)
        elif task.ask.reserve:
            manager.extend(lease, lease.length + task.ask.reserve)

    def take(self, owner: SessionKey, ids: Sequence[int]) -> Fetch | None:
        """The session is back with `ids`: what its task computed is retained.

        Returns what was read from disk for it and not used yet.
        """
        task = self._tasks.get(owner)
        if task is None:
            return None
        self._judge(task, ids)
        fetch, task.fetch = task.fetch, None
        self.end(task)
        return fetch

    def yield_pages(self) -> None:
        """Gives up all leases; what was computed is retained, and may be evicted."""
        for task in self._tasks.values():
            self._let_go(task)

    def end(self, task: WarmTask) -> None:
        """Ends a task."""
        self._let_go(task)
        if self._tasks.pop(task.ask.owner, None) is not None:
            task.ask.done()

    def forget(self, tenant: str, session: str, branch: str | None) -> None:
        """Ends the tasks of a session, or of one of its branches."""
        for owner in list(self._tasks):
            if owner[:2] == (tenant, session) and branch in (None, owner.branch):
                self.end(self._tasks[owner])

    def clear(self) -> None:
        """Ends everything without touching the cache, which is about to be emptied or closed."""
        for task in self._tasks.values():
            task.ask.done()
        self._tasks.clear()

    def _judge(self, task: WarmTask, ids: Sequence[int]) -> None:
        """Counts how much of what a task computed is used by a request with these ids."""
        used = max(0, common_prefix(task.ask.ids[: task.reached], ids) - (task.reached - task.computed))
        self._useful.note(task.ask.owner.tenant, task.computed, used)
        self.used += used

    def _let_go(self, task: WarmTask) -> None:
        if task.lease is not None:
            self._cache.manager.commit(task.lease, task.ask.ids)
        if task.fetch is not None:
            task.fetch.cancel()
        task.lease, task.fetch, task.tried = None, None, False
