"""From the events of an answer to OpenAI's bodies and chunks, without any input or output.

`Head` is what all of one answer's objects share. A `Chunks` turns each event into the payloads of a stream; a
`Body` gathers them into one JSON body. Both exist for chat and for completions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from magnitude_engine import api
from magnitude_proxy.errors import Unavailable
from magnitude_proxy.wire.replies import (
    ChatChoice,
    ChatChunk,
    ChatReply,
    ChunkChoice,
    DeltaReply,
    FunctionReply,
    MessageReply,
    RouteNote,
    TextChoice,
    TextReply,
    ToolCallChunk,
    ToolCallReply,
    UsageReply,
    logprobs_reply,
    text_logprobs,
    usage_reply,
)

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Head:
    """What every object of one answer carries.

    Attributes:
        created: Unix seconds.
        include_usage: a last chunk has the usage and all others a null.
        predicted: usage accounts for the client's prediction.
    """

    id: str
    created: int
    model: str
    include_usage: bool = False
    predicted: bool = False

    @property
    def no_usage(self) -> UnsetType | None:
        """The `usage` of a chunk that is not the last."""
        return None if self.include_usage else UNSET


class Chunks(Protocol):
    """Turns events into the payloads of a stream."""

    def delta(self, event: api.Delta) -> list[bytes]:
        """Returns the payloads for new output, none when nothing in it is for the client."""

    def finished(self, event: api.Finished, note: RouteNote | None) -> list[bytes]:
        """Returns the payloads that end one choice."""

    def usage(self, usage: api.Usage, note: RouteNote | None) -> bytes | None:
        """Returns the usage payload when the client asked for one."""


class Body(Protocol):
    """Gathers events into one body."""

    def add(self, event: api.Delta | api.Finished) -> None:
        """Takes new output, or the end of a choice."""

    def encode(self, head: Head, usage: api.Usage) -> bytes:
        """Returns the JSON body; raises Unavailable when a choice has no end."""


def is_content(event: api.Delta) -> bool:
    """True when a client sees something of the event."""
    return bool(event.text or event.tool_calls or event.logprobs or event.refusal or event.extra)


class ChatChunks:
    """Chunks of Chat Completions: a role chunk before each choice's first output.

    As OpenAI's own do, a chunk carries either text or a piece of one tool call: there are clients that read no further
    than the first entry of `tool_calls`.
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._begun: set[int] = set()

    def delta(self, event: api.Delta) -> list[bytes]:
        """See `Chunks.delta`."""
        if not is_content(event):
            return []
        deltas = [DeltaReply(tool_calls=(_tool_call_chunk(call),)) for call in _joined(event.tool_calls)]
        if event.text or event.refusal or not deltas:
            deltas.insert(0, DeltaReply(content=event.text or UNSET, refusal=event.refusal or UNSET))
        logprobs = logprobs_reply(event.logprobs)
        first = self._payload(ChunkChoice(index=event.choice, delta=deltas[0], logprobs=logprobs))
        if event.extra:
            first = _with_extra(first, event.extra)
        rest = [self._payload(ChunkChoice(index=event.choice, delta=delta)) for delta in deltas[1:]]
        return [*self._role(event.choice), first, *rest]

    def finished(self, event: api.Finished, note: RouteNote | None) -> list[bytes]:
        """See `Chunks.finished`."""
        choice = ChunkChoice(index=event.choice, delta=DeltaReply(), finish_reason=event.reason)
        return [*self._role(event.choice), self._payload(choice, note)]

    def usage(self, usage: api.Usage, note: RouteNote | None) -> bytes | None:
        """See `Chunks.usage`."""
        if not self._head.include_usage:
            return None
        return self._chunk((), usage_reply(usage, self._head.predicted), note)

    def _role(self, index: int) -> list[bytes]:
        if index in self._begun:
            return []
        self._begun.add(index)
        return [self._payload(ChunkChoice(index=index, delta=DeltaReply(role="assistant", content="")))]

    def _payload(self, choice: ChunkChoice, note: RouteNote | None = None) -> bytes:
        return self._chunk((choice,), self._head.no_usage, note)

    def _chunk(
        self, choices: tuple[ChunkChoice, ...], usage: UsageReply | UnsetType | None, note: RouteNote | None
    ) -> bytes:
        head = self._head
        return _encode(
            ChatChunk(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=usage,
                magnitude=note or UNSET,
            )
        )


def _joined(deltas: Iterable[api.ToolCallDelta]) -> list[api.ToolCallDelta]:
    """Returns the pieces of tool calls, those of one call that follow each other as one."""
    joined: list[api.ToolCallDelta] = []
    for delta in deltas:
        if joined and joined[-1].index == delta.index:
            before = joined.pop()
            joined.append(
                api.ToolCallDelta(
                    index=delta.index,
                    id=before.id if before.id is not None else delta.id,
                    name=before.name if before.name is not None else delta.name,
                    arguments=before.arguments + delta.arguments,
                )
            )
        else:
            joined.append(delta)
    return joined


def _tool_call_chunk(delta: api.ToolCallDelta) -> ToolCallChunk:
    function = FunctionReply(name=UNSET if delta.name is None else delta.name, arguments=delta.arguments)
    if delta.id is None:
        return ToolCallChunk(index=delta.index, function=function)
    return ToolCallChunk(index=delta.index, function=function, id=delta.id, type="function")


