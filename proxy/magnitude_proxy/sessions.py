"""`/v1/sessions` and `/v1/sessions/{id}`: a tenant's sessions, listed, shown and ended.

A session is named by the id in `x-magnitude-session`, or by the client's own id of it. Another tenant's session is a
404 like one that never was.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from magnitude_engine import api
from magnitude_engine.errors import WorkerLost
from magnitude_proxy.chat import tenant_salt
from magnitude_proxy.config import SessionLimits
from magnitude_proxy.errors import BadRequest, NotFound, Unavailable
from magnitude_proxy.limits import lowered
from magnitude_proxy.session import SessionRecord, State
from magnitude_proxy.store.connection import StoreDown
from magnitude_proxy.store.credit import Feedback, SessionView, credited
from magnitude_proxy.store.pruned import Drop, Kind
from magnitude_proxy.surface import EXCHANGE, SURFACE, Surface, json_response
from magnitude_proxy.wire.replies import Reply

PAGE = 20
MAX_PAGE = 100
CACHE_S = 2.0


class SessionUsage(Reply, frozen=True, kw_only=True):
    """Tokens of all steps."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class SessionReply(Reply, frozen=True, kw_only=True):
    """A session in a list.

    Attributes:
        id: as in `x-magnitude-session`; `client_id` is the client's own, as far as it can be printed.
        source: what the session was recognised by.
        failures: steps without a complete answer.
        route, finish_reason: of the last step.
        created_at, seen_at: Unix seconds; at `expires_at` it is forgotten unless it goes on.
    """

    id: str
    client_id: str
    source: str
    state: State
    steps: int
    failures: int
    usage: SessionUsage
    route: str
    finish_reason: str
    created_at: int
    seen_at: int
    expires_at: int
    object: Literal["session"] = "session"


