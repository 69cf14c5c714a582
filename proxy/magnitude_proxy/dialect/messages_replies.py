"""The answers of Anthropic's Messages API as they stand on the wire: the message, its blocks and events, errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from magnitude_engine import api
from magnitude_proxy.wire.replies import EngineFigures, Reply, usage_reply

_encode = msgspec.json.Encoder().encode
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
TOO_LONG = "context_length_exceeded"


class MessageUsage(Reply, frozen=True, kw_only=True):
    """Tokens; the prompt's are the sum of the three of input."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    magnitude: EngineFigures | UnsetType = UNSET


class TextBlock(Reply, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class ThinkingBlock(Reply, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """What a model thought before its answer; unsigned, since no server of this form signs it."""

    thinking: str
    signature: str = ""


class ToolUseBlock(Reply, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A tool call; `input` is an object."""

    id: str
    name: str
    input: dict[str, Any]


class WholeMessage(Reply, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The assistant's message; without a stop reason while it is not complete."""

    id: str
    model: str
    usage: MessageUsage
    content: tuple[TextBlock | ThinkingBlock | ToolUseBlock, ...] = ()
    stop_reason: str | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class MessageStart(Reply, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    """The first event."""

    message: WholeMessage


class BlockStart(Reply, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: TextBlock | ThinkingBlock | ToolUseBlock


class TextDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class InputDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More of a call's input, as JSON text."""

    partial_json: str


class BlockDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: TextDelta | ThinkingDelta | InputDelta


class BlockStop(Reply, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    """A block is complete."""

    index: int


class StopDelta(Reply, frozen=True, kw_only=True):
    """Why the message ended."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Reply, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    """The message's end, with all tokens of the answer."""

    delta: StopDelta
    usage: MessageUsage


class MessageStop(Reply, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    """The last event."""


class Ping(Reply, frozen=True, kw_only=True, tag_field="type", tag="ping"):
    """Nothing to say."""


class ErrorObject(Reply, frozen=True, kw_only=True):
    """What went wrong."""

    type: str
    message: str


class ErrorReply(Reply, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """Anthropic's error body; also an event, which ends a stream."""

    error: ErrorObject
    request_id: str | UnsetType = UNSET


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping | ErrorReply


def frame(event: Event) -> bytes:
    """Returns the frame of one event."""
    name = type(event).__struct_config__.tag
    return f"event: {name}\ndata: ".encode() + _encode(event) + b"\n\n"


def error_reply(status: int, message: str, code: str | None, request_id: str | None = None) -> ErrorReply:
    """Returns the error body for an HTTP status; a prompt over the context begins with words that clients look for."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    words = f"prompt is too long: {message}" if code == TOO_LONG else message
    return ErrorReply(error=ErrorObject(type=kind, message=words), request_id=request_id or UNSET)


def message_usage(usage: api.Usage) -> MessageUsage:
    """Returns the usage object."""
    return MessageUsage(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        magnitude=usage_reply(usage, predicted=False).magnitude,
    )
