"""Branches of a server's session, as the server tells of them, and what the client sends about them.

session = client.session("run-1")
for branch in await session.fork(3):
    thought = await client.chat(messages, session_id="run-1", branch=branch.id)
    await session.score(branch, judge(thought["text"]))
best = (await session.branches()).best()
await session.select(best)  # the session goes on from it, the others are pruned
"""

from __future__ import annotations

from math import isfinite
from urllib.parse import quote

import msgspec

from magnitude_engine.errors import RequestError


class SessionBranch(msgspec.Struct, frozen=True, kw_only=True):
    """One branch.

    Attributes:
        id: what `branch=` of a question, `score`, `prune` and `select` take.
        session_id: as in the header `x-magnitude-session`.
        parent: id of what it was forked from, `main` for the session's main line.
        depth: how many forks lie between it and the main line, at least 1.
        state: `open`, `pruned` or `selected`; only an open one can be asked.
        tokens: what the worker holds of it; None while no worker can say.
        created_at, ended_at: Unix seconds.
        reason: why it was pruned.
    """

    id: str
    session_id: str
    parent: str
    depth: int
    state: str
    score: float | None
    tokens: int | None
    created_at: float
    ended_at: float | None
    reason: str


class SessionBranches(msgspec.Struct, frozen=True, kw_only=True):
    """Branches in the order of their forks.

    Attributes:
        line: id of the branch that the session goes on from; None before one was selected.
        max_parallel_branches: how many may be open at a time.
    """

    branches: tuple[SessionBranch, ...] = msgspec.field(name="data")
    line: str | None
    max_parallel_branches: int

    def best(self) -> SessionBranch:
        """Returns the open branch with the highest score, of equals the first; raises RequestError without one."""
        scored = [(each.score, each) for each in self.branches if each.score is not None and each.state == "open"]
        if not scored:
            raise RequestError("no open branch of the session has a score: call score(...) on them first")
        return max(scored, key=lambda pair: pair[0])[1]


class _Fork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    count: int
    parent: str | None = None
    max_parallel_branches: int | None = None


class _Score(msgspec.Struct, frozen=True, kw_only=True):
    score: float


class _Prune(msgspec.Struct, frozen=True, kw_only=True):
    reason: str


def encode_fork(count: int, parent: str | SessionBranch | None, limit: int | None) -> bytes:
    """Returns the JSON body of a fork; raises RequestError."""
    for name, value in (("count", count), ("max_parallel_branches", 1 if limit is None else limit)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise RequestError(f"{name} must be a whole number of at least 1, not {value!r}", param=name)
    named = None if parent is None else branch_id(parent)
    return msgspec.json.encode(_Fork(count=count, parent=named, max_parallel_branches=limit))


def encode_score(value: float) -> bytes:
    """Returns the JSON body of a score; raises RequestError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise RequestError(f"a score must be a finite number, not {value!r}", param="value")
    return msgspec.json.encode(_Score(score=value))


def encode_prune(reason: str) -> bytes:
    """Returns the JSON body of a prune; raises RequestError."""
    if not isinstance(reason, str):
        raise RequestError(f"reason must be text, not {type(reason).__name__}", param="reason")
    return msgspec.json.encode(_Prune(reason=reason))


def branch_path(branch: str | SessionBranch, act: str) -> str:
    """Returns the path of an act on a branch, under that of its session; raises RequestError."""
    return f"/branches/{quote(branch_id(branch), safe='')}/{act}"


def branch_id(branch: str | SessionBranch) -> str:
    """Returns the id of a branch; raises RequestError for what is none."""
    name = branch.id if isinstance(branch, SessionBranch) else branch
    if not isinstance(name, str) or not name:
        raise RequestError(f"branch must be a SessionBranch or its id, not {branch!r}", param="branch")
    return name
