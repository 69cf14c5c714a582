"""Who runs and who waits: carries out what the scheduler decides.

A sequence that runs has a seat, that is a lease on the cache. Before it gets one, blocks of its prompt that lie on
disk only are read in the background, at the latest when its turn comes; others may be seated meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from magnitude_engine import telemetry as names
from magnitude_engine.config import PAGE_TOKENS, EngineConfig
from magnitude_engine.fairness import RunKey, Service
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.kv.lease import pages_for
from magnitude_engine.kv.tiers import Fetch, reading
from magnitude_engine.prefixes import Prefixes
from magnitude_engine.request import Sequence
from magnitude_engine.scheduler import (
    DECODE_COST,
    Order,
    Running,
    Share,
    Snapshot,
    Waiting,
    plan_rows,
    plan_seats,
    seat_limit,
)

# Reading ahead for more of the queue would only hold memory for longer.
READ_AHEAD = 4
MAX_READ_S = 5.0


@dataclass(slots=True)
class Place:
    """What is known of a sequence in the engine.

    Attributes:
        chain: digests of the full pages of its tokens that may be found in the cache, as they were when it came last;
            the last token is always computed. Nothing where nothing is retained.
        fetch: blocks that are read for it, since `asked`.
        tried: whether the disk was asked.
    """

    run: RunKey
    chain: list[bytes]
    fetch: Fetch | None = None
    asked: float = 0.0
    tried: bool = False


class Seats:
    """Owned by the engine's thread.

    Args:
        clock: seconds, monotonic.
        wake: called on another thread when blocks were read and `admit` should be called again.

    Attributes:
        running: sequences that hold a lease.
        waiting: the others; choices that will be forked from another's prompt are in neither.
        prefill_rate: tokens per second, as measured; 0 while unknown.
    """

    def __init__(
        self,
        cache: PagedCache,
        config: EngineConfig,
        telemetry: names.WorkerTelemetry,
        clock: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.prefill_rate = 0.0
        self.service = Service(DECODE_COST)
        self._cache = cache
        self._config = config
        self._telemetry = telemetry
        self._clock = clock
        self._wake = wake
        self._prefixes = Prefixes()
        self._places: dict[Order, Place] = {}

    @property
    def reading(self) -> bool:
        """Whether anything waits for blocks to be read."""
        return any(reading(p.fetch) for p in self._places.values())

    @property
    def short(self) -> bool:
        """Whether those that run need more pages than there are."""
        missing = [pages_for(len(s.tokens)) - len(s.lease.pages) for s in self.running if s.lease]
        return sum(missing) > self._cache.manager.available

    def enter(self, sequences: Iterable[Sequence], fetch: Fetch | None = None) -> None:
        """Lets sequences of one job wait for a seat; `fetch` was read from disk for the first before it came."""
        for sequence in sequences:
            place = self._place(sequence)
            place.fetch, place.tried, place.asked = fetch, fetch is not None, self._clock()
            fetch = None
            self.waiting.append(sequence)

    def fork(self, root: Sequence, others: Iterable[Sequence]) -> None:
        """Gives other choices leases on the root's prompt; those without a seat or a page wait."""
        for sequence in others:
            if root.lease is not None and self._seat_left():
                sequence.lease = self._cache.manager.fork(root.lease, sequence.choice)
            self._place(sequence)
            (self.running if sequence.lease else self.waiting).append(sequence)

    def leave(self, sequence: Sequence, broken: bool = False) -> None:
        """Takes a sequence out, wherever it is; what it computed is retained unless it is broken."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        self._unseat(sequence, broken)
        place = self._places.pop(sequence.order, None)
        if place is not None:
            _stop_reading(place)
            self._prefixes.leave(place.chain)
            self.service.leave(place.run)

    def clear(self) -> list[Sequence]:
        """Takes all seats without touching the cache, which is about to be emptied; returns who had them."""
        lost = list(self.running)
        for sequence in lost:
            sequence.lease = None
        self.running.clear()
        return lost

    def admit(self) -> list[Sequence]:
        """Gives and takes seats; returns who got one."""
        self._read_ahead()
        waiting = self._waiting_views()
        snapshot = Snapshot(tuple(self.views()), waiting, self._cache.manager.available, self._config.max_batch_size)
        seats = plan_seats(snapshot)
        for sequence in _named(self.running, seats.preempt):
            self._telemetry.count(names.PREEMPTIONS)
            self._unseat(sequence)
            self._come_back(sequence)
        admitted = [s for s in _named(self.waiting, seats.admit) if not self._must_read(s)]
        for sequence in admitted:
            self._seat(sequence)
        return admitted

    def fetch(self, tenant: str, ids: Sequences[int]) -> Fetch | None:
        """Begins to read what of `ids` is on disk only, where that pays."""
        return self._cache.fetch(tenant, ids, self.prefill_rate, self._wake)

    def plan(self, budget: int) -> tuple[Share, ...]:
        """Returns how many rows each running sequence computes in this step."""
        return plan_rows(self.views(), budget, self._waiting_views())

    def computed(self, sequence: Sequence, rows: int, prompt: bool) -> None:
        """Notes that rows of a sequence were computed."""
        place = self._places[sequence.order]
        self.service.charge(place.run, self._clock(), rows if prompt else 0, 0 if prompt else rows)

    def views(self) -> list[Running]:
        """Returns what the scheduler sees of the running sequences."""
        short, now = self.short, self._clock()
        return [self._running_view(s, short, now) for s in self.running]

    def _running_view(self, sequence: Sequence, short: bool, now: float) -> Running:
        place, lease = self._places[sequence.order], sequence.lease
        done = (lease.length if lease else 0) // PAGE_TOKENS
        return Running(
            order=sequence.order,
            tokens=len(sequence.tokens),
            computed=len(sequence.tokens) - sequence.missing,
            held=len(lease.pages) if lease else 0,
            recoverable=self._cache.manager.recoverable(lease) if short and lease else 0,
            width=sequence.width,
            batch_limit=sequence.prepared.generate.preferences.max_batch_size,
            run=place.run,
            service=self.service.of(place.run),
            waited_s=self.service.waited(place.run, now),
            group=self._prefixes.group(place.chain),
            computing=frozenset(place.chain[done:]),
        )

    def _waiting_views(self) -> tuple[Waiting, ...]:
        """Returns what the scheduler sees of those that wait and could be seated now; none where no seat is free."""
        seats = seat_limit([self._seat_view(s) for s in self.running], self._config.max_batch_size)
        if not self.waiting or sum(s.width for s in self.running) >= seats:
            return ()
        now = self._clock()
        return tuple(self._waiting_view(s, now) for s in self.waiting if not reading(self._places[s.order].fetch))

    def _seat_view(self, sequence: Sequence) -> Running:
        limit = sequence.prepared.generate.preferences.max_batch_size
        return Running(sequence.order, 0, 0, 0, width=sequence.width, batch_limit=limit)

    def _waiting_view(self, sequence: Sequence, now: float) -> Waiting:
        place = self._places[sequence.order]
        generate = sequence.prepared.generate
        chain = place.chain
        cached, shared = self._cache.manager.cached_pages(chain)
        return Waiting(
            order=sequence.order,
            tokens=len(sequence.tokens),
            width=sequence.width,
            batch_limit=generate.preferences.max_batch_size,
            run=place.run,
            service=self.service.of(place.run),
            waited_s=self.service.waited(place.run, now),
            group=self._prefixes.group(chain),
            cached=cached * PAGE_TOKENS,
            shared=shared,
            next_page=chain[cached] if cached < len(chain) else None,
        )

    def _place(self, sequence: Sequence) -> Place:
        generate = sequence.prepared.generate
        run = RunKey(generate.tenant, generate.run or generate.session)
        chain = self._findable(sequence)
        place = self._places[sequence.order] = Place(run, chain)
        self._prefixes.enter(chain)
        self.service.enter(run, self._clock())
        return place

    def _findable(self, sequence: Sequence) -> list[bytes]:
        manager = self._cache.manager
        return manager.chain(sequence.owner.tenant, sequence.tokens[:-1]) if manager.reuse else []

    def _come_back(self, sequence: Sequence) -> None:
        """Lets a sequence that lost its seat wait, with all the tokens that it has now."""
        place = self._places[sequence.order]
        self._prefixes.leave(place.chain)
        place.chain = self._findable(sequence)
        self._prefixes.enter(place.chain)
        place.tried = False
        self.waiting.append(sequence)

    def _seat(self, sequence: Sequence) -> None:
        """Gives a waiting sequence a lease on what is cached of its tokens."""
        place = self._places[sequence.order]
        key = sequence.prepared.cache_key(sequence.choice)
        sequence.lease = self._cache.acquire(key, sequence.tokens, place.fetch)
        place.fetch = None
        self.waiting.remove(sequence)
        self.running.append(sequence)

    def _unseat(self, sequence: Sequence, broken: bool = False) -> None:
        if sequence.lease is None:
            return
        if broken:
            self._cache.manager.forget(sequence.lease)
        else:
            self._cache.manager.commit(sequence.lease, sequence.tokens)
        sequence.lease = None
        self.running.remove(sequence)

    def _seat_left(self) -> bool:
        views = [self._seat_view(s) for s in self.running]
        return len(views) < seat_limit(views, self._config.max_batch_size)

    def _read_ahead(self) -> None:
        """Begins to read what the first in the queue need from disk; gives up what takes too long."""
        now = self._clock()
        for sequence in self.waiting:
            place = self._places[sequence.order]
            if reading(place.fetch) and now - place.asked > MAX_READ_S:
                _stop_reading(place)
        for sequence in self.waiting[:READ_AHEAD]:
            self._must_read(sequence)

    def _must_read(self, sequence: Sequence) -> bool:
        """Begins to read what a sequence needs from disk, once; returns whether that goes on."""
        place = self._places[sequence.order]
        if not place.tried:
            place.fetch = self.fetch(place.run.tenant, sequence.tokens)
            place.tried, place.asked = True, self._clock()
        return reading(place.fetch)


def _stop_reading(place: Place) -> None:
    if place.fetch is not None:
        place.fetch.cancel()
        place.fetch = None


def _named(sequences: Iterable[Sequence], orders: Sequences[Order]) -> list[Sequence]:
    """Returns the sequences of these orders, in the order of `orders`."""
    by_order = {s.order: s for s in sequences}
    return [by_order[order] for order in orders]
