"""What a prompt lost: which of the earlier prompts it should have gone on from, why it did not, and what that cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.explain.cause import UNSEEN, Cause, Told, cause_of, cause_of_answer, same_conversation
from magnitude_engine.explain.overlap import ID_BYTES, common, common_text, count, repeated
from magnitude_engine.explain.volatile import Change

# A time and the words that say what it is, in a tokenizer with a token per digit.
WINDOW = 48
# What other sessions of a tenant may have in common with a new one without any fault of its prompt's.
SHARED_PLACES = frozenset({"timestamp", "nonce", "tool_order", "tool_change", "system_change"})

Reader = Callable[[bytes, int, int], str]


class Finding(NamedTuple):
    """Why a prompt was not found.

    Attributes:
        at: the first token that differs, or that was cached and is gone.
        wasted: tokens computed again; `evicted` of them were lost by the cache.
        change: the text around a difference; None where there is none.
        before: the earlier prompt.
    """

    cause: Cause
    at: int
    wasted: int = 0
    evicted: int = 0
    change: Change | None = None
    before: Told | None = None


def goes_on(now: Told, before: Told) -> bool:
    """Whether a prompt begins with all of an earlier one, or is the beginning of it."""
    size = min(before.prompt, now.prompt) * ID_BYTES
    return now.ids[:size] == before.ids[:size]


def nearest(now: Told, candidates: Sequence[Told]) -> Told | None:
    """Returns the prompt that `now` most likely goes on from: the longest that it does go on from, else the one with
    most of the same messages, the last of those; None without candidates."""
    kept = [line for line in candidates if goes_on(now, line)]
    if kept:
        return max(reversed(kept), key=lambda line: line.prompt)
    return max(reversed(candidates), key=lambda line: (_kept(line, now), common(line.ids, now.ids)), default=None)


def _kept(before: Told, now: Told) -> int:
    """Returns how many characters of messages and tools stand in the same place in both."""
    pairs = zip(before.messages or (), now.messages or (), strict=False)
    messages = sum(len(one.content) + 1 for one, other in pairs if one == other)
    return messages + (sum(map(len, now.tools)) if before.tools == now.tools else 0)


def find(before: Told, now: Told, cached: int, read: Reader) -> Finding | None:
    """Returns why `now` was not found although `before` was cached; None where all that could be was.

    Args:
        cached: how many tokens of the prompt were found.
        read: returns the text of packed ids from one place to another.
    """
    at = common(before.ids, now.ids)
    lost = min(at, now.prompt - 1) - cached
    lost = lost if lost >= PAGE_TOKENS else 0
    cause, change = None, None
    if before.prompt <= at < now.prompt:
        cause = cause_of_answer(before, now)
        change = None if cause is None else _change(before, now, at, read)
    elif at < now.prompt:
        change = _change(before, now, at, read)
        cause = cause_of(before, now, change)
    again = 0
    if cause is not None and cause is not UNSEEN:
        again = repeated(before.ids, now.ids, at, max(cached, at))
        # Where the template ends a prompt it may go on otherwise; and what another session has computed is not lost.
        if again < PAGE_TOKENS and (cause.name == "template" or cached > at + PAGE_TOKENS):
            cause = None
    if lost > again:
        return Finding(Cause("eviction"), cached, lost + again, lost, None, before)
    if cause is UNSEEN:
        return Finding(UNSEEN, cached)
    return None if cause is None else Finding(cause, at, lost + again, lost, change, before)


def find_beside(before: Told, now: Told, cached: int, read: Reader) -> Finding | None:
    """Returns the same for the first prompt of a session, compared with another session's: `UNSEEN` where they only
    have a beginning in common, as sessions of one agent do."""
    found = find(before, now, cached, read)
    if found is None or same_conversation(before.messages or (), now.messages or ()):
        return found
    shared = found.cause.name in SHARED_PLACES and found.wasted - found.evicted >= PAGE_TOKENS
    return found if shared or found.cause.name == "eviction" else Finding(UNSEEN, cached)


def _change(before: Told, now: Told, at: int, read: Reader) -> Change:
    old = read(before.ids, at - WINDOW, min(at + WINDOW, count(before.ids)))
    new = read(now.ids, at - WINDOW, min(at + WINDOW, now.prompt))
    return Change(old, new, common_text(old, new))


def told(source: api.Input, ids: bytes) -> Told:
    """Returns a prompt that was not answered yet."""
    prompt = count(ids)
    if isinstance(source, api.ChatInput):
        return Told(ids, prompt, source.messages, tuple(map(_definition, source.tools)))
    return Told(ids, prompt, None, text=source.text if isinstance(source, api.TextInput) else "")


def _definition(tool: api.Tool) -> bytes:
    return msgspec.json.encode(tool)
