"""Why prompts were not found in the cache, for those whose prompts they are."""

from __future__ import annotations

from typing import Literal

from magnitude_engine.api.conversation import Frozen

MissCause = Literal[
    "timestamp",
    "nonce",
    "tool_order",
    "tool_change",
    "system_change",
    "template",
    "compaction",
    "edited_history",
    "reserialised",
    "eviction",
    "unseen",
]


class CacheMiss(Frozen, frozen=True, kw_only=True):
    """That a prompt was not found where it could have been.

    Attributes:
        at: the first token that differs from what was cached, from 0.
        wasted: tokens that were computed again although an earlier prompt held them: in stretches of at least 8 in the
            same order, behind the difference; and what had been cached and is gone.
    """

    cause: MissCause
    at: int
    wasted: int = 0


class MissText(Frozen, frozen=True, kw_only=True):
    """The text around a difference: what both prompts have before it, then each one's own, and its first token."""

    lead: str = ""
    before: str = ""
    now: str = ""
    token_before: str = ""
    token_now: str = ""


class MissDetail(Frozen, frozen=True, kw_only=True):
    """One miss of a session.

    Attributes:
        at_s: Unix seconds of its step's beginning.
        evicted: of the wasted tokens, those that the cache had lost.
        message: index of the message in which the prompts differ; None outside of messages.
        text: none where the prompts do not differ.
    """

    step: int
    branch: str
    at_s: float
    miss: CacheMiss
    prompt_tokens: int
    cached_tokens: int
    evicted: int = 0
    message: int | None = None
    text: MissText | None = None


class StepCache(Frozen, frozen=True, kw_only=True):
    """What a step's prompt found in the cache; of `cached_tokens` some came back from host memory and from disk."""

    step: int
    branch: str
    at_s: float
    prompt_tokens: int
    cached_tokens: int
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    cause: MissCause | None = None
    wasted: int = 0


class CauseTotal(Frozen, frozen=True, kw_only=True):
    """All misses of one cause."""

    cause: MissCause
    misses: int
    wasted: int


class AskMisses(Frozen, tag="ask_misses", frozen=True, kw_only=True):
    """Ask why prompts of a session were not found: the answer is a `SessionMisses` with the same id, at once."""

    request: str
    epoch: int
    tenant: str
    session: str


class SessionMisses(Frozen, tag="session_misses", frozen=True, kw_only=True):
    """The last steps and misses of a session, oldest first, and the totals of all its steps, since the worker began."""

    request: str
    epoch: int
    steps: tuple[StepCache, ...] = ()
    misses: tuple[MissDetail, ...] = ()
    step_count: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    causes: tuple[CauseTotal, ...] = ()
