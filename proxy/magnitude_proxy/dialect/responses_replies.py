"""The answers of OpenAI's Responses API as they stand on the wire: the response, its items and its events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from magnitude_engine import api
from magnitude_proxy.dialect.parts import Part
from magnitude_proxy.dialect.responses_tools import Called
from magnitude_proxy.wire.replies import EngineFigures, Reply, TokenReply, logprobs_reply, usage_reply

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class TextContent(Reply, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[TokenReply, ...] = ()


class RefusalContent(Reply, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    """Why the model does not answer."""

    refusal: str


class ThoughtContent(Reply, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class ThoughtItem(Reply, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought before its answer."""

    id: str
    status: Status
    content: tuple[ThoughtContent, ...]
    summary: tuple[()] = ()


class MessageItem(Reply, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: Status
    content: tuple[TextContent | RefusalContent, ...]
    role: Literal["assistant"] = "assistant"


class CallItem(Reply, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A tool call; `arguments` is the model's own text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | UnsetType = UNSET


Content = TextContent | RefusalContent | ThoughtContent
OutputItem = MessageItem | CallItem | ThoughtItem


class InputDetails(Reply, frozen=True, kw_only=True):
    """Where the input's tokens came from."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ResponseOutputDetails(Reply, frozen=True, kw_only=True):
    """What the output's tokens were."""

    reasoning_tokens: int


class ResponseUsage(Reply, frozen=True, kw_only=True):
    """Tokens, with the engine's figures under `magnitude`."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ResponseOutputDetails
    total_tokens: int
    magnitude: EngineFigures


class ResponseProblem(Reply, frozen=True, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class Incomplete(Reply, frozen=True, kw_only=True):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens", "content_filter"]


class NoReasoning(Reply, frozen=True, kw_only=True):
    """The model does not reason apart from its answer."""

    effort: None = None
    summary: None = None


class FunctionTool(Reply, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A function as the client defined it."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextSetting(Reply, frozen=True, kw_only=True):
    """What the answer's text had to look like."""

    format: dict[str, Any] = msgspec.field(default_factory=lambda: {"type": "text"})


class ResponseReply(Reply, frozen=True, kw_only=True):
    """A response: the body of an answer, and in a stream's first and last events; `usage` comes with its end."""

    id: str
    created_at: int
    status: Status
    model: str
    object: Literal["response"] = "response"
    background: bool = False
    completed_at: int | None = None
    conversation: None = None
    error: ResponseProblem | None = None
    frequency_penalty: float = 0.0
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    output: tuple[OutputItem, ...] = ()
    parallel_tool_calls: bool = True
    presence_penalty: float = 0.0
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: NoReasoning = NoReasoning()
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float = 1.0
    text: TextSetting = TextSetting()
    tool_choice: str | dict[str, Any] = "auto"
    tools: tuple[dict[str, Any], ...] = ()
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | UnsetType = UNSET


class Deleted(Reply, frozen=True, kw_only=True):
    """Body of an answer to DELETE."""

    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


class Event(Reply, frozen=True, kw_only=True):
    """Base of a stream's events; `sequence_number` counts from 0."""

    type: str
    sequence_number: int


class ResponseEvent(Event, frozen=True, kw_only=True):
    """`response.created`, `.in_progress`, `.completed`, `.incomplete`, `.failed`."""

    response: ResponseReply


class ItemEvent(Event, frozen=True, kw_only=True):
    """`response.output_item.added`, `.done`."""

    output_index: int
    item: OutputItem


class ContentEvent(Event, frozen=True, kw_only=True):
    """`response.content_part.added`, `.done`."""

    item_id: str
    output_index: int
    part: Content
    content_index: int = 0


class PieceEvent(Event, frozen=True, kw_only=True):
    """Deltas and ends of text, refusals and arguments; what does not belong to the type is left out."""

    item_id: str
    output_index: int
    content_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: tuple[TokenReply, ...] | UnsetType = UNSET


EVENTS = (ResponseEvent, ItemEvent, ContentEvent, PieceEvent)


_PREFIXES = {"call": "fc", "thought": "rs"}


def item_id(response: str, part: Part) -> str:
    """Returns the id of a part's item."""
    prefix = _PREFIXES.get(part.kind, "msg")
    return f"{prefix}_{response.removeprefix('resp_')}{part.index:02x}"


def content(part: Part) -> Content:
    """Returns the content of a thought, text or refusal so far."""
    if part.kind == "thought":
        return ThoughtContent(text=part.text)
    return _words(part)


def output_item(response: str, part: Part, status: Status, called: Called) -> OutputItem:
    """Returns the item of a part so far; an item in progress is empty. `called` is how the client knows a function."""
    name = item_id(response, part)
    begun = status == "in_progress"
    if part.kind == "call":
        arguments = "" if begun else part.text
        return CallItem(
            id=name,
            call_id=part.id,
            name=called.name,
            arguments=arguments,
            status=status,
            namespace=called.namespace or UNSET,
        )
    if part.kind == "thought":
        return ThoughtItem(id=name, status=status, content=() if begun else (ThoughtContent(text=part.text),))
    return MessageItem(id=name, status=status, content=() if begun else (_words(part),))


def _words(part: Part) -> TextContent | RefusalContent:
    if part.kind == "refusal":
        return RefusalContent(refusal=part.text)
    return TextContent(text=part.text, logprobs=token_replies(tuple(part.logprobs)))


def token_replies(entries: tuple[api.TokenLogprob, ...]) -> tuple[TokenReply, ...]:
    """Returns log-probabilities in OpenAI's form."""
    reply = logprobs_reply(entries)
    return () if reply is None else reply.content


def response_usage(usage: api.Usage) -> ResponseUsage:
    """Returns the usage object."""
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(cached_tokens=usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=ResponseOutputDetails(reasoning_tokens=usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        magnitude=usage_reply(usage, predicted=False).magnitude,
    )
