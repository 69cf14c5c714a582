"""Calls of the functions in `sessions.lua` and the reading of their replies."""

from __future__ import annotations

from importlib.resources import files
from typing import cast, get_args

from magnitude_proxy.store.connection import Command, StoreDown
from magnitude_proxy.store.memory import Opened
from magnitude_proxy.store.record import SessionRecord, State, StepOutcome, state_after

LIBRARY = files("magnitude_proxy.store").joinpath("sessions.lua").read_text("utf-8")

REASON_CHARS = 64


def session_key(session: str) -> str:
    """Returns the key of a session; the braces make its hash alone choose the cluster slot."""
    return f"magnitude:{{{session}}}"


def open_call(session: str, branch: str, nonce: str, now: float, ttl_s: float) -> Command:
    """Returns the command that opens a lease; see `parse_opened`."""
    return ("FCALL", "magnitude_session_open_1", 1, session_key(session), branch, nonce, now, _ms(ttl_s))


def commit_call(session: str, branch: str, token: str, outcome: StepOutcome, now: float, ttl_s: float) -> Command:
    """Returns the command that commits one step; its reply is 1 when it was added, 0 when the token is stale."""
    counts = (outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens, int(not outcome.ok))
    # The reason may be an upstream's own word: bounded, and free of surrogates, which cannot be sent.
    reason = outcome.finish_reason[:REASON_CHARS].encode("ascii", "backslashreplace").decode("ascii")
    words = (state_after(outcome), outcome.route, reason)
    name = "magnitude_session_commit_1"
    return ("FCALL", name, 1, session_key(session), branch, token, now, _ms(ttl_s), *counts, *words)


def get_call(session: str) -> Command:
    """Returns the command that reads a record; see `parse_record`."""
    return ("FCALL_RO", "magnitude_session_get_1", 1, session_key(session))


def parse_opened(session: str, reply: object) -> Opened:
    """Returns the lease in a reply of `open`; raises StoreDown for anything else."""
    match reply:
        case [bytes() as token, list() as fields]:
            record = parse_record(session, fields)
            if record is not None:
                return Opened(token.decode(), record)
    raise StoreDown(f"the store answered {type(reply).__name__} instead of a lease")


def parse_record(session: str, reply: object) -> SessionRecord | None:
    """Returns the record in a list of its fields, None for an absent session; raises StoreDown for anything else."""
    if not isinstance(reply, list) or len(reply) != 11:
        raise StoreDown(f"the store answered {type(reply).__name__} instead of a session record")
    if reply[0] is None:
        return None
    try:
        epoch, steps, prompt, completion, cached, failures = (int(v or 0) for v in reply[:6])
        state, route, reason = ((v or b"").decode() for v in reply[6:9])
        created, seen = (float(v or 0) for v in reply[9:])
    except (ValueError, AttributeError) as error:
        raise StoreDown(f"the store holds a broken record of session {session}") from error
    if state not in get_args(State):
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
    )


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
