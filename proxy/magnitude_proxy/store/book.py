"""The sessions of a tenant as clients ask for them: found, listed, ended, and told how they went.

    magnitude:{SESSION}            a session (see `sessions.lua`)
    magnitude:{TENANT}:sessions    its sessions by when they were seen last, at most `MAX_LISTED`
    magnitude:{TENANT}:feedback    a stream of feedback, about the last `MAX_FEEDBACK` entries

Feedback reaches the stream at least once and a session exactly once: it is kept in the session, added to the stream,
then noted as settled; when a process dies in between, the agent's next attempt adds it to the stream again (entries
carry the feedback's `id`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

from magnitude_proxy.bounded import keep
from magnitude_proxy.errors import Unavailable
from magnitude_proxy.identity import session_ids, tenant_name
from magnitude_proxy.store.branches import Branches, Change, changed
from magnitude_proxy.store.connection import Command, Link, StoreDown
from magnitude_proxy.store.credit import Fate, Feedback, SessionView
from magnitude_proxy.store.functions import (
    branches_call,
    fail_call,
    feedback_call,
    finish_call,
    get_call,
    parse_fate,
    parse_record,
    parse_view,
    settle_call,
    view_call,
)
from magnitude_proxy.store.memory import MemoryStore
from magnitude_proxy.store.record import SessionRecord

MAX_LISTED = 10_000
MAX_FEEDBACK = 10_000
INDEX_EVERY_S = 60.0
MAX_ROUNDS = 100
_INDEXED = 10_000


Decide = Callable[[Branches], Change]


class Page(NamedTuple):
    """Sessions, those seen last first, and whether more follow."""

    records: tuple[SessionRecord, ...]
    more: bool


class Acted(NamedTuple):
    """Branches before and after a change."""

    before: Branches
    after: Branches
    change: Change


class SessionBook:
    """Reads and ends sessions; all methods but `recall` and `opened` raise StoreDown when the store does not answer.

    Args:
        memory: the sessions of this process; the only ones without a `link`.
        link: the way to the store, None where sessions are kept in memory only.
        ttl_s: how long an idle session is kept.
        counted: gives the session that a client's id counts to (see `Lineage.counted`).
    """

    def __init__(
        self, memory: MemoryStore, link: Link | None, ttl_s: float, counted: Callable[[str], str] = str
    ) -> None:
        self._memory = memory
        self._link = link
        self._ttl_s = ttl_s
        self._counted = counted
        self._indexed: OrderedDict[str, float] = OrderedDict()
        self._trimmed: dict[str, float] = {}

    def opened(self, record: SessionRecord) -> None:
        """Puts a session that was opened in the store into its tenant's list, once a minute at most.

        As often, sessions that have expired or are too many leave the list.
        """
        now, last = record.seen_s, self._indexed.get(record.session)
        # A first lease may follow a deletion, or a store that was flushed.
        known = last is not None and record.epoch > 1 and 0 <= now - last < INDEX_EVERY_S
        if self._link is None or known:
            return
        keep(self._indexed, record.session, now, _INDEXED)
        key = _list_key(record.tenant)
        self._link.tell("ZADD", key, now, record.session)
        if 0 <= now - self._trimmed.get(record.tenant, -INDEX_EVERY_S) < INDEX_EVERY_S:
            return
        self._trimmed[record.tenant] = now
        self._link.tell("ZREMRANGEBYSCORE", key, "-inf", now - self._ttl_s - INDEX_EVERY_S)
        self._link.tell("ZREMRANGEBYRANK", key, 0, -MAX_LISTED - 1)
        self._link.tell("PEXPIRE", key, round((self._ttl_s + INDEX_EVERY_S) * 1000))

    async def find(self, salt: str, given: str) -> SessionRecord | None:
        """Returns the tenant's session that a client names by the id it is shown or by its own; None without one."""
        if self._link is None:
            return self.recall(salt, given)
        ids = self._ids(salt, given)
        replies = await _all(self._link.call("get", *get_call(session)) for session in ids)
        found = (parse_record(session, reply) for session, reply in zip(ids, replies, strict=True))
        return _first_of(tenant_name(salt), found)

    def recall(self, salt: str, given: str) -> SessionRecord | None:
        """Returns the same as this process remembers it."""
        return _first_of(tenant_name(salt), map(self._memory.get, self._ids(salt, given)))

    def _ids(self, salt: str, given: str) -> tuple[str, ...]:
        return tuple(map(self._counted, session_ids(salt, given)))

    async def view(self, session: str) -> SessionView | None:
        """Returns all that is known of a session, None when it has expired."""
        if self._link is None:
            return self._memory.view(session)
        return parse_view(session, await self._link.call("view", *view_call(session)))

    async def page(self, salt: str, limit: int, after: str | None) -> Page | None:
        """Returns at most `limit` sessions of a tenant, those behind the session `after`; None when that is not listed.

        A page may be shorter than `limit` although more follow: sessions that have expired are left out.
        """
        tenant = tenant_name(salt)
        if self._link is None:
            return _slice(self._memory.of(tenant), limit, after)
        key, start = _list_key(tenant), 0
        if after is not None:
            rank = await self._link.call("list", "ZREVRANK", key, after)
            if not isinstance(rank, int):
                return None
            start = rank + 1
        names = await self._link.call("list", "ZREVRANGE", key, start, start + limit)
        if not isinstance(names, list):
            raise StoreDown(f"the store answered {type(names).__name__} instead of a list of sessions")
        sessions = [name.decode() for name in names[:limit]]
        replies = await _all(self._link.call("get", *get_call(session)) for session in sessions)
        records = [parse_record(session, reply) for session, reply in zip(sessions, replies, strict=True)]
        return Page(tuple(r for r in records if r is not None and r.tenant == tenant), len(names) > limit)

    async def finish(self, record: SessionRecord) -> bool:
        """Forgets a session; a step of it that still runs cannot commit. False when somebody else did."""
        self._indexed.pop(record.session, None)
        if self._link is None:
            return self._memory.finish(record.session, record.tenant)
        self._memory.finish(record.session, record.tenant)
        ended = await self._link.call("finish", *finish_call(record.session, record.tenant))
        self._link.tell("ZREM", _list_key(record.tenant), record.session)
        return ended == 1

    async def fail(self, record: SessionRecord, step: int | None, reason: str) -> int:
        """Marks a step of a session, its last where it is None, as dead; returns it, NO_SESSION or NO_STEP."""
        if self._link is None:
            return self._memory.fail(record.session, record.tenant, step, reason)
        reply = await self._link.call("fail", *fail_call(record.session, record.tenant, step, reason))
        if not isinstance(reply, int):
            raise StoreDown(f"the store answered {type(reply).__name__} instead of a step")
        return reply

    async def branches(self, record: SessionRecord) -> Branches | None:
        """Returns a session's branches, None when it has expired."""
        view = await self.view(record.session)
        return None if view is None or view.record.tenant != record.tenant else view.branches

    async def branch(self, record: SessionRecord, decide: Decide) -> Acted | None:
        """Changes a session's branches as `decide` says of them, None when the session has expired.

        It is asked again where somebody else changed them meanwhile; what it raises is raised.

        Raises:
            Unavailable: too many others change them.
        """
        for _ in range(MAX_ROUNDS):
            before = await self.branches(record)
            if before is None:
                return None
            change = decide(before)
            if change == Change():
                return Acted(before, before, change)
            if self._link is None:
                reply: object = 1 if self._memory.branch(record.session, record.tenant, change) else -1
            else:
                call = branches_call(record.session, record.tenant, before.version, change)
                reply = await self._link.call("branch", *call)
            if reply != 0:
                return Acted(before, changed(before, change), change) if reply == 1 else None
        raise Unavailable(
            "too many requests change the branches of this session at once: try again",
            code="session_busy",
            headers={"Retry-After": "1"},
        )

    async def feedback(self, record: SessionRecord, said: Feedback, now: float) -> Fate:
        """Keeps feedback of a session and adds it to the tenant's stream, where both has not happened yet."""
        session, tenant = record.session, record.tenant
        if self._link is None:
            return self._memory.feedback(session, tenant, said)
        fate = parse_fate(await self._link.call("feedback", *feedback_call(session, tenant, said)))
        if fate.outcome in ("added", "pending"):
            await self._link.call("feedback", *_stream_entry(record, said, fate.steps, now))
            await self._link.call("feedback", *settle_call(session, said))
        return fate