class SessionsReply(Reply, frozen=True, kw_only=True):
    """Body of the list, those seen last first; `last_id` is the next page's `after`."""

    data: tuple[SessionReply, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class StepReply(Reply, frozen=True, kw_only=True):
    """One of the last 64 steps: kept because its request asked for that or for pruning, or said to be dead.

    Attributes:
        at: Unix seconds of its end.
        success: what the feedback says that the step is credited with; null without one.
        dead: why it came to nothing, where the agent said so.
    """

    step: int
    at: float | None = None
    branch: str | None = None
    route: str | None = None
    finish_reason: str | None = None
    ok: bool | None = None
    success: bool | None = None
    dead: str | None = None


class KeptFeedback(Reply, frozen=True, kw_only=True):
    """One feedback, with the client's own timestamp; `branch` is null where it is about the whole session."""

    success: bool
    error_reason: str | None
    timestamp: str
    branch: str | None = None


class DropReply(Reply, frozen=True, kw_only=True):
    """Something that the session's prompts are not given any more; see `store.pruned.Drop`.

    Attributes:
        messages: indices in the client's own list when it was decided; `digest` is theirs.
        at: Unix seconds.
        ahead: decided while the session waited, so that the shorter prompt was computed meanwhile.
        counted: whether the worker counted `tokens`, which otherwise are estimated.
    """

    kind: Kind
    messages: tuple[int, ...]
    digest: str
    reason: str
    step: int | None
    branch: str
    at: float
    ahead: bool
    tokens: int
    counted: bool


class BranchCache(Reply, frozen=True, kw_only=True):
    """What the worker holds of a branch: tokens, the tool that it waits for, and when that is expected back."""

    branch: str
    state: str
    tokens: int
    waits_for: str | None
    due_s: float | None


class CountReply(Reply, frozen=True, kw_only=True):
    """How much of a limit is used; `limit` is null without one."""

    used: float
    limit: float | None


class LimitsReply(Reply, frozen=True, kw_only=True):
    """What the session may use with this key and has used; how often a tool call may be repeated, null for ever."""

    iterations: CountReply
    tokens: CountReply
    seconds: CountReply
    max_repeats: int | None


class SessionReport(SessionReply, frozen=True, kw_only=True):
    """A session as it is shown alone; `cache` is null while no worker can say what it holds.

    Attributes:
        advice: what the agent's author should change, as in `x-magnitude-session-advice`; null where nothing is wrong.
    """

    tracked_steps: tuple[StepReply, ...]
    feedback: tuple[KeptFeedback, ...]
    pruned: tuple[DropReply, ...]
    cache: tuple[BranchCache, ...] | None
    limits: LimitsReply
    advice: str | None = None


class DeletedReply(Reply, frozen=True, kw_only=True):
    """Body of a deletion."""

    id: str
    deleted: bool = True
    object: Literal["session.deleted"] = "session.deleted"


async def listed(request: web.Request) -> web.Response:
    """The tenant's sessions; raises ProxyError."""
    surface = request.app[SURFACE]
    limit = _limit(request.query.get("limit"))
    after = request.query.get("after")
    try:
        page = await surface.sessions.book.page(tenant_salt(request), limit, after)
    except StoreDown as down:
        raise store_down() from down
    if page is None:
        raise BadRequest("after names no listed session; begin again without it", param="after")
    ttl_s = surface.config.store.session_ttl_s
    data = tuple(_reply(record, ttl_s) for record in page.records)
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return json_response(SessionsReply(data=data, first_id=first, last_id=last, has_more=page.more))


async def shown(request: web.Request) -> web.Response:
    """One session with its steps, its feedback and its cache; raises ProxyError."""
    surface, record = request.app[SURFACE], await found(request)
    try:
        view = await surface.sessions.book.view(record.session)
        drops = await surface.sessions.prunings.of(record.session)
    except StoreDown as down:
        raise store_down() from down
    if view is None:
        raise unknown_session()
    key = request[EXCHANGE].key
    limits = _limits(view.record, SessionLimits() if key is None else key.limits, surface.now())
    cache = _cache(await cached(surface, record))
    return json_response(_report(view, drops, surface.config.store.session_ttl_s, cache, limits))


async def deleted(request: web.Request) -> web.Response:
    """Ends a session, in the store and in the worker; raises ProxyError."""
    surface, record = request.app[SURFACE], await found(request)
    try:
        ended = await surface.sessions.book.finish(record)
    except StoreDown as down:
        raise store_down() from down
    if not ended:
        raise unknown_session()
    surface.recents.forget(record.session)
    surface.sessions.prunings.forget(record.session)
    if surface.worker is not None:
        await surface.worker.tell(api.EndSession(tenant=tenant_salt(request), session=record.session))
    return json_response(DeletedReply(id=record.session))


async def found(request: web.Request) -> SessionRecord:
    """Returns the session that the path names; raises NotFound, or Unavailable while the store cannot say."""
    book, salt, given = request.app[SURFACE].sessions.book, tenant_salt(request), request.match_info["id"]
    try:
        record = await book.find(salt, given)
    except StoreDown as down:
        raise store_down() from down
    if record is None:
        raise unknown_session()
    return record


def unknown_session() -> NotFound:
    """Returns the error for an id that is no session of the tenant."""
    return NotFound(
        "there is no such session, or it has expired: use the id in x-magnitude-session, or the one the client sent",
        code="session_not_found",
    )


def store_down() -> Unavailable:
    """Returns the error for what needs the session store while it is away."""
    return Unavailable(
        "the session store does not answer, and this needs it; try again, and see /health for the reason",
        code="store_unavailable",
        headers={"Retry-After": "1"},
    )


def _limit(given: str | None) -> int:
    if given is None:
        return PAGE
    if not (given.isascii() and given.isdecimal() and len(given) < 10 and 1 <= int(given) <= MAX_PAGE):
        raise BadRequest(f"limit must be a whole number from 1 to {MAX_PAGE}", param="limit")
    return int(given)


def _reply(record: SessionRecord, ttl_s: float) -> SessionReply:
    return SessionReply(
        id=record.session,
        client_id=record.raw,
        source=record.source,
        state=record.state,
        steps=record.steps,
        failures=record.failures,
        usage=SessionUsage(
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            cached_tokens=record.cached_tokens,
        ),
        route=record.route,
        finish_reason=record.finish_reason,
        created_at=int(record.created_s),
        seen_at=int(record.seen_s),
        expires_at=int(record.seen_s + ttl_s),
    )


def _report(
    view: SessionView, drops: tuple[Drop, ...], ttl_s: float, cache: tuple[BranchCache, ...] | None, limits: LimitsReply
) -> SessionReport:
    return SessionReport(
        **msgspec.structs.asdict(_reply(view.record, ttl_s)),
        tracked_steps=tuple(_step(view, number) for number in sorted({*view.steps, *view.dead})),
        feedback=tuple(map(_feedback, view.feedback)),
        pruned=tuple(map(_drop, drops)),
        cache=cache,
        advice=view.advice or None,
        limits=limits,
    )


def _limits(record: SessionRecord, server: SessionLimits, now: float) -> LimitsReply:
    limits, use = lowered(server, record.limits), record.use(now)
    return LimitsReply(
        iterations=CountReply(used=use.iterations, limit=limits.max_iterations),
        tokens=CountReply(used=use.tokens, limit=limits.max_tokens),
        seconds=CountReply(used=round(use.seconds, 1), limit=limits.max_seconds),
        max_repeats=limits.max_repeats,
    )


def _step(view: SessionView, number: int) -> StepReply:
    kept, dead = view.steps.get(number), view.dead.get(number)
    if kept is None:
        return StepReply(step=number, dead=dead)
    said = credited(kept, view.feedback)
    return StepReply(
        step=number,
        at=kept.at_s,
        branch=kept.branch,
        route=kept.route,
        finish_reason=kept.finish_reason,
        ok=kept.ok,
        success=None if said is None else said.success,
        dead=dead,
    )


def _drop(drop: Drop) -> DropReply:
    return DropReply(
        kind=drop.kind,
        messages=tuple(range(drop.index, drop.index + drop.count)),
        digest=drop.digest,
        reason=drop.reason,
        step=drop.step,
        branch=drop.branch,
        at=drop.at_s,
        ahead=drop.ahead,
        tokens=drop.tokens,
        counted=drop.counted,
    )


def _feedback(said: Feedback) -> KeptFeedback:
    return KeptFeedback(
        success=said.success, error_reason=said.error_reason, timestamp=said.timestamp, branch=said.branch
    )


async def cached(surface: Surface, record: SessionRecord) -> tuple[api.SessionUse, ...] | None:
    """Returns what the worker holds of a session, whose id is no other tenant's; None when it cannot say soon."""
    if surface.worker is None:
        return None
    try:
        report = await surface.worker.inspect(CACHE_S)
    except WorkerLost:
        return None
    return tuple(use for use in report.sessions if use.session == record.session)


def _cache(uses: tuple[api.SessionUse, ...] | None) -> tuple[BranchCache, ...] | None:
    if uses is None:
        return None
    return tuple(
        BranchCache(branch=u.branch, state=u.state, tokens=u.tokens, waits_for=u.tool or None, due_s=u.due_s)
        for u in uses
    )
