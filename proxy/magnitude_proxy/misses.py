"""`GET /v1/sessions/{id}/cache`: what a session's prompts found in the worker's cache, and why not more.

It holds text of the session's prompts: another tenant's session is a 404 like one that never was.
"""

from __future__ import annotations

import uuid
from typing import Literal

import msgspec
from aiohttp import web

from magnitude_engine import api
from magnitude_engine.errors import WorkerLost
from magnitude_proxy.chat import tenant_salt
from magnitude_proxy.errors import NotFound, Unavailable
from magnitude_proxy.sessions import found
from magnitude_proxy.surface import SURFACE, json_response
from magnitude_proxy.wire.replies import Reply

ADVICE: dict[api.MissCause, str] = {
    "timestamp": "a time stands in front of text that stays the same: put it at the prompt's end, or leave it out",
    "nonce": "a value that is never the same stands in front of text that is: put it at the end, or leave it out",
    "tool_order": "the same tools came in another order: keep it, or send magnitude.canonical_tools",
    "tool_change": "a tool was added, removed or described otherwise: send all tools at every step",
    "system_change": "the system prompt is another: keep it, and tell what changes in a message at the end",
    "template": "the chat template, or the client's own, shows earlier messages in another way than before",
    "compaction": "earlier messages were dropped, cleared or summarised: do so seldom, and then much at once",
    "edited_history": "an earlier message says something else: append what changes instead",
    "reserialised": "an earlier message came back in another form: send white space and calls' arguments as they were",
    "eviction": "the cache lost it for room: give it more memory (--kv-memory-mb, --kv-host-mb, --kv-disk-mb)",
    "unseen": "nothing was known that this prompt could go on from",
}


class CauseReply(Reply, frozen=True, kw_only=True):
    """All misses of one cause."""

    cause: api.MissCause
    misses: int
    wasted_tokens: int


class CacheTotals(Reply, frozen=True, kw_only=True):
    """All steps since the worker began; `hit_rate` is the share of prompt tokens that was found, 0..1."""

    steps: int
    prompt_tokens: int
    cached_tokens: int
    wasted_tokens: int
    hit_rate: float
    causes: tuple[CauseReply, ...]


class CacheStep(Reply, frozen=True, kw_only=True):
    """One of the last 64 steps: what of its prompt was found, and where; `cause` is null where all was that could be.

    Attributes:
        at: Unix seconds of its beginning.
    """

    step: int
    branch: str
    at: float
    prompt_tokens: int
    cached_tokens: int
    cached_host_tokens: int
    cached_disk_tokens: int
    cause: api.MissCause | None
    wasted_tokens: int


class MissTextReply(Reply, frozen=True, kw_only=True):
    """The text around a difference: what both prompts have before it, then each one's own, and its first token."""

    lead: str
    before: str
    now: str
    token_before: str
    token_now: str


class MissDetailReply(Reply, frozen=True, kw_only=True):
    """One of the last 16 misses.

    Attributes:
        at: Unix seconds of its step's beginning.
        position: the first token that differs, or is gone, from 0.
        wasted_tokens: computed again although an earlier prompt held them; `evicted_tokens` of them were gone.
        message: index of the message that differs; null outside of messages.
        text: null where the prompts do not differ.
        advice: what can be done about it.
    """

    step: int
    branch: str
    at: float
    cause: api.MissCause
    position: int
    wasted_tokens: int
    evicted_tokens: int
    prompt_tokens: int
    cached_tokens: int
    message: int | None
    text: MissTextReply | None
    advice: str


class CacheReply(Reply, frozen=True, kw_only=True):
    """Body of the answer; steps and misses oldest first."""

    id: str
    totals: CacheTotals
    steps: tuple[CacheStep, ...]
    misses: tuple[MissDetailReply, ...]
    object: Literal["session.cache"] = "session.cache"


async def cache(request: web.Request) -> web.Response:
    """Tells what a session's prompts found; raises ProxyError."""
    surface, record = request.app[SURFACE], await found(request)
    if surface.worker is None:
        raise NotFound("this server has no local worker, so no cache of its own: upstreams answer", code="no_worker")
    asked = api.AskMisses(
        request=f"misses-{uuid.uuid4().hex}", epoch=0, tenant=tenant_salt(request), session=record.session
    )
    try:
        told = await surface.worker.misses(asked)
    except WorkerLost as lost:
        raise Unavailable(lost.message, code=lost.code) from lost
    reply = cache_reply(record.session, told)
    return json_response(reply)


def cache_reply(session: str, told: api.SessionMisses) -> CacheReply:
    """Returns what the worker said as clients see it."""
    return CacheReply(
        id=session,
        totals=CacheTotals(
            steps=told.step_count,
            prompt_tokens=told.prompt_tokens,
            cached_tokens=told.cached_tokens,
            wasted_tokens=sum(each.wasted for each in told.causes),
            hit_rate=told.cached_tokens / told.prompt_tokens if told.prompt_tokens else 0.0,
            causes=tuple(CauseReply(cause=c.cause, misses=c.misses, wasted_tokens=c.wasted) for c in told.causes),
        ),
        steps=tuple(map(_step, told.steps)),
        misses=tuple(map(_miss, told.misses)),
    )


def _step(step: api.StepCache) -> CacheStep:
    return CacheStep(
        step=step.step,
        branch=step.branch,
        at=step.at_s,
        prompt_tokens=step.prompt_tokens,
        cached_tokens=step.cached_tokens,
        cached_host_tokens=step.cached_host_tokens,
        cached_disk_tokens=step.cached_disk_tokens,
        cause=step.cause,
        wasted_tokens=step.wasted,
    )


def _miss(detail: api.MissDetail) -> MissDetailReply:
    text = detail.text
    return MissDetailReply(
        step=detail.step,
        branch=detail.branch,
        at=detail.at_s,
        cause=detail.miss.cause,
        position=detail.miss.at,
        wasted_tokens=detail.miss.wasted,
        evicted_tokens=detail.evicted,
        prompt_tokens=detail.prompt_tokens,
        cached_tokens=detail.cached_tokens,
        message=detail.message,
        text=None if text is None else MissTextReply(**msgspec.structs.asdict(text)),
        advice=ADVICE[detail.miss.cause],
    )
