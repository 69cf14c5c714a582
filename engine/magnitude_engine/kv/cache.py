"""The cache as the engine uses it: page accounts, the tensors behind them, and the tiers below."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from msgspec.structs import replace

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.blocks import BlockName
from magnitude_engine.kv.lease import CacheKey, Lease
from magnitude_engine.kv.manager import NOTHING, CacheManager
from magnitude_engine.kv.tensors import SlotMove, apply_ops, move_slots, read_page
from magnitude_engine.kv.tiers import Fetch, Tiers
from magnitude_kernels.kv_copy.reference import PageTensors

CLOSE_FLUSH_S = 5.0
# A tenant's salt is a secret; its beginning tells tenants apart.
SHOWN = 8


class PagedCache:
    """Owned by the engine's thread; `close` gives the tiers' folder back.

    Args:
        pages: keys and values, [2 * layers, pages, ...]; changed in place.
    """

    def __init__(self, manager: CacheManager, tiers: Tiers, pages: torch.Tensor) -> None:
        self.manager = manager
        self.tiers = tiers
        self._pages = pages
        self._words = PageTensors.of(tuple(pages))

    def fetch(self, tenant: str, ids: Sequence[int], prefill_rate: float, ready: Callable[[], None]) -> Fetch | None:
        """Begins to read what of `ids` is on disk only (see `Tiers.fetch`)."""
        return self.tiers.fetch(self.manager.missing(tenant, ids), prefill_rate, ready)

    def acquire(self, key: CacheKey, ids: Sequence[int], fetch: Fetch | None = None) -> Lease:
        """Returns a lease on what is cached of `ids`, wherever it lies."""
        # What was evicted just now is found in the lower tiers only when it was handed to them.
        self.apply()
        lease = self.manager.acquire(key, ids, fetch.payloads() if fetch is not None else NOTHING)
        self.tiers.served_tokens(lease.from_host, lease.from_disk)
        return lease

    def apply(self) -> None:
        """Carries out what the manager decided; to be called before each forward pass."""
        apply_ops(self.manager.take_ops(), self._pages, self._words, self.tiers.keep)

    def move(self, moves: Sequence[Sequence[SlotMove]]) -> None:
        """Moves single tokens of sequences, each in order; no slot is of two of them, or read after it was written."""
        if moves:
            move_slots(self._pages, moves)

    def save(self, pages: int) -> bool:
        """Begins to write up to `pages` retained pages back to disk; False when nothing more can be done now."""
        due = self.manager.take_unsaved(pages)
        if not due:
            return False
        self.apply()
        saved = 0
        for page, name in due:
            if not self.tiers.save(name, read_page(self._pages, page), idly=True):
                break
            saved += 1
        self._touch([spill.name for spill in due[:saved]])
        self.manager.postpone(due[saved:])
        return saved == len(due)

    def _touch(self, saved: Sequence[BlockName]) -> None:
        """Counts the sequences that saved blocks belong to as used, so that a full disk loses their ends first."""
        parents = {name.parent for name in saved}
        for name in saved:
            if name.key not in parents:
                self.tiers.touch(self.manager.path(name.key))

    @property
    def unsaved(self) -> bool:
        """Whether retained pages wait to be written to disk; `save` may have to be tried again later."""
        return self.manager.unsaved > 0

    def flush(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> bool:
        """Writes everything that is retained to disk; False when the time ran out, or the disk refuses."""
        until = clock() + timeout_s
        left = self.manager.unsaved
        while left:
            self.save(64)
            if not self.tiers.flush(max(until - clock(), 0.0)) or self.manager.unsaved == left:
                return False
            left = self.manager.unsaved
        return self.tiers.flush(max(until - clock(), 0.0))

    def report(self, served: int, now: float) -> api.CacheReport:
        """Returns what is where; `served` is how many prompt tokens the device's pages have served."""
        manager, retention = self.manager, self.manager.retention
        total, page_bytes = manager.total, self._pages[:, :1].numel() * self._pages.element_size()
        device = api.TierUse(
            name="device",
            blocks=total - manager.free,
            bytes=(total - manager.free) * page_bytes,
            limit_bytes=total * page_bytes,
            tokens_served=served,
            evicted=manager.evicted.pages,
        )
        return api.CacheReport(
            page_tokens=PAGE_TOKENS,
            pages_total=total,
            pages_free=manager.free,
            pages_idle=manager.retained,
            policy=retention.policy,
            learned_hit_rate=retention.learned_hit_rate,
            lru_hit_rate=retention.lru_hit_rate,
            tiers=(device, *self.tiers.use()),
            runs=tuple(replace(run, tenant=run.tenant[:SHOWN]) for run in manager.runs()),
            sessions=tuple(replace(each, tenant=each.tenant[:SHOWN]) for each in retention.sessions(now)),
        )

    def close(self) -> None:
        """Writes what is not on disk yet within seconds, and lets go of it."""
        self.flush(CLOSE_FLUSH_S)
        self.tiers.close()
