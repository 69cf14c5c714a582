"""What was dropped from the prompts of a session, for good: a record that only grows.

    magnitude:{SESSION}:pruned    a list, in the order in which it was decided; forgotten like its session

Two proxies, or two requests, that decide at once both add to it, and none takes anything back. What is dropped
therefore stays dropped, and a cached prefix stays what it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

import msgspec

from magnitude_proxy.bounded import keep
from magnitude_proxy.store.connection import Link, StoreDown
from magnitude_proxy.store.functions import session_key

MAX_DROPS = 1_024
MAX_SESSIONS = 1_024

Kind = Literal["dead-end", "thinking", "reasoning"]


class Drop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that the model is not shown any more.

    Attributes:
        kind: `dead-end`, whole messages; `thinking`, the finished thinking at the beginning of a message's text;
            `reasoning`, the same in a field beside the text.
        index, count: of the messages, in the client's own list when it was decided.
        digest: of these messages, 32 hex digits; they are found by it when the list changes.
        reason: why, in words; `step` is the step that it was, where that is known.
        branch: of the request that it was decided for.
        at_s: Unix seconds.
        tokens: how many the prompt is shorter by; `counted` by the worker, otherwise estimated.
        ahead: decided between two steps, so that the shorter prompt could be computed meanwhile.
    """

    kind: Kind
    index: int
    count: int = 1
    digest: str
    reason: str
    step: int | None = None
    branch: str
    at_s: float
    tokens: int
    counted: bool = False
    ahead: bool = False


class Prunings:
    """Reads and extends these records.

    Args:
        link: the way to the store; None keeps them in memory, those of the `MAX_SESSIONS` sessions used last.
        ttl_s: how long each is kept after it was last asked for.
    """

    def __init__(self, link: Link | None, ttl_s: float) -> None:
        self._link = link
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._memory: OrderedDict[str, tuple[Drop, ...]] = OrderedDict()

    async def of(self, session: str) -> tuple[Drop, ...]:
        """Returns what was dropped in a session; raises StoreDown."""
        if self._link is None:
            return self.recall(session)
        reply = await self._link.call("pruned", "LRANGE", _key(session), 0, MAX_DROPS - 1)
        if not isinstance(reply, list):
            raise StoreDown(f"the store answered {type(reply).__name__} instead of what was pruned")
        try:
            drops = distinct([msgspec.json.decode(each, type=Drop) for each in reply])
        except msgspec.MsgspecError as error:
            raise StoreDown(f"the store holds a broken record of what was pruned in session {session}") from error
        if drops:
            self._link.tell("PEXPIRE", _key(session), self._ttl_ms)
        self._remember(session, drops)
        return drops

    def recall(self, session: str) -> tuple[Drop, ...]:
        """Returns the same as this process remembers it."""
        return self._memory.get(session, ())

    async def add(self, session: str, drops: Sequence[Drop]) -> bool:
        """Adds to the record, all or nothing; False where it is full. Raises StoreDown."""
        known = self.recall(session)
        if len(known) + len(drops) > MAX_DROPS:
            return False
        if self._link is not None:
            encoded = [msgspec.json.encode(drop) for drop in drops]
            await self._link.call("pruned", "RPUSH", _key(session), *encoded)
            self._link.tell("PEXPIRE", _key(session), self._ttl_ms)
        self._remember(session, distinct([*known, *drops]))
        return True

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._memory.pop(session, None)
        if self._link is not None:
            self._link.tell("DEL", _key(session))

    def _remember(self, session: str, drops: tuple[Drop, ...]) -> None:
        if drops:
            keep(self._memory, session, drops, MAX_SESSIONS)
        else:
            self._memory.pop(session, None)


def distinct(drops: Sequence[Drop]) -> tuple[Drop, ...]:
    """Returns drops without those that were decided a second time."""
    found: dict[tuple[str, int, int, str], Drop] = {}
    for drop in drops:
        found.setdefault((drop.kind, drop.index, drop.count, drop.digest), drop)
    return tuple(found.values())


def _key(session: str) -> str:
    return f"{session_key(session)}:pruned"
