"""`POST /v1/feedback`: how a session, or a branch of it, went, as its agent judges.

Acknowledged feedback is kept in its session, where it is credited to the steps before it, and in the tenant's stream
for whoever learns from it. With a `branch` only that branch's steps are credited; where it is no success, the branch
is dead from then on, as if it had been pruned. The same feedback may come any number of times, late, or in any order:
it counts once, by its own timestamp. Feedback about a session that is unknown, has expired or is another tenant's is
rejected, all three alike.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Literal

from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from magnitude_proxy import forks
from magnitude_proxy.chat import tenant_salt
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.identity import branch_name
from magnitude_proxy.middleware import read_body
from magnitude_proxy.pruner import marked
from magnitude_proxy.session import SessionRecord
from magnitude_proxy.sessions import store_down
from magnitude_proxy.store.branches import PREFIX
from magnitude_proxy.store.connection import StoreDown
from magnitude_proxy.store.credit import KEPT, Fate, Feedback
from magnitude_proxy.surface import SURFACE, Surface, json_response
from magnitude_proxy.telemetry import FEEDBACK
from magnitude_proxy.wire.replies import Reply
from magnitude_proxy.wire.requests import SessionName, Wire, convert, decode_json

MAX_REASON = 4_000

_UNKNOWN = Fate("unknown", 0)
_NO_BRANCH = Fate("no_branch", 0)
_REJECTED = {
    "unknown": "there is no such session, or it has expired",
    "no_branch": "the session has no such branch",
    "old": f"the session holds {KEPT} later ones, which is all that it keeps",
}


class FeedbackRequest(Wire, frozen=True, kw_only=True):
    """Body of the request; `session_id` is the client's own or the one in `x-magnitude-session`, the time ISO 8601.

    `branch` is one that was forked, or a client's own name of one; without it the whole session is meant.
    """

    session_id: SessionName
    success: bool
    timestamp: Annotated[str, Meta(max_length=64)]
    error_reason: Annotated[str, Meta(max_length=MAX_REASON)] | None = None
    branch: SessionName | None = None


class FeedbackReply(Reply, frozen=True, kw_only=True):
    """Body of the answer; `reason` says why feedback was rejected."""

    status: Literal["acknowledged", "rejected"]
    reason: str | UnsetType = UNSET


async def feedback(request: web.Request) -> web.Response:
    """Keeps feedback; raises ProxyError, while the store is away a 503."""
    surface, salt = request.app[SURFACE], tenant_salt(request)
    asked = convert(decode_json(await read_body(request)), FeedbackRequest)
    said = read_feedback(asked)
    book = surface.sessions.book
    try:
        record = await book.find(salt, asked.session_id)
        fate = _UNKNOWN if record is None else await _keep(surface, record, said)
    except StoreDown as down:
        raise store_down() from down
    if record is not None and said.branch is not None and not (said.success or fate.outcome == "no_branch"):
        await forks.bury(surface, salt, record, said.branch, said.error_reason or "")
    surface.telemetry.count(FEEDBACK, outcome=fate.outcome)
    if record is not None and fate.outcome == "added":
        marked(surface, record.session)
    reason = _REJECTED.get(fate.outcome)
    reply = FeedbackReply(status="acknowledged") if reason is None else FeedbackReply(status="rejected", reason=reason)
    return json_response(reply)


async def _keep(surface: Surface, record: SessionRecord, said: Feedback) -> Fate:
    """Keeps feedback unless its branch is none of the session; raises StoreDown."""
    book = surface.sessions.book
    if said.branch is not None and said.branch.startswith(PREFIX):
        known = await book.branches(record)
        if known is None or said.branch not in known.notes:
            return _NO_BRANCH
    return await book.feedback(record, said, surface.now())


def read_feedback(asked: FeedbackRequest) -> Feedback:
    """Returns the feedback; a time without a zone is UTC. Raises BadRequest."""
    try:
        when = datetime.fromisoformat(asked.timestamp)
        at_s = (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise BadRequest("timestamp must be ISO 8601, for example 2026-11-30T12:00:00Z", param="timestamp") from error
    return Feedback(
        success=asked.success,
        timestamp=asked.timestamp,
        at_s=at_s,
        error_reason=asked.error_reason,
        branch=None if asked.branch is None else branch_name(asked.branch),
    )
