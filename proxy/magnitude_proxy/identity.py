"""Which agent session a request belongs to, decided from its headers and body alone.

The first of these that is present wins:

    X-Magnitude-Session, body `magnitude.session`      the product's own names
    headers of known agents                            see `client_headers.CLIENTS`, in that order
    body `session_id`, `program_id`,
    `metadata.session_id`, `prompt_cache_key`          hints of other clients
    fingerprint                                        tools, system text and first user message, or the raw text

A sub-agent is a branch of its session, whether it is told by a name within it or by a parent. What only other
requests tell, such as the parent's own parent, is `lineage.py`'s business.

A session id is SHA-256 over length-prefixed (tenant, source, raw id), cut to 128 bits, in hex: ids of different
tenants or sources never meet, whatever bytes a client sends. Being one session only shares a record and a place in
the cache; it never changes an answer, so that a wrong guess costs time and nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_proxy.client_headers import CLIENTS, FINAL, aside, tool_seconds

MAIN_BRANCH = "main"
PRODUCT = "magnitude"
FIELD = "session-id"
PROGRAM = "program-id"
METADATA = "metadata"
CACHE_KEY = "prompt-cache-key"
FINGERPRINT = "fingerprint"
TEXT_PREFIX_CHARS = 1024
RAW_CHARS = 200

_HINTS = (FIELD, PROGRAM, METADATA, CACHE_KEY)
_SHOWN = re.compile("[0-9a-f]{32}")
_PLAIN_BRANCH = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request belongs.

    Attributes:
        tenant: see `tenant_name`.
        session: 32 hex digits.
        branch: `main`, a client's plain branch name, or `~` and a hash of any other name.
        run: session id of the root session when the client named a parent, else `session`.
        source: what the session was recognised by, such as `claude-code` or `fingerprint`.
        raw: the client's own id for people to read: escaped to printable characters and cut to 200.
        own: of a sub-agent, the session that it would be by its own id.
        aside: a call beside the conversation, which is no step of it.
        final: nothing more comes of the session, or of its branch if that is a sub-agent's.
        tool_seconds: how long the tools of the last step ran, as far as the client says.
        advice: what its author should change, for a header and the session's report.
    """

    tenant: str
    session: str
    branch: str
    run: str
    source: str
    raw: str
    own: str | None = None
    aside: bool = False
    final: bool = False
    tool_seconds: dict[str, float] = {}
    advice: str | None = None


class IdentityHints(msgspec.Struct, frozen=True, kw_only=True):
    """What the body says about the session; `text` is the prompt of a completion without messages."""

    magnitude_session: str | None = None
    magnitude_branch: str | None = None
    magnitude_parent: str | None = None
    session_id: str | None = None
    program_id: str | None = None
    metadata_session_id: str | None = None
    prompt_cache_key: str | None = None
    messages: tuple[api.Message, ...] = ()
    tools: tuple[api.Tool, ...] = ()
    text: str | None = None


class _Found(NamedTuple):
    """A raw session id with what came with it (see `client_headers.Client`)."""

    source: str
    raw: str
    branch: str = ""
    parent: str = ""


def identify(tenant: str, headers: Mapping[str, str], hints: IdentityHints) -> Identity:
    """Returns the identity of one request; header names match in any case, blank values count as absent."""
    present = {name.lower(): given for name, value in headers.items() if (given := value.strip())}
    found = _product(present, hints) or _client(present) or _hint(hints) or _Found(FINGERPRINT, fingerprint(hints))
    session = _session_id(tenant, found.source, found.raw)
    raw = found.raw
    sub_agent: str | None = None
    own: str | None = None
    if found.branch not in ("", raw):
        sub_agent, own = found.branch, _session_id(tenant, found.source, found.branch)
    elif found.parent not in ("", raw):
        raw, sub_agent, own = found.parent, raw, session
        session = _session_id(tenant, found.source, raw)
    branch = present.get("x-magnitude-branch") or _given(hints.magnitude_branch) or sub_agent
    beside = aside(present, tools=bool(hints.tools))
    if beside is not None:
        branch = f"{branch}:{beside}" if branch else beside
    parent = present.get("x-magnitude-parent") or _given(hints.magnitude_parent)
    return Identity(
        tenant=tenant_name(tenant),
        session=session,
        branch=branch_name(branch),
        run=session if parent is None else _session_id(tenant, PRODUCT, parent),
        source=found.source,
        raw=_printable(raw),
        own=own,
        aside=beside is not None,
        final=present.get(FINAL, "").lower() in ("1", "true"),
        tool_seconds=tool_seconds(present),
    )