def _with_extra(payload: bytes, extra: dict[str, Any]) -> bytes:
    """Returns a chunk with an upstream's own delta fields; those that this product knows stay as they are."""
    chunk: dict[str, Any] = msgspec.json.decode(payload)
    delta = chunk["choices"][0]["delta"]
    chunk["choices"][0]["delta"] = {**extra, **delta}
    return _encode(chunk)


class TextChunks:
    """Chunks of Completions."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._offsets: dict[int, int] = {}

    def delta(self, event: api.Delta) -> list[bytes]:
        """See `Chunks.delta`."""
        if not is_content(event):
            return []
        offset = self._offsets.get(event.choice, 0)
        self._offsets[event.choice] = offset + sum(len(entry.token) for entry in event.logprobs)
        logprobs = text_logprobs(event.logprobs, offset)
        return [self._chunk((TextChoice(index=event.choice, text=event.text, logprobs=logprobs),))]

    def finished(self, event: api.Finished, note: RouteNote | None) -> list[bytes]:
        """See `Chunks.finished`."""
        return [self._chunk((TextChoice(index=event.choice, text="", finish_reason=event.reason),), note)]

    def usage(self, usage: api.Usage, note: RouteNote | None) -> bytes | None:
        """See `Chunks.usage`."""
        if not self._head.include_usage:
            return None
        return self._chunk((), note, usage_reply(usage, self._head.predicted))

    def _chunk(
        self, choices: tuple[TextChoice, ...], note: RouteNote | None = None, usage: UsageReply | None = None
    ) -> bytes:
        head = self._head
        return _encode(
            TextReply(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=head.no_usage if usage is None else usage,
                magnitude=note or UNSET,
            )
        )


@dataclass(slots=True)
class _Call:
    """A tool call while it grows."""

    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Choice:
    """One choice while it grows."""

    text: list[str] = field(default_factory=list)
    refusal: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    logprobs: list[api.TokenLogprob] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None

    def add(self, event: api.Delta | api.Finished) -> None:
        """Takes new output, or the end."""
        if isinstance(event, api.Finished):
            self.reason = event.reason
            return
        self.text.append(event.text)
        self.logprobs.extend(event.logprobs)
        if event.refusal:
            self.refusal.append(event.refusal)
        for delta in event.tool_calls:
            call = self.calls.setdefault(delta.index, _Call())
            call.id = delta.id or call.id
            call.name = delta.name or call.name
            call.arguments.append(delta.arguments)
        for name, value in event.extra.items():
            held = self.extra.get(name)
            self.extra[name] = held + value if isinstance(held, str) and isinstance(value, str) else value

    def ended(self, index: int) -> str:
        """Returns the finish reason; raises Unavailable without one: a cut answer is not an answer."""
        if self.reason is None:
            raise Unavailable(f"the answer broke off: choice {index} has no end; try again", code="stream_broken")
        return self.reason


class Gathered:
    """The choices of an answer in the order of their index."""

    def __init__(self) -> None:
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)

    def add(self, event: api.Delta | api.Finished) -> None:
        """See `Body.add`."""
        self._choices[event.choice].add(event)

    def sorted(self) -> list[tuple[int, _Choice]]:
        """Returns the choices; raises Unavailable when there is none."""
        if not self._choices:
            raise Unavailable("the answer was empty; try again", code="stream_broken")
        return sorted(self._choices.items())


class ChatBody(Gathered):
    """Body of Chat Completions."""

    def encode(self, head: Head, usage: api.Usage) -> bytes:
        """See `Body.encode`."""
        choices = self.sorted()
        reply = _encode(
            ChatReply(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=tuple(_chat_choice(index, choice) for index, choice in choices),
                usage=usage_reply(usage, head.predicted),
            )
        )
        if not any(choice.extra for _, choice in choices):
            return reply
        body: dict[str, Any] = msgspec.json.decode(reply)
        for made, (_, choice) in zip(body["choices"], choices, strict=True):
            made["message"] = {**choice.extra, **made["message"]}
        return _encode(body)


def _chat_choice(index: int, choice: _Choice) -> ChatChoice:
    calls = tuple(
        ToolCallReply(id=call.id, function=FunctionReply(name=call.name, arguments="".join(call.arguments)))
        for _, call in sorted(choice.calls.items())
    )
    text = "".join(choice.text)
    message = MessageReply(
        content=text if text or not (calls or choice.refusal) else None,
        refusal="".join(choice.refusal) or None,
        tool_calls=calls or UNSET,
    )
    return ChatChoice(
        index=index,
        message=message,
        finish_reason=choice.ended(index),
        logprobs=logprobs_reply(tuple(choice.logprobs)),
    )


class TextBody(Gathered):
    """Body of Completions."""

    def encode(self, head: Head, usage: api.Usage) -> bytes:
        """See `Body.encode`."""
        return _encode(
            TextReply(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=tuple(
                    TextChoice(
                        index=index,
                        text="".join(choice.text),
                        logprobs=text_logprobs(tuple(choice.logprobs), 0),
                        finish_reason=choice.ended(index),
                    )
                    for index, choice in self.sorted()
                ),
                usage=usage_reply(usage, head.predicted),
            )
        )
