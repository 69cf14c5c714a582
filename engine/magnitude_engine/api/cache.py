"""What a worker's cache holds, for a person to see."""

from __future__ import annotations

from typing import Literal

from magnitude_engine.api.conversation import Frozen


class CacheRun(Frozen, frozen=True, kw_only=True):
    """A stretch of the prefix tree without a fork: pages that the same sequences share.

    Attributes:
        tenant: the beginning of its salt.
        parent: index of the run before it in `CacheReport.runs`, -1 at a tenant's root; parents come first.
        tokens: tokens in it, `pages` pages of which `in_use` are read or written by a running sequence.
        idle_s: seconds since it was last used.
        sessions: sessions whose last step ended in or below it.
    """

    parent: int
    tenant: str
    tokens: int
    pages: int
    in_use: int = 0
    idle_s: float = 0.0
    sessions: int = 0


class TierUse(Frozen, frozen=True, kw_only=True):
    """One tier: what it holds and what it was good for; sizes in bytes, `tokens_served` since the start."""

    name: Literal["device", "host", "disk"]
    blocks: int
    bytes: int
    limit_bytes: int
    tokens_served: int = 0
    evicted: int = 0
    rejected: int = 0
    failed_writes: int = 0


class SessionUse(Frozen, frozen=True, kw_only=True):
    """A session as retention sees it; `tool` is what it waits for, `due_s` when it is expected back."""

    tenant: str
    session: str
    branch: str
    state: Literal["thinking", "waiting", "ended"]
    tokens: int
    tool: str = ""
    due_s: float | None = None


class CacheReport(Frozen, tag="cache_report", frozen=True, kw_only=True):
    """What the cache holds: the answer to `Inspect`. Tokens and text are not in it.

    Attributes:
        policy: `learned` or `lru`: which one chooses what is evicted now; hit rates are those of both, 0..1.
    """

    page_tokens: int
    pages_total: int
    pages_free: int
    pages_idle: int
    policy: Literal["learned", "lru"] = "learned"
    learned_hit_rate: float = 0.0
    lru_hit_rate: float = 0.0
    tiers: tuple[TierUse, ...] = ()
    runs: tuple[CacheRun, ...] = ()
    sessions: tuple[SessionUse, ...] = ()