@functools.lru_cache(256)
def tenant_name(salt: str) -> str:
    """Returns the name under which a tenant's sessions are kept: 32 hex digits that tell nothing of its salt."""
    return _digest("tenant", salt)[:32]


def session_ids(tenant: str, given: str) -> tuple[str, ...]:
    """Returns the ids of the sessions that a client may mean: `given` as it is shown, then as an id of its own.

    Its own id may have come by any of the ways of the table above but a fingerprint.
    """
    shown = (given,) if _SHOWN.fullmatch(given) else ()
    sources = (PRODUCT, *(client.source for client in CLIENTS), *_HINTS)
    return *shown, *(_session_id(tenant, source, given.strip()) for source in sources)


def branch_name(raw: str | None) -> str:
    """Returns the branch id for a client's branch name; None is the main branch."""
    if raw is None:
        return MAIN_BRANCH
    if _PLAIN_BRANCH.fullmatch(raw):
        return raw
    return "~" + _digest(raw)[:32]


def _product(present: Mapping[str, str], hints: IdentityHints) -> _Found | None:
    raw = present.get("x-magnitude-session") or _given(hints.magnitude_session)
    return None if raw is None else _Found(PRODUCT, raw)


def _client(present: Mapping[str, str]) -> _Found | None:
    for client in CLIENTS:
        for header in client.session:
            raw = present.get(header)
            if raw is not None:
                branch, parent = present.get(client.branch, ""), present.get(client.parent, "")
                return _Found(client.source, raw, branch, parent)
    return None


def _hint(hints: IdentityHints) -> _Found | None:
    given = (hints.session_id, hints.program_id, hints.metadata_session_id, hints.prompt_cache_key)
    for source, value in zip(_HINTS, given, strict=True):
        raw = _given(value)
        if raw is not None:
            return _Found(source, raw)
    return None


def fingerprint(hints: IdentityHints) -> str:
    """Returns what stays the same over an agent's steps: tools, leading system text, first user message.

    A raw prompt grows at its end, so its first `TEXT_PREFIX_CHARS` characters stand for it.
    """
    if hints.text is not None:
        return _digest("text", hints.text[:TEXT_PREFIX_CHARS])
    parts = ["chat"]
    for tool in hints.tools:
        parts += ["tool", tool.name, tool.description, msgspec.json.encode(tool.parameters, order="sorted").decode()]
    for message in hints.messages:
        parts += [message.role, message.content]
        if message.role != "system":
            break
    return _digest(*parts)


def _session_id(tenant: str, source: str, raw: str) -> str:
    return _digest(tenant, source, raw)[:32]


def _digest(*parts: str) -> str:
    """Returns SHA-256 in hex over `parts`, each after its length, so that no two lists of parts look alike."""
    state = hashlib.sha256()
    for part in parts:
        # Headers reach us with undecodable bytes as lone surrogates, which plain UTF-8 refuses.
        data = part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.hexdigest()


def _given(value: str | None) -> str | None:
    """Returns the stripped value, None when nothing is left of it."""
    return (value.strip() or None) if value is not None else None


def _printable(raw: str) -> str:
    if raw.isprintable():
        return raw[:RAW_CHARS]
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in raw)[:RAW_CHARS]