def _first_of(tenant: str, records: Iterable[SessionRecord | None]) -> SessionRecord | None:
    """Returns the first that is the tenant's: another tenant's session is none."""
    return next((record for record in records if record is not None and record.tenant == tenant), None)


def _slice(records: Sequence[SessionRecord], limit: int, after: str | None) -> Page | None:
    start = 0
    if after is not None:
        place = next((n for n, record in enumerate(records) if record.session == after), None)
        if place is None:
            return None
        start = place + 1
    return Page(tuple(records[start : start + limit]), len(records) > start + limit)


def _stream_entry(record: SessionRecord, said: Feedback, steps: int, now: float) -> Command:
    fields: dict[str, str | int | float] = {
        "id": said.id(),
        "session": record.session,
        "success": int(said.success),
        "error_reason": said.error_reason or "",
        "branch": said.branch or "",
        "at": said.at_s,
        "received": now,
        "steps": steps,
    }
    flat: tuple[str | int | float, ...] = tuple(part for pair in fields.items() for part in pair)
    return ("XADD", f"magnitude:{{{record.tenant}}}:feedback", "MAXLEN", "~", MAX_FEEDBACK, "*", *flat)


def _list_key(tenant: str) -> str:
    return f"magnitude:{{{tenant}}}:sessions"


async def _all(calls: Iterable[Awaitable[object]]) -> list[object]:
    """Returns the replies of calls that share a round trip; raises StoreDown where one has none."""
    replies = await asyncio.gather(*calls, return_exceptions=True)
    for reply in replies:
        if isinstance(reply, BaseException):
            raise reply
    return replies
