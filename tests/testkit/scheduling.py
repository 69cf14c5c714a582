"""A worker without a model: the scheduler, the page accounts, the prefixes and the service, step by step.

Everything but the forward pass is the product's own, so what holds here of pages, seats and rows holds there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.fairness import RunKey, Service
from magnitude_engine.kv.manager import CacheKey, CacheManager, Lease, pages_for
from magnitude_engine.prefixes import Prefixes
from magnitude_engine.scheduler import Order, Running, Snapshot, Waiting, plan_rows, plan_seats

TENANT = "t"


def chain_of(prompt: tuple[int, ...]) -> tuple[bytes, ...]:
    """Returns the names of the full pages that another sequence with this prompt could take over."""
    names: list[bytes] = []
    for start in range(0, (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
        content = (names[-1] if names else b"") + repr(prompt[start : start + PAGE_TOKENS]).encode()
        names.append(hashlib.blake2b(content, digest_size=16).digest())
    return tuple(names)


@dataclass(slots=True, eq=False)
class Task:
    """A sequence: `prompt` in, `output` tokens out."""

    order: Order
    prompt: tuple[int, ...]
    output: int
    run: RunKey
    lease: Lease | None = None
    published: int = 0
    admitted_s: float | None = None
    tokens: list[int] = field(default_factory=list)
    chain: tuple[bytes, ...] = ()

    @property
    def done(self) -> bool:
        return len(self.tokens) == len(self.prompt) + self.output


class Simulator:
    """Runs tasks; `fair=False` and `together=False` withhold what the scheduler needs for either.

    Attributes:
        now: seconds; each step takes one.
        prompt_rows: rows that were computed of prompts.
        served: what was computed for each run, in rows; unlike its service never lifted.
        preemptions: how many seats were taken away.
    """

    def __init__(self, pages: int, seats: int, budget: int, fair: bool = True, together: bool = True) -> None:
        self.manager = CacheManager(pages)
        self.service = Service(decode_cost=4.0)
        self.prefixes = Prefixes()
        self.waiting: list[Task] = []
        self.running: list[Task] = []
        self.now = 0.0
        self.prompt_rows = 0
        self.served: Counter[RunKey] = Counter()
        self.preemptions = 0
        self.ended: Callable[[Task], None] = lambda task: None
        self._seats, self._budget = seats, budget
        self._fair, self._together = fair, together

    def submit(self, task: Task) -> None:
        task.tokens, task.chain = list(task.prompt), chain_of(task.prompt)
        self.service.enter(task.run, self.now)
        self.prefixes.enter(task.chain)
        self.waiting.append(task)

    def step(self) -> None:
        self._admit()
        shares = plan_rows(self._running_views(), self._budget, self._waiting_views())
        assert shares or not self.running, "somebody runs and nothing is computed"
        by_order = {task.order: task for task in self.running}
        for order, rows in shares:
            self._compute(by_order[order], rows)
        self.now += 1.0
        self.manager.take_ops()

    def finish(self, limit: int = 20_000) -> None:
        """Steps until everything has ended."""
        while self.running or self.waiting:
            limit -= 1
            assert limit, "something never ends"
            self.step()

    def _admit(self) -> None:
        views, waiting = self._running_views(), self._waiting_views()
        plan = plan_seats(Snapshot(tuple(views), tuple(waiting), self.manager.available, self._seats))
        for task in [t for t in self.running if t.order in plan.preempt]:
            self.preemptions += 1
            self._retire(task)
            self.waiting.append(task)
        for task in [t for t in self.waiting if t.order in plan.admit]:
            task.lease = self.manager.acquire(CacheKey(TENANT, "s", "main"), task.tokens)
            task.published = task.lease.length // PAGE_TOKENS
            task.admitted_s = self.now
            self.waiting.remove(task)
            self.running.append(task)
        missing = sum(max(0, pages_for(len(t.tokens)) - len(t.lease.pages)) for t in self.running if t.lease)
        assert missing <= self.manager.available, "more was admitted than there are pages"

    def _compute(self, task: Task, rows: int) -> None:
        lease = task.lease
        assert lease is not None
        assert self.manager.extend(lease, lease.length + rows), "pages that were reserved are not there"
        self.manager.advance(lease, rows)
        decoded = rows == 1 and lease.length > len(task.prompt)
        self.prompt_rows += 0 if decoded else rows
        self.served[task.run] += 4 if decoded else rows
        self.service.charge(task.run, self.now, 0 if decoded else rows, int(decoded))
        if task.published < len(task.chain):
            self.manager.publish(lease, task.tokens)
            task.published = lease.length // PAGE_TOKENS
        if lease.length == len(task.tokens):
            # A token of its own, so that outputs share nothing.
            task.tokens.append(1_000_000 + 1000 * task.order.arrival + task.order.choice)
            if task.done:
                self._retire(task)
                self.service.leave(task.run)
                self.prefixes.leave(task.chain)
                self.ended(task)

    def _retire(self, task: Task) -> None:
        assert task.lease is not None
        self.manager.commit(task.lease, task.tokens)
        task.lease = None
        self.running.remove(task)

    def _running_views(self) -> list[Running]:
        return [
            Running(
                order=task.order,
                tokens=len(task.tokens),
                computed=task.lease.length,
                held=len(task.lease.pages),
                recoverable=self.manager.recoverable(task.lease),
                run=task.run if self._fair else None,
                service=self.service.of(task.run) if self._fair else 0.0,
                waited_s=self.service.waited(task.run, self.now) if self._fair else 0.0,
                group=self.prefixes.group(task.chain) if self._together else None,
                computing=frozenset(task.chain[task.published :]) if self._together else frozenset(),
            )
            for task in self.running
            if task.lease is not None
        ]

    def _waiting_views(self) -> list[Waiting]:
        held = {page for task in self.running if task.lease for page in task.lease.pages}
        views: list[Waiting] = []
        for task in self.waiting:
            full = self.manager._tree.match(TENANT, task.tokens[:-1]).full
            views.append(
                Waiting(
                    order=task.order,
                    tokens=len(task.tokens),
                    run=task.run if self._fair else None,
                    service=self.service.of(task.run) if self._fair else 0.0,
                    waited_s=self.service.waited(task.run, self.now) if self._fair else 0.0,
                    group=self.prefixes.group(task.chain) if self._together else None,
                    cached=len(full) * PAGE_TOKENS,
                    shared=sum(1 for node in full if node.page in held),
                    next_page=task.chain[len(full)] if self._together and len(full) < len(task.chain) else None,
                )
            )
        return views
