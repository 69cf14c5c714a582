"""The state machine of the sessions whose pages are retained:

    resumed ──► thinking ── paused ──► waiting (for tools, or for its user)
                   ▲  └──── ended ──►  ended            │  │
                   └──────────── resumed ───────────────┘  └─ ended ─► ended

A step is what happens between two pauses. Where it ended is known by the digest of its last full page, which covers
all tokens before it, so one comparison tells whether a later prompt goes on from there. An end that the session did
not go on from is *left behind*:

- a step that goes on from no known end (a rewritten history, text that is tokenised differently when it comes back)
  leaves the ends of the step before it;
- a step that goes on from one of several ends of one step (choices of one prompt) leaves the others.

A client that runs two conversations under one session goes on from the end of either in turn and leaves none, except
where the second one begins.

At most `MAX_SESSIONS` are known; those that were active last stay.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

State = Literal["thinking", "waiting", "ended"]

MAX_SESSIONS = 4096
MAX_ENDS = 32
MAX_TOOLS = 32


class SessionKey(NamedTuple):
    """One line of thought: a branch of a session of a tenant."""

    tenant: str
    session: str
    branch: str


class End(NamedTuple):
    """Where a step ended: after how many full pages; whether it was left behind."""

    pages: int
    step: int
    left: bool = False


class Resumption(NamedTuple):
    """The tools that were waited for and how long, and the ends (digests) that the new step leaves behind."""

    tools: tuple[str, ...]
    waited_s: float
    left: tuple[bytes, ...]


@dataclass(slots=True, eq=False)
class Session:
    """Changed by the table only.

    Attributes:
        since: when it came into its state.
        pages: full pages of its last sequence.
        tools: what it waits for; empty when it waits for its user, or does not wait.
        due: when it is expected back, None where that is not known.
        ends: digest of the last page → end, the newest last.
    """

    state: State
    since: float
    pages: int = 0
    tools: tuple[str, ...] = ()
    due: float | None = None
    step: int = 0
    ends: dict[bytes, End] = field(default_factory=dict)


class SessionTable:
    """The sessions of all tenants; times are seconds of one monotonic clock. Not thread-safe."""

    def __init__(self) -> None:
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._dues: list[tuple[float, SessionKey]] = []

    def get(self, key: SessionKey) -> Session | None:
        """Returns what is known of a session."""
        return self._sessions.get(key)

    def items(self) -> Iterator[tuple[SessionKey, Session]]:
        """Yields the known sessions, the one that was active last at the end."""
        return iter(self._sessions.items())

    def branches(self, tenant: str, session: str) -> list[SessionKey]:
        """Returns the keys of all known branches of a session."""
        return [key for key in self._sessions if key.session == session and key.tenant == tenant]

    def due_between(self, start: float, end: float) -> list[SessionKey]:
        """Returns the waiting sessions that are expected back from `start` to before `end`, the first one first."""
        first, last = (bisect_left(self._dues, (at,)) for at in (start, end))
        return [key for _, key in self._dues[first:last]]

    def resume(self, key: SessionKey, chain: Sequence[bytes], now: float) -> Resumption:
        """A step begins with a prompt of these full pages."""
        before = self._sessions.get(key)
        waited = () if before is None else before.tools
        waited_s = 0.0 if before is None else max(now - before.since, 0.0)
        session = self._enter(key, "thinking", now)
        origins = {end.step for end in _take_reached(session, chain)} or {session.step}
        left = tuple(digest for digest, end in session.ends.items() if end.step in origins and not end.left)
        for digest in left:
            session.ends[digest] = session.ends[digest]._replace(left=True)
        session.step += 1
        _note_end(session, chain, session.step)
        return Resumption(waited, waited_s, left)

    def pause(self, key: SessionKey, chain: Sequence[bytes], tools: Sequence[str], now: float) -> Session:
        """A step ended after these full pages, having called these tools; returns the session, without a due."""
        session = self._enter(key, "waiting", now)
        session.tools = tuple(dict.fromkeys(tools))[:MAX_TOOLS]
        reached = _take_reached(session, chain)
        _note_end(session, chain, max((end.step for end in reached), default=session.step))
        return session

    def expect(self, key: SessionKey, due: float) -> None:
        """Notes when a waiting session is expected back."""
        session = self._sessions[key]
        self._forget_due(key, session)
        session.due = due
        insort(self._dues, (due, key))

    def end(self, key: SessionKey, now: float) -> tuple[bytes, ...] | None:
        """Nothing more is expected of a session; returns its ends, None where it is not known."""
        if key not in self._sessions:
            return None
        session = self._enter(key, "ended", now)
        ends = tuple(session.ends)
        session.ends.clear()
        return ends

    def _enter(self, key: SessionKey, state: State, now: float) -> Session:
        session = self._sessions.setdefault(key, Session(state, now))
        self._sessions.move_to_end(key)
        self._forget_due(key, session)
        session.state, session.since, session.tools = state, now, ()
        if len(self._sessions) > MAX_SESSIONS:
            oldest, dropped = self._sessions.popitem(last=False)
            self._forget_due(oldest, dropped)
        return session

    def _forget_due(self, key: SessionKey, session: Session) -> None:
        if session.due is not None:
            del self._dues[bisect_left(self._dues, (session.due, key))]
            session.due = None


def _take_reached(session: Session, chain: Sequence[bytes]) -> list[End]:
    """Takes the ends that `chain` goes on from out of the session, and returns them."""
    size = len(chain)
    reached = [d for d, end in session.ends.items() if end.pages <= size and chain[end.pages - 1] == d]
    return [session.ends.pop(digest) for digest in reached]


def _note_end(session: Session, chain: Sequence[bytes], step: int) -> None:
    session.pages = len(chain)
    if chain:
        session.ends[chain[-1]] = End(len(chain), step)
    if len(session.ends) > MAX_ENDS:
        del session.ends[next(iter(session.ends))]
