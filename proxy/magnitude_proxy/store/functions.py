"""Calls of the functions in `sessions.lua` and the reading of their replies."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple, cast, get_args

import msgspec

from magnitude_proxy.config import SessionLimits
from magnitude_proxy.limits import LIMITS, NO_TERMS, Terms, limits_of
from magnitude_proxy.store.branches import Branches, BranchNote, Change, refused
from magnitude_proxy.store.connection import Command, StoreDown
from magnitude_proxy.store.credit import Fate, Feedback, Outcome, SessionView, StepNote, note, ordered
from magnitude_proxy.store.memory import Opened
from magnitude_proxy.store.record import Owner, SessionRecord, State, StepOutcome, state_after

LIBRARY = files("magnitude_proxy.store").joinpath("sessions.lua").read_text("utf-8")

REASON_CHARS = 64
PRUNED = -1
_FIELDS = (
    *("epoch", "steps", "prompt_tokens", "completion_tokens", "cached_tokens", "failures", "state", "route"),
    *("finish_reason", "created", "seen", "tenant", "source", "raw", "line"),
    *("since_steps", "since_tokens", "since_s", *LIMITS, "extra_steps", "extra_tokens"),
)


_STATES = get_args(State)


def session_key(session: str) -> str:
    """Returns the key of a session; the braces make its hash alone choose the cluster slot."""
    return f"magnitude:{{{session}}}"


class Opening(NamedTuple):
    """What opening a lease takes besides the session and its branch."""

    owner: Owner
    nonce: str
    terms: Terms = NO_TERMS


def open_call(session: str, branch: str, opening: Opening, now: float, ttl_s: float) -> Command:
    """Returns the command that opens a lease; see `parse_opened`."""
    owner, nonce, terms = opening
    arguments = (branch, nonce, now, _ms(ttl_s), owner.tenant, owner.source, owner.raw, owner.advice)
    limits = ["" if most is None else most for most in (*limits_of(terms.server), *limits_of(terms.client))]
    return (
        *("FCALL", "magnitude_session_open_4", 1, session_key(session)),
        *(*arguments, *limits, terms.repeats, int(terms.fresh)),
    )


def commit_call(session: str, branch: str, token: str, outcome: StepOutcome, now: float, ttl_s: float) -> Command:
    """Returns the command that commits one step; its reply is 1, 0 for a stale token, or PRUNED."""
    counts = (
        outcome.prompt_tokens,
        outcome.completion_tokens,
        outcome.cached_tokens,
        int(not outcome.ok and not outcome.aside),
    )
    # The reason may be an upstream's own word: bounded, and free of surrogates, which cannot be sent.
    reason = outcome.finish_reason[:REASON_CHARS].encode("ascii", "backslashreplace").decode("ascii")
    kept = note(branch, outcome, now)
    words = (state_after(outcome), outcome.route, reason, "" if kept is None else _json(kept), int(not outcome.aside))
    name = "magnitude_session_commit_4"
    return ("FCALL", name, 1, session_key(session), branch, token, now, _ms(ttl_s), *counts, *words)


def get_call(session: str) -> Command:
    """Returns the command that reads a record; see `parse_record`."""
    return ("FCALL_RO", "magnitude_session_get_4", 1, session_key(session))


def parse_opened(session: str, branch: str, reply: object) -> Opened:
    """Returns the lease in a reply of `open`; raises StoreDown for anything else.

    Raises:
        NotFound, Conflict: the branch is none of the session, or has ended.
    """
    match reply:
        case [bytes() as state]:
            raise refused(branch, state.decode())
        case [bytes() as token, list() as fields]:
            record = parse_record(session, fields)
            if record is not None:
                return Opened(token.decode(), record)
        case [b"", list() as fields, bytes() as limit] if limit.decode() in LIMITS:
            return Opened("", parse_record(session, fields) or SessionRecord(session=session), limit.decode())
    raise StoreDown(f"the store answered {type(reply).__name__} instead of a lease")


def parse_record(session: str, reply: object) -> SessionRecord | None:
    """Returns the record in a list of its fields, None for an absent session; raises StoreDown for anything else."""
    if not isinstance(reply, list) or len(reply) != len(_FIELDS):
        raise StoreDown(f"the store answered {type(reply).__name__} instead of a session record")
    if reply[0] is None:
        return None
    try:
        epoch, steps, prompt, completion, cached, failures = [int(v or 0) for v in reply[:6]]
        state, route, reason = [(v or b"").decode() for v in reply[6:9]]
        created, seen = [float(v or 0) for v in reply[9:11]]
        tenant, source, raw, line = [(v or b"").decode() for v in reply[11:15]]
        since_steps, since_tokens = [int(v or 0) for v in reply[15:17]]
        since_s = float(reply[17] or 0)
        limits = _parse_limits(reply[18:-2])
        extra_steps, extra_tokens = [int(v or 0) for v in reply[-2:]]
    except (ValueError, AttributeError, msgspec.ValidationError) as error:
        raise StoreDown(f"the store holds a broken record of session {session}") from error
    if state not in _STATES:
        raise StoreDown(f"the store holds an unknown state of session {session}")
    return SessionRecord(
        session=session,
        epoch=epoch,
        steps=steps,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        failures=failures,
        state=cast(State, state),
        route=route,
        finish_reason=reason,
        created_s=created,
        seen_s=seen,
        tenant=tenant,
        source=source,
        raw=raw,
        since_steps=since_steps,
        since_tokens=since_tokens,
        since_s=since_s,
        limits=limits,
        line=line,
        extra_steps=extra_steps,
        extra_tokens=extra_tokens,
    )


def _parse_limits(given: Sequence[bytes | None]) -> SessionLimits:
    own = {name: most.decode() for name, most in zip(LIMITS, given, strict=True) if most is not None}
    return msgspec.convert(own, SessionLimits, strict=False) if own else SessionLimits()


def view_call(session: str) -> Command:
    """Returns the command that reads all of a session; see `parse_view`."""
    return ("HGETALL", session_key(session))


def parse_view(session: str, reply: object) -> SessionView | None:
    """Returns all that is known of a session, None for an absent one; raises StoreDown for anything else."""
    if not isinstance(reply, list) or len(reply) % 2:
        raise StoreDown(f"the store answered {type(reply).__name__} instead of a session")
    found: dict[str, bytes] = {name.decode(): value for name, value in zip(reply[::2], reply[1::2], strict=True)}
    record = parse_record(session, [found.get(name) for name in _FIELDS])
    if record is None:
        return None
    try:
        said = [value.split(b"|", 2)[2] for name, value in found.items() if name.startswith("said:")]
        return SessionView(
            record=record,
            steps={n: msgspec.json.decode(value, type=StepNote) for n, value in _numbered(found, "step:")},
            dead={n: value.decode() for n, value in _numbered(found, "dead:")},
            feedback=ordered([msgspec.json.decode(each, type=Feedback) for each in said]),
            advice=found.get("advice", b"").decode(),
            branches=_branches(found),
        )
    except (ValueError, IndexError, msgspec.MsgspecError) as error:
        raise StoreDown(f"the store holds broken notes of session {session}") from error


def feedback_call(session: str, tenant: str, feedback: Feedback) -> Command:
    """Returns the command that keeps feedback; see `parse_fate`."""
    words = (tenant, feedback.id(), feedback.at_s, _json(feedback))
    return ("FCALL", "magnitude_session_feedback_4", 1, session_key(session), *words)


def parse_fate(reply: object) -> Fate:
    """Returns what became of feedback; raises StoreDown for anything else."""
    match reply:
        case [(b"unknown" | b"known" | b"pending" | b"old" | b"added") as word, int() as steps]:
            return Fate(cast(Outcome, word.decode()), steps)
    raise StoreDown(f"the store answered {type(reply).__name__} instead of what became of feedback")


def settle_call(session: str, feedback: Feedback) -> Command:
    """Returns the command that notes that feedback stands in the stream."""
    return ("FCALL", "magnitude_session_settle_4", 1, session_key(session), feedback.id())


def fail_call(session: str, tenant: str, step: int | None, reason: str) -> Command:
    """Returns the command that marks a step as dead; its reply is the step, -1 or -2 (see `Notes.fail`)."""
    words = (tenant, "" if step is None else step, reason)
    return ("FCALL", "magnitude_session_fail_4", 1, session_key(session), *words)


def branches_call(session: str, tenant: str, version: int, change: Change) -> Command:
    """Returns the command that changes branches; its reply is 1, 0 when `version` is old, -1 without the session."""
    words: list[str | int] = [tenant, version, change.line or "", "" if change.limit is None else change.limit]
    words += [len(change.ended), *change.ended]
    for name, told in change.put.items():
        words += [name, f"{told.state}|{_json(told)}"]
    for name in change.forgotten:
        words += [name, ""]
    return ("FCALL", "magnitude_session_branches_4", 1, session_key(session), *words)


def finish_call(session: str, tenant: str) -> Command:
    """Returns the command that forgets a session; its reply is 1 where it was there."""
    return ("FCALL", "magnitude_session_finish_4", 1, session_key(session), tenant)


def _branches(found: dict[str, bytes]) -> Branches:
    pairs = [(name.removeprefix("branch:"), value) for name, value in found.items() if name.startswith("branch:")]
    notes = [(name, msgspec.json.decode(value.split(b"|", 1)[1], type=BranchNote)) for name, value in pairs]
    limit = found.get("branch_limit")
    return Branches(
        version=int(found.get("branch_version", b"0")),
        notes=dict(sorted(notes, key=lambda pair: pair[1].number)),
        line=found["line"].decode() if "line" in found else None,
        limit=None if limit is None else int(limit),
    )


def _numbered(found: dict[str, bytes], prefix: str) -> list[tuple[int, bytes]]:
    return sorted((int(name.removeprefix(prefix)), found[name]) for name in found if name.startswith(prefix))


def _json(value: StepNote | Feedback | BranchNote) -> str:
    return msgspec.json.encode(value).decode()


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
