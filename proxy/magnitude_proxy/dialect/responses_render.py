"""Answers in the form of OpenAI's Responses API: one body, or a stream of named and numbered events.

    created → in_progress → items → completed, incomplete or failed
    a message:  output_item.added → content_part.added → output_text.delta* → output_text.done → content_part.done
                → output_item.done
    a thought:  the same with reasoning_text in place of output_text
    a call:     output_item.added → function_call_arguments.delta* → function_call_arguments.done → output_item.done

An answer that its client may go on from is kept before its end is sent.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator

import msgspec

from magnitude_engine import api
from magnitude_proxy import sse
from magnitude_proxy.dialect.form import Item, Script, Tally
from magnitude_proxy.dialect.gather import Gathering
from magnitude_proxy.dialect.parts import Change, Grown, Opened, Part, Parts
from magnitude_proxy.dialect.responses_replies import (
    ContentEvent,
    Event,
    Incomplete,
    ItemEvent,
    PieceEvent,
    ResponseEvent,
    ResponseProblem,
    ResponseReply,
    Status,
    content,
    item_id,
    output_item,
    response_usage,
    token_replies,
)
from magnitude_proxy.dialect.responses_requests import ResponseAsked
from magnitude_proxy.errors import ProxyError, from_failed
from magnitude_proxy.wire.render import Body, Head

_encode = msgspec.json.Encoder().encode
_ENDS = {"length": "max_output_tokens", "content_filter": "content_filter"}
_CODES = {429: "rate_limit_exceeded"}

Keep = Callable[[ResponseReply, Parts], Awaitable[bool]]


def frame(event: Event) -> bytes:
    """Returns the frame of one event."""
    return b"event: " + event.type.encode() + b"\ndata: " + _encode(event) + b"\n\n"


class ResponseAnswer(Gathering):
    """How one answer is written; a `Dialect`.

    Args:
        opening: the response before its first output; `store` says whether its client wants it kept.
        asked: the request.
        keep: keeps the complete response; returns whether that was done.
        shown: the model's name for the route that answers.
        now: gives Unix seconds.
    """

    keepalive = sse.KEEPALIVE

    def __init__(
        self,
        opening: ResponseReply,
        asked: ResponseAsked,
        keep: Keep,
        shown: Callable[[str], str],
        now: Callable[[], float],
    ) -> None:
        super().__init__(asked.names)
        self._opening = opening
        self._keep = keep
        self._shown = shown
        self._now = now
        self._complete: ResponseReply | None = None
        self.dropped = asked.dropped
        self.called = asked.tools.called

    def body(self) -> Body:
        """See `Dialect.body`."""
        return ResponseBody(self)

    def script(self, head: Head, tally: Tally) -> Script:
        """See `Dialect.script`."""
        return ResponseScript(self, self.response("in_progress"))

    async def completed(self, usage: api.Usage) -> None:
        """See `Gathering.completed`."""
        cut = self.cut
        response = msgspec.structs.replace(
            self.response("completed" if cut is None else "incomplete"),
            completed_at=int(self._now()) if cut is None else None,
            incomplete_details=cut,
            usage=response_usage(usage),
        )
        if response.store and not await self._keep(response, self.parts):
            response = msgspec.structs.replace(response, store=False)
        self._complete = response

    @property
    def cut(self) -> Incomplete | None:
        """Why the answer is not complete; None where it is."""
        reason = None if self.finished is None else self.finished.reason
        if reason == "length":
            return Incomplete(reason="max_output_tokens")
        return Incomplete(reason="content_filter") if reason == "content_filter" else None

    def response(self, status: Status) -> ResponseReply:
        """Returns the response as far as it has come: without output while it is in progress."""
        if self._complete is not None and status != "failed":
            return self._complete
        parts = [] if status == "in_progress" else self.parts.parts
        ends: list[Status] = ["completed"] * len(parts)
        if ends and status in ("incomplete", "failed"):
            ends[-1] = "incomplete"
        name = self._opening.id
        return msgspec.structs.replace(
            self._opening,
            status=status,
            model=self._shown(self.label),
            output=tuple(
                output_item(name, part, end, self.called(part.name)) for part, end in zip(parts, ends, strict=True)
            ),
        )


class ResponseBody:
    """The whole response; everything was gathered by its `ResponseAnswer`."""

    def __init__(self, answer: ResponseAnswer) -> None:
        self._answer = answer

    def add(self, event: api.Delta | api.Finished) -> None:
        """See `Body.add`."""

    def encode(self, head: Head, usage: api.Usage) -> bytes:
        """See `Body.encode`."""
        return _encode(self._answer.response("completed"))


class ResponseScript:
    """The events of a stream."""

    def __init__(self, answer: ResponseAnswer, opening: ResponseReply) -> None:
        self._answer = answer
        self._opening: ResponseReply | None = opening
        self._id = opening.id
        self._parts = Parts()
        self._numbers = itertools.count()

    def frames(self, batch: list[Item]) -> bytes:
        """See `Script.frames`."""
        return b"".join(map(frame, self._events(batch)))

    def ending(self, last: api.Completed | api.Failed) -> bytes:
        """See `Script.ending`."""
        if isinstance(last, api.Failed):
            return self.broken(from_failed(last))
        response = self._answer.response("completed")
        return frame(self._told(response, response.status))

    def broken(self, error: ProxyError) -> bytes:
        """See `Script.broken`."""
        problem = ResponseProblem(code=_CODES.get(error.http_status, "server_error"), message=error.message)
        if error.http_status < 500 and error.http_status not in _CODES:
            problem = msgspec.structs.replace(problem, code="invalid_prompt")
        failed = msgspec.structs.replace(self._answer.response("failed"), error=problem, store=False)
        return frame(self._told(failed, "failed"))

    def _events(self, batch: list[Item]) -> Iterator[Event]:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            yield self._told(opening, "created")
            yield self._told(opening, "in_progress")
        for item in batch:
            if isinstance(item, api.Delta):
                for change in self._parts.add(item):
                    yield from self._change(change, "completed")
            elif isinstance(item, api.Finished):
                status: Status = "incomplete" if item.reason in ("length", "content_filter") else "completed"
                for change in self._parts.close():
                    yield from self._change(change, status)

    def _told(self, response: ResponseReply, what: str) -> ResponseEvent:
        return ResponseEvent(type=f"response.{what}", sequence_number=next(self._numbers), response=response)

    def _change(self, change: Change, status: Status) -> Iterator[Event]:
        if isinstance(change, Opened):
            yield from self._opened(change.part)
        elif isinstance(change, Grown):
            yield self._grown(change)
        else:
            yield from self._closed(change.part, status)

    def _opened(self, part: Part) -> Iterator[Event]:
        empty = Part(part.kind, part.index, id=part.id, name=part.name)
        yield self._item("added", empty, "in_progress")
        if part.kind != "call":
            yield self._content("added", empty)

    def _grown(self, change: Grown) -> PieceEvent:
        part = change.part
        if part.kind == "call":
            return self._piece(part, "function_call_arguments.delta", delta=change.piece)
        if part.kind == "refusal":
            return self._piece(part, "refusal.delta", content_index=0, delta=change.piece)
        if part.kind == "thought":
            return self._piece(part, "reasoning_text.delta", content_index=0, delta=change.piece)
        logprobs = token_replies(change.logprobs)
        return self._piece(part, "output_text.delta", content_index=0, delta=change.piece, logprobs=logprobs)

    def _closed(self, part: Part, status: Status) -> Iterator[Event]:
        if part.kind == "call":
            yield self._piece(
                part, "function_call_arguments.done", name=self._answer.called(part.name).name, arguments=part.text
            )
        elif part.kind == "refusal":
            yield self._piece(part, "refusal.done", content_index=0, refusal=part.text)
        elif part.kind == "thought":
            yield self._piece(part, "reasoning_text.done", content_index=0, text=part.text)
        else:
            logprobs = token_replies(tuple(part.logprobs))
            yield self._piece(part, "output_text.done", content_index=0, text=part.text, logprobs=logprobs)
        if part.kind != "call":
            yield self._content("done", part)
        yield self._item("done", part, status)

    def _item(self, what: str, part: Part, status: Status) -> ItemEvent:
        return ItemEvent(
            type=f"response.output_item.{what}",
            sequence_number=next(self._numbers),
            output_index=part.index,
            item=output_item(self._id, part, status, self._answer.called(part.name)),
        )

    def _content(self, what: str, part: Part) -> ContentEvent:
        return ContentEvent(
            type=f"response.content_part.{what}",
            sequence_number=next(self._numbers),
            item_id=item_id(self._id, part),
            output_index=part.index,
            part=content(part),
        )

    def _piece(self, part: Part, what: str, **fields: object) -> PieceEvent:
        made = PieceEvent(
            type=f"response.{what}",
            sequence_number=next(self._numbers),
            item_id=item_id(self._id, part),
            output_index=part.index,
        )
        return msgspec.structs.replace(made, **fields)
