"""What an agent tells of its tools while they run, as it stands on the wire: one JSON object per event."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from magnitude_proxy.errors import BadRequest, ErrorDetail
from magnitude_proxy.wire.replies import Reply
from magnitude_proxy.wire.requests import SessionName, Wire, convert, decode_json

STREAMS = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")
MAX_TEXT = 1 << 20
MAX_REASON = 2_000

CallId = Annotated[str, Meta(min_length=1, max_length=256)]
ToolName = Annotated[str, Meta(max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class SessionEvent(Wire, frozen=True, kw_only=True):
    """Base of all; `branch` as in the body's `magnitude.branch`."""

    kind: ClassVar[str]
    branch: SessionName | None = None


class ToolStarted(SessionEvent, frozen=True, kw_only=True):
    """A tool runs; `call_id` is the id of the tool call in the model's answer."""

    kind: ClassVar[str] = "tool_started"
    call_id: CallId
    tool: ToolName = ""


class ToolOutputDelta(SessionEvent, frozen=True, kw_only=True):
    """A tool has printed `text` since the last event."""

    kind: ClassVar[str] = "tool_output_delta"
    call_id: CallId
    text: Text


class ToolFinished(SessionEvent, frozen=True, kw_only=True):
    """A tool has ended; `output` is what came after the last delta."""

    kind: ClassVar[str] = "tool_finished"
    call_id: CallId
    tool: ToolName = ""
    output: Text = ""


class StepFailed(SessionEvent, frozen=True, kw_only=True):
    """A step came to nothing; `step` counts from 0, by default the last one that was answered."""

    kind: ClassVar[str] = "step_failed"
    step: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""


class BranchFailed(SessionEvent, frozen=True, kw_only=True):
    """A branch came to nothing: it is dead, and so is all that was forked from it."""

    kind: ClassVar[str] = "branch_failed"
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""


KINDS: dict[str, type[SessionEvent]] = {
    kind.kind: kind for kind in (ToolStarted, ToolOutputDelta, ToolFinished, StepFailed, BranchFailed)
}


class Receipt(Reply, frozen=True, kw_only=True):
    """The last word on events.

    Attributes:
        events: how many were taken.
        delivered: how many of them a worker has got; the others came while there was none.
        rejected: how many were not taken.
    """

    events: int
    delivered: int
    rejected: int = 0
    type: str = "acknowledged"


class Fault(Reply, frozen=True, kw_only=True):
    """Why the event in a line (from 1) was not taken; the stream goes on."""

    line: int
    error: ErrorDetail
    type: str = "error"


def read_event(raw: bytes) -> SessionEvent:
    """Returns one event.

    Raises:
        BadRequest: names the field.
    """
    body = decode_json(raw)
    name = body.get("type")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        given = f"{name[:64]!r} is no event" if isinstance(name, str) else "is missing, or no text"
        raise BadRequest(f"type {given}; it must be one of {', '.join(KINDS)}", param="type")
    return convert(body, kind)
