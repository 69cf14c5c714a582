"""Prefill ahead of requests: computes what `warm.py` chooses, one small chunk per step that nobody else needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from magnitude_engine.inbox import Ahead
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.kv.tiers import Fetch
from magnitude_engine.model.batch import KeyValueCache
from magnitude_engine.model.runner import Runner
from magnitude_engine.seats import Seats
from magnitude_engine.step import Rows, build_batch
from magnitude_engine.warm import WarmAsk, WarmQueue

LOOK_EVERY_S = 0.25
DUE_WITHIN_S = 2.0


class PrefillAhead:
    """Owned by the engine's thread.

    Attributes:
        queue: what is to be computed.
    """

    def __init__(self, runner: Runner, tensors: KeyValueCache, cache: PagedCache, seats: Seats) -> None:
        self.queue = WarmQueue(cache)
        self._runner = runner
        self._tensors = tensors
        self._cache = cache
        self._seats = seats
        self._looked = -math.inf

    def ask(self, ahead: Ahead, now: float) -> None:
        """Takes in a prompt's beginning, to be computed with room for what will follow it."""
        settled, retention = ahead.settled, self._cache.manager.retention
        tenant, tool = settled.owner.tenant, settled.tool
        reserve = retention.expected_output(tenant, tool) if tool else None
        duration = retention.expected_duration_s(tenant, tool) if tool else None
        due = math.inf if duration is None else now + duration
        self.queue.ask(WarmAsk(settled.owner, settled.ids, reserve or 0, due, settled.hold, ahead.done), now)

    def read(self, now: float) -> None:
        """Begins to read what sessions need from disk whose tools are about to end, also while others run."""
        if now - self._looked >= LOOK_EVERY_S and len(self.queue):
            self._looked = now
            for owner in self._cache.manager.retention.due(now, DUE_WITHIN_S):
                self.queue.read_ahead(owner, self._fetch)

    def step(self, now: float) -> bool:
        """Computes a chunk; False where there is nothing to compute."""
        share = self.queue.next(now)
        if share is None:
            return False
        lease = self.queue.open(share.task, self._fetch)
        if lease is None:
            return True
        rows = min(share.rows, share.task.missing)
        if not self._cache.manager.extend(lease, lease.length + rows):
            self.queue.end(share.task)
            return True
        self._cache.apply()
        tokens = share.task.ask.ids[lease.length : lease.length + rows]
        batch = build_batch([Rows(tokens, lease)], self._runner.device)
        self._runner.forward(batch, self._tensors)
        self.queue.advanced(share.task, lease, rows)
        return True

    def _fetch(self, tenant: str, ids: Sequence[int]) -> Fetch | None:
        return self._seats.fetch(tenant, ids)
