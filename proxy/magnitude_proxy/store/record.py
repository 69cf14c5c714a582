"""What is known of a session, and how one finished step changes it."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from magnitude_proxy.config import SessionLimits
from magnitude_proxy.identity import MAIN_BRANCH
from magnitude_proxy.limits import Terms, Use, exceeded, lowered

State = Literal["thinking", "waiting_on_tool", "idle", "failed"]


class Owner(NamedTuple):
    """Whose a session is: see the fields of these names in `SessionRecord`, and `Identity.advice`."""

    tenant: str = ""
    source: str = ""
    raw: str = ""
    advice: str = ""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One session as of its last commit (or as just created).

    Attributes:
        epoch: counts the leases given out, over all branches.
        steps: steps committed.
        prompt_tokens, completion_tokens, cached_tokens: totals over those steps.
        failures: steps committed that did not end in an answer.
        route: label of the route that answered last; empty before the first commit.
        finish_reason: of the last step; empty before the first commit.
        created_s, seen_s: Unix time of the first and the last open or commit.
    tenant: a name for the tenant that tells nothing of its salt (see `identity.tenant_name`).
    source, raw: what the session was recognised by, and the client's own id (see `Identity`).
    line: the branch that the main line goes on from, empty before one was selected.
    since_steps, since_tokens, since_s: answered steps, tokens and Unix time at the beginning of the run that the limits
        count; 0 for the session's own.
    limits: those that its client has set.
    extra_steps, extra_tokens: answered steps, and tokens, of leases that ended when later ones had fenced them; they
        count against the limits and nowhere else.
    """

    session: str
    epoch: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    failures: int = 0
    state: State = "thinking"
    route: str = ""
    finish_reason: str = ""
    created_s: float = 0.0
    seen_s: float = 0.0
    tenant: str = ""
    source: str = ""
    raw: str = ""
    line: str = ""
    since_steps: int = 0
    since_tokens: int = 0
    since_s: float = 0.0
    limits: SessionLimits = SessionLimits()
    extra_steps: int = 0
    extra_tokens: int = 0

    @property
    def answered(self) -> int:
        """Steps that ended in an answer, fenced ones too."""
        return self.steps - self.failures + self.extra_steps

    @property
    def tokens(self) -> int:
        """Prompt and completion tokens of all steps, fenced ones too."""
        return self.prompt_tokens + self.completion_tokens + self.extra_tokens

    def use(self, now: float, repeats: int = 0) -> Use:
        """Returns what counts against the limits."""
        return Use(
            iterations=self.answered - self.since_steps,
            tokens=self.tokens - self.since_tokens,
            seconds=max(0.0, now - (self.since_s or self.created_s or now)),
            repeats=repeats,
        )

    def line_of(self, branch: str) -> str:
        """Returns a branch as the worker knows it: the main line goes on as the branch that was selected last."""
        return self.line if self.line and branch == MAIN_BRANCH else branch


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one step ended.

    Attributes:
        route: label of the route that answered, as in the `x-magnitude-route` header.
        tool_call: the answer calls a tool, so that the session now waits for it.
        ok: the client got a complete answer.
        tracked: the step is kept, so that feedback can be credited to it.
        aside: it was a call beside the conversation: its tokens count, but it is no step.
        anchors: by what the answer is recognised in a history; the step is kept where there are any. `place` is its
            index there.
    """

    route: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tool_call: bool
    ok: bool
    tracked: bool = False
    aside: bool = False
    anchors: tuple[str, ...] = ()
    place: int = -1


def state_after(outcome: StepOutcome) -> State:
    """Returns the session's state once `outcome` is committed; every open sets it to `thinking` again."""
    if not outcome.ok:
        return "failed"
    return "waiting_on_tool" if outcome.tool_call else "idle"


def after(record: SessionRecord, outcome: StepOutcome, now: float) -> SessionRecord:
    """Returns `record` after one more step, or call beside them; the store's function `commit` does the same in Lua."""
    return msgspec.structs.replace(
        record,
        steps=record.steps + (not outcome.aside),
        prompt_tokens=record.prompt_tokens + outcome.prompt_tokens,
        completion_tokens=record.completion_tokens + outcome.completion_tokens,
        cached_tokens=record.cached_tokens + outcome.cached_tokens,
        failures=record.failures + (not outcome.ok and not outcome.aside),
        state=state_after(outcome),
        route=outcome.route,
        finish_reason=outcome.finish_reason,
        seen_s=now,
    )


def after_fenced(record: SessionRecord, outcome: StepOutcome) -> SessionRecord:
    """Returns `record` after the end of a lease that a later one has fenced; in Lua a part of `commit`."""
    return msgspec.structs.replace(
        record,
        extra_steps=record.extra_steps + (outcome.ok and not outcome.aside),
        extra_tokens=record.extra_tokens + outcome.prompt_tokens + outcome.completion_tokens,
    )


class Begun(NamedTuple):
    """A session before its next step, on the terms of that step; `refused` is the limit that it has reached."""

    record: SessionRecord
    refused: str | None


def begun(record: SessionRecord, terms: Terms, now: float) -> Begun:
    """Returns `record` with the terms of its next step; the store's function `open` does the same in Lua."""
    record = msgspec.structs.replace(record, limits=lowered(record.limits, terms.client))
    if terms.fresh:
        record = msgspec.structs.replace(record, since_steps=record.answered, since_tokens=record.tokens, since_s=now)
    return Begun(record, exceeded(lowered(terms.server, record.limits), record.use(now, terms.repeats)))
