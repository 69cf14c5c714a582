"""Steps kept for feedback, feedback, and which feedback a step is credited with.

A step is credited with the earliest feedback about its session, or its branch, that is not older than it, by the
feedback's own timestamp, within `SKEW_S`. That depends on what was said and when, not on the order in which it
arrived or how often it was sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from magnitude_proxy.store.branches import Branches
from magnitude_proxy.store.record import SessionRecord, StepOutcome

KEPT = 64
# A client's timestamp may lack fractions of a second, and its clock differ a little.
SKEW_S = 2.0

Outcome = Literal["unknown", "no_branch", "known", "pending", "old", "added"]


class Fate(NamedTuple):
    """What became of feedback, and how many steps its session has.

    Attributes:
        outcome: `unknown`, the tenant has no such session; `no_branch`, the session has no such branch;
            `added`, it was kept; `known`, it was kept before;
            `pending`, the same, but perhaps it did not reach the stream; `old`, the session holds `KEPT` later ones.
    """

    outcome: Outcome
    steps: int


class StepNote(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept of one step; `at_s` is the Unix time of its commit, `anchors` and `place` as in `StepOutcome`."""

    at_s: float
    branch: str
    route: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ok: bool
    anchors: tuple[str, ...] = ()
    place: int = -1


class Feedback(msgspec.Struct, frozen=True, kw_only=True):
    """How a session, or a branch of it, went, as its agent says.

    `timestamp` is the agent's own, `at_s` the same as Unix time.
    """

    success: bool
    timestamp: str
    at_s: float
    error_reason: str | None = None
    branch: str | None = None

    def id(self) -> str:
        """Returns 32 hex digits that are the same for the same feedback."""
        of = () if self.branch is None else (self.branch,)
        said = msgspec.json.encode((self.success, self.at_s, self.error_reason, *of))
        return hashlib.sha256(said).hexdigest()[:32]


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of a session.

    Attributes:
        steps: by number, those of the last `KEPT` that were kept.
        dead: by number, why a step came to nothing.
        feedback: at most `KEPT`, earliest first.
        advice: what the agent's author was told last (see `Identity.advice`); empty where there is none.
        branches: those that were forked; the steps of a dead one came to nothing.
    """

    record: SessionRecord
    steps: Mapping[int, StepNote] = msgspec.field(default_factory=dict)
    dead: Mapping[int, str] = msgspec.field(default_factory=dict)
    feedback: tuple[Feedback, ...] = ()
    advice: str = ""
    branches: Branches = Branches()


def note(branch: str, outcome: StepOutcome, now: float) -> StepNote | None:
    """Returns what to keep of a step; None where its client did not ask for that."""
    if outcome.aside or not (outcome.tracked or outcome.anchors):
        return None
    return StepNote(
        at_s=now,
        branch=branch,
        route=outcome.route,
        finish_reason=outcome.finish_reason,
        prompt_tokens=outcome.prompt_tokens,
        completion_tokens=outcome.completion_tokens,
        cached_tokens=outcome.cached_tokens,
        ok=outcome.ok,
        anchors=outcome.anchors,
        place=outcome.place,
    )


def ordered(feedback: Sequence[Feedback]) -> tuple[Feedback, ...]:
    """Returns feedback by its own time; of two of one time the order is always the same."""
    return tuple(sorted(feedback, key=lambda said: (said.at_s, said.id())))


def credited(step: StepNote, feedback: Sequence[Feedback]) -> Feedback | None:
    """Returns the feedback (earliest first) that a step is credited with; None while there is none."""
    about = (said for said in feedback if said.branch in (None, step.branch))
    return next((said for said in about if said.at_s + SKEW_S >= step.at_s), None)
