"""What a server is told about whom a request is for: cache salt, session, priority, slot.

A teller gets the facts of one request and of its server and returns fields for the body and headers. None of it
changes an answer. Ids and salts are derived ones, so a client can neither guess another's nor choose its own.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from magnitude_proxy.upstream.adapters.server import Server

SALT_PURPOSE = b"upstream cache salt"
SESSION_HEADER = "X-Session-ID"
DYNAMO_SESSION, DYNAMO_PARENT = "X-Dynamo-Session-ID", "X-Dynamo-Parent-Session-ID"
# For how long Dynamo keeps a session's prefix between two steps.
DYNAMO_TTL = "5m"
MAIN_BRANCH = "main"
# TensorRT-LLM: from 0 to 1, higher is sooner; the ordinary priority, and how many of ours make one of its.
_TRTLLM_MIDDLE, _TRTLLM_SPAN = 0.5, 200
# Tenants whose salt is not derived anew for each request.
_REMEMBERED = 256
_Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Facts:
    """Whom a request is for.

    Attributes:
        chat: it is a chat, not a raw completion.
        salt: keeps the tenant's cache apart.
        session, branch: ids, `step` the session's step.
        priority: lower is sooner, 0 the ordinary one.
        slot: the session's slot; None for any.
        cached: a prefix may be taken from the server's cache.
    """

    chat: bool
    salt: str
    session: str
    branch: str = MAIN_BRANCH
    step: int = 0
    priority: int = 0
    slot: int | None = None
    cached: bool = True

    @property
    def line(self) -> str:
        """The session's branch as one id."""
        return self.session if self.branch == MAIN_BRANCH else f"{self.session}-{self.branch}"


@dataclass(frozen=True, slots=True)
class Told:
    """Fields and headers to add."""

    body: _Fields = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)


Teller = Callable[[Facts, Server], Told]


def cache_salt(tenant: str, wanted: object) -> str:
    """Returns the salt of a tenant for servers; a client's own `cache_salt` can only divide the tenant's cache further.

    43 characters, the HMAC-SHA256 of the purpose and the client's wish under the tenant's own salt.
    """
    if isinstance(wanted, str):
        return _derived(tenant, SALT_PURPOSE + b"\0" + wanted.encode())
    return _own_salt(tenant)


@functools.lru_cache(_REMEMBERED)
def _own_salt(tenant: str) -> str:
    return _derived(tenant, SALT_PURPOSE)


def _derived(tenant: str, purpose: bytes) -> str:
    digest = hmac.new(tenant.encode(), purpose, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def nothing(_: Facts, __: Server) -> Told:
    """Plain OpenAI servers, and TGI, have no words for any of it."""
    return Told()


def vllm(facts: Facts, server: Server) -> Told:
    """`cache_salt`, `priority`, and the header by which routers and vLLM 0.32 know a session."""
    body: _Fields = {"cache_salt": facts.salt}
    # Before that, a server without priority scheduling refuses requests that have one.
    if facts.priority and not server.older_than(0, 11):
        body["priority"] = facts.priority
    return Told(body, {SESSION_HEADER: facts.session})


def sglang(facts: Facts, server: Server) -> Told:
    """`cache_salt`; `session_id` and `priority` where the server is set up for them."""
    body: _Fields = {"cache_salt": facts.salt}
    if server.keeps_sessions:
        body["session_id"] = facts.session
    if facts.priority and server.order != "none":
        body["priority"] = facts.priority if server.order == "low_first" else -facts.priority
    return Told(body, {SESSION_HEADER: facts.session})


def llamacpp(facts: Facts, _: Server) -> Told:
    """`id_slot`, and `cache_prompt` where what a slot holds may be used."""
    slot: _Fields = {} if facts.slot is None else {"id_slot": facts.slot}
    return Told({"cache_prompt": facts.cached, **slot})


def trtllm(facts: Facts, server: Server) -> Told:
    """`cache_salt` in chats and `priority`; a server that does not know a field refuses the request."""
    body: _Fields = {}
    if facts.chat and not server.older_than(1, 1):
        body["cache_salt"] = facts.salt
    if facts.priority and not server.older_than(1, 4):
        body["priority"] = min(max(_TRTLLM_MIDDLE - facts.priority / _TRTLLM_SPAN, 0.0), 1.0)
    return Told(body)


def dynamo(facts: Facts, _: Server) -> Told:
    """`nvext` with salt, priority (higher is sooner) and how long a session's prefix is kept; session headers."""
    nvext: _Fields = {"cache_salt": facts.salt}
    if facts.priority:
        nvext["agent_hints"] = {"priority": -facts.priority}
    if facts.step:
        nvext["cache_control"] = {"type": "ephemeral", "ttl": DYNAMO_TTL}
    headers = {DYNAMO_SESSION: facts.line}
    if facts.line != facts.session:
        headers[DYNAMO_PARENT] = facts.session
    return Told({"nvext": nvext}, headers)


def magnitude(facts: Facts, _: Server) -> Told:
    """Another proxy of this kind: session, branch, priority."""
    return Told({"magnitude": {"session": facts.session, "branch": facts.branch, "priority": facts.priority}})
