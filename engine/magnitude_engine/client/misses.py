"""What a session's prompts found in a server's cache, and why not more."""

from __future__ import annotations

import msgspec


class MissText(msgspec.Struct, frozen=True, kw_only=True):
    """The text around a difference: what both prompts have before it, then each one's own, and its first token."""

    lead: str
    before: str
    now: str
    token_before: str
    token_now: str


class CacheMiss(msgspec.Struct, frozen=True, kw_only=True):
    """Why a step's prompt was not found in the worker's cache.

    Attributes:
        at: Unix seconds.
        cause: `timestamp`, `nonce`, `tool_order`, `tool_change`, `system_change`, `template`, `compaction`,
            `edited_history`, `reserialised`, `eviction` or `unseen`.
        position: the first token that differs, or is gone.
        wasted_tokens: computed again although an earlier prompt held them; `evicted_tokens` of them were gone.
        message: index of the message that differs.
        advice: what can be done about it.
    """

    step: int
    branch: str
    at: float
    cause: str
    position: int
    wasted_tokens: int
    evicted_tokens: int
    prompt_tokens: int
    cached_tokens: int
    message: int | None
    text: MissText | None
    advice: str


class CachedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What one step's prompt found in the worker's cache; `cause` is None where all was found that could be."""

    step: int
    branch: str
    at: float
    prompt_tokens: int
    cached_tokens: int
    cached_host_tokens: int
    cached_disk_tokens: int
    cause: str | None
    wasted_tokens: int


class CauseTotal(msgspec.Struct, frozen=True, kw_only=True):
    """All misses of one cause."""

    cause: str
    misses: int
    wasted_tokens: int


class CacheTotals(msgspec.Struct, frozen=True, kw_only=True):
    """All steps since the worker began; `hit_rate` is the share of prompt tokens that was found, 0..1."""

    steps: int
    prompt_tokens: int
    cached_tokens: int
    wasted_tokens: int
    hit_rate: float
    causes: tuple[CauseTotal, ...]


class CacheReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the prompts of a session found in the worker's cache: its last steps and misses, oldest first."""

    id: str
    totals: CacheTotals
    steps: tuple[CachedStep, ...]
    misses: tuple[CacheMiss, ...]
