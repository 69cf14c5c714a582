"""Answers in the form of Anthropic's Messages API: one body, or a stream of named events.

    message_start → (content_block_start → content_block_delta* → content_block_stop)* → message_delta → message_stop

`ping` events keep a quiet stream alive. `input_tokens` counts what was not in the cache, as Anthropic has it.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from magnitude_engine import api
from magnitude_proxy.dialect.form import Item, Script, Tally
from magnitude_proxy.dialect.gather import Gathering
from magnitude_proxy.dialect.messages_replies import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    StopDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    WholeMessage,
    error_reply,
    frame,
    message_usage,
)
from magnitude_proxy.dialect.messages_requests import NAMES
from magnitude_proxy.dialect.parts import Change, Grown, Opened, Part, Parts
from magnitude_proxy.errors import ProxyError, Unavailable, from_failed
from magnitude_proxy.wire.render import Body, Head

_encode = msgspec.json.Encoder().encode


class MessageAnswer(Gathering):
    """How one answer is written; a `Dialect`.

    Args:
        max_tokens: the client's limit.
        limited: the worker was told that limit; otherwise the context's end was its limit.
        dropped: see `Dialect`.
        thoughts: the client asked for the model's thinking.
    """

    keepalive = frame(Ping())

    def __init__(self, max_tokens: int, limited: bool, dropped: tuple[str, ...], thoughts: bool) -> None:
        super().__init__(NAMES, thoughts)
        self._max_tokens = max_tokens
        self._limited = limited
        self.dropped = dropped

    def body(self) -> Body:
        """See `Dialect.body`."""
        return MessageBody(self)

    def script(self, head: Head, tally: Tally) -> Script:
        """See `Dialect.script`."""
        return MessageScript(self, head)

    def stop(self, usage: api.Usage) -> StopDelta:
        """Returns why the answer ended."""
        finished = self.finished
        reason = "stop" if finished is None else finished.reason
        if reason == "length":
            short = not self._limited and usage.completion_tokens < self._max_tokens
            return StopDelta(stop_reason="model_context_window_exceeded" if short else "max_tokens", stop_sequence=None)
        if reason == "content_filter":
            return StopDelta(stop_reason="refusal", stop_sequence=None)
        if any(part.kind == "call" for part in self.parts.parts):
            return StopDelta(stop_reason="tool_use", stop_sequence=None)
        matched = None if finished is None else finished.matched_stop
        return StopDelta(stop_reason="end_turn" if matched is None else "stop_sequence", stop_sequence=matched)


class MessageBody:
    """The whole message; everything was gathered by its `MessageAnswer`."""

    def __init__(self, answer: MessageAnswer) -> None:
        self._answer = answer

    def add(self, event: api.Delta | api.Finished) -> None:
        """See `Body.add`."""

    def encode(self, head: Head, usage: api.Usage) -> bytes:
        """See `Body.encode`; a call that the limit cut off is left out, and the stop reason says so."""
        stop = self._answer.stop(usage)
        blocks = (_block(part, cut=stop.stop_reason != "tool_use") for part in self._answer.parts.parts)
        return _encode(
            WholeMessage(
                id=head.id,
                model=head.model,
                usage=message_usage(usage),
                content=tuple(block for block in blocks if block is not None),
                stop_reason=stop.stop_reason,
                stop_sequence=stop.stop_sequence,
            )
        )


class MessageScript:
    """The events of a stream."""

    def __init__(self, answer: MessageAnswer, head: Head) -> None:
        self._answer = answer
        self._head = head
        self._parts = Parts(answer.thoughts)
        self._begun = False

    def frames(self, batch: list[Item]) -> bytes:
        """See `Script.frames`."""
        return b"".join(map(frame, self._events(batch)))

    def ending(self, last: api.Completed | api.Failed) -> bytes:
        """See `Script.ending`."""
        if isinstance(last, api.Failed):
            return self.broken(from_failed(last))
        end = MessageDelta(delta=self._answer.stop(last.usage), usage=message_usage(last.usage))
        return frame(end) + frame(MessageStop())

    def broken(self, error: ProxyError) -> bytes:
        """See `Script.broken`."""
        return frame(error_reply(error.http_status, error.message, error.code))

    def _events(self, batch: list[Item]) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            yield self._start()
        for item in batch:
            changes: Iterator[Change] = iter(())
            if isinstance(item, api.Delta):
                changes = self._parts.add(item)
            elif isinstance(item, api.Finished):
                changes = self._parts.close()
            yield from (_event(change) for change in changes if not isinstance(change, Grown) or change.piece)

    def _start(self) -> MessageStart:
        """Returns the first event; of the prompt it says what the worker has said so far."""
        started = self._answer.started
        known = (
            api.Usage()
            if started is None
            else api.Usage(prompt_tokens=started.prompt_tokens, cached_tokens=started.cached_tokens)
        )
        usage = msgspec.structs.replace(message_usage(known), magnitude=UNSET)
        return MessageStart(message=WholeMessage(id=self._head.id, model=self._head.model, usage=usage))


def _event(change: Change) -> Event:
    part = change.part
    if isinstance(change, Opened):
        if part.kind == "call":
            return BlockStart(index=part.index, content_block=ToolUseBlock(id=part.id, name=part.name, input={}))
        empty = ThinkingBlock(thinking="") if part.kind == "thought" else TextBlock(text="")
        return BlockStart(index=part.index, content_block=empty)
    if isinstance(change, Grown):
        return BlockDelta(index=part.index, delta=_growth(part, change.piece))
    return BlockStop(index=part.index)


def _growth(part: Part, piece: str) -> TextDelta | ThinkingDelta | InputDelta:
    if part.kind == "call":
        return InputDelta(partial_json=piece)
    return ThinkingDelta(thinking=piece) if part.kind == "thought" else TextDelta(text=piece)


def _block(part: Part, *, cut: bool) -> TextBlock | ThinkingBlock | ToolUseBlock | None:
    """Returns the block of a part; None for a call that is not complete in an answer that was cut."""
    if part.kind == "thought":
        return ThinkingBlock(thinking=part.text)
    if part.kind != "call":
        return TextBlock(text=part.text)
    try:
        given = msgspec.json.decode(part.text or "{}")
    except msgspec.DecodeError as error:
        if cut:
            return None
        raise _invalid(part) from error
    if not isinstance(given, dict):
        raise _invalid(part)
    return ToolUseBlock(id=part.id, name=part.name, input=given)


def _invalid(part: Part) -> Unavailable:
    message = (
        f"the model called {part.name[:64]!r} with arguments that are no JSON object; ask again, or in other words"
    )
    return Unavailable(message, code="answer_invalid", headers={"x-should-retry": "false"})
