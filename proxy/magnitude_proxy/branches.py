"""`/v1/sessions/{id}/branches`: hypotheses that grow from one session, scored, pruned, and one of them kept.

    POST …/branches                  {"count": 3}: ids of branches that grow from the main line, or from "parent"
    GET  …/branches                  all of them, with what the worker holds of each
    POST …/branches/{branch}/score   {"score": 0.7}: how good it is; the last score counts
    POST …/branches/{branch}/prune   ends it and all that was forked from it; its pages are free within a second
    POST …/branches/{branch}/select  the session goes on from it; all others are pruned

A branch is asked by the ordinary routes, with whole prompts and its id in the header `x-magnitude-branch` or as
`magnitude.branch` of the body; what its prompt has in common with others is found in the cache. Once it was pruned or
selected that is a 409. Branches are kept in the session's record: all proxies of one store agree on them, and they
outlive the worker. Names that no fork gave, such as those of sub-agents, need no fork and are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta

from magnitude_engine import api
from magnitude_proxy import forks
from magnitude_proxy.chat import tenant_salt
from magnitude_proxy.identity import MAIN_BRANCH
from magnitude_proxy.middleware import read_body
from magnitude_proxy.sessions import cached, found, store_down, unknown_session
from magnitude_proxy.store.branches import PREFIX, BranchNote, BranchState, forked, scored
from magnitude_proxy.store.connection import StoreDown
from magnitude_proxy.surface import SURFACE, json_response
from magnitude_proxy.wire.replies import Reply
from magnitude_proxy.wire.requests import SessionName, Wire, convert, decode_json

MOST = 1024
MAX_REASON = 2_000

Count = Annotated[int, Meta(ge=1, le=MOST)]


class ForkRequest(Wire, frozen=True, kw_only=True):
    """Body of a fork; `max_parallel_branches` limits this session from now on, below the server's own limit."""

    count: Count = 1
    parent: SessionName = MAIN_BRANCH
    max_parallel_branches: Count | None = None


class ScoreRequest(Wire, frozen=True, kw_only=True):
    """Body of a score; more is better."""

    score: float


class PruneRequest(Wire, frozen=True, kw_only=True):
    """Body of a prune; it may be empty."""

    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""


class BranchReply(Reply, frozen=True, kw_only=True):
    """A branch.

    Attributes:
        session_id: as in `x-magnitude-session`.
        parent: the id of what it was forked from, `main` for the session's main line.
        depth: how many forks lie between it and the main line, at least 1.
        tokens: what the worker holds of it; null while no worker can say.
        created_at, ended_at: Unix seconds.
        reason: why it was pruned.
    """

    id: str
    session_id: str
    parent: str
    depth: int
    state: BranchState
    score: float | None
    tokens: int | None
    created_at: float
    ended_at: float | None
    reason: str
    object: Literal["session.branch"] = "session.branch"


class BranchesReply(Reply, frozen=True, kw_only=True):
    """Branches in the order of their forks.

    Attributes:
        line: the branch that the session goes on from; null before one was selected.
        max_parallel_branches: how many may be open at a time.
    """

    data: tuple[BranchReply, ...]
    line: str | None
    max_parallel_branches: int
    object: Literal["list"] = "list"


async def fork(request: web.Request) -> web.Response:
    """Opens branches; raises ProxyError."""
    asked = convert(decode_json(await read_body(request)), ForkRequest)
    surface, record = request.app[SURFACE], await found(request)
    names = [f"{PREFIX}{surface.sessions.unused()}" for _ in range(asked.count)]
    limits = (surface.config.branches.max_parallel, asked.max_parallel_branches)
    acted = await forks.act(surface, record, lambda known: forked(known, asked.parent, names, limits, surface.now()))
    notes = {name: acted.after.notes[name] for name in names}
    return _listing(record.session, notes, acted.after.line, limit_of(limits[0], acted.after.limit), ())


async def listed(request: web.Request) -> web.Response:
    """All branches; raises ProxyError."""
    surface, record = request.app[SURFACE], await found(request)
    try:
        known = await surface.sessions.book.branches(record)
    except StoreDown as down:
        raise store_down() from down
    if known is None:
        raise unknown_session()
    most = limit_of(surface.config.branches.max_parallel, known.limit)
    return _listing(record.session, known.notes, known.line, most, await cached(surface, record))


async def score(request: web.Request) -> web.Response:
    """Notes how good a branch is; raises ProxyError."""
    asked = convert(decode_json(await read_body(request)), ScoreRequest)
    surface, record, name = request.app[SURFACE], await found(request), request.match_info["branch"]
    acted = await forks.act(surface, record, lambda known: scored(known, name, asked.score))
    return json_response(_reply(record.session, name, acted.after.notes[name], await cached(surface, record)))


async def prune(request: web.Request) -> web.Response:
    """Ends a branch and all that was forked from it; returns those that ended now. Raises ProxyError."""
    body = await read_body(request)
    asked = convert(decode_json(body), PruneRequest) if body.strip() else PruneRequest()
    surface, record, name = request.app[SURFACE], await found(request), request.match_info["branch"]
    acted = await forks.prune(surface, tenant_salt(request), record, name, asked.reason)
    most = limit_of(surface.config.branches.max_parallel, acted.after.limit)
    return _listing(record.session, acted.change.put, acted.after.line, most, ())


async def select(request: web.Request) -> web.Response:
    """The session goes on from a branch; raises ProxyError."""
    surface, record, name = request.app[SURFACE], await found(request), request.match_info["branch"]
    acted = await forks.select(surface, tenant_salt(request), record, name)
    return json_response(_reply(record.session, name, acted.after.notes[name], await cached(surface, record)))


def limit_of(server: int, session: int | None) -> int:
    """Returns how many branches of a session may be open, of the server's limit and the session's own."""
    return server if session is None else min(server, session)


def _listing(
    session: str,
    notes: Mapping[str, BranchNote],
    line: str | None,
    most: int,
    uses: tuple[api.SessionUse, ...] | None,
) -> web.Response:
    data = tuple(_reply(session, name, note, uses) for name, note in notes.items())
    return json_response(BranchesReply(data=data, line=line, max_parallel_branches=most))


def _reply(session: str, name: str, note: BranchNote, uses: tuple[api.SessionUse, ...] | None) -> BranchReply:
    held = None if uses is None else sum(u.tokens for u in uses if u.branch == name and u.state != "ended")
    return BranchReply(
        id=name,
        session_id=session,
        parent=note.parent,
        depth=note.depth,
        state=note.state,
        score=note.score,
        tokens=held,
        created_at=note.created_s,
        ended_at=note.ended_s,
        reason=note.reason,
    )
