"""The requests of Anthropic's Messages API as they stand on the wire; what is not declared is ignored and named."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from magnitude_proxy.wire.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MagnitudeOptions,
    Share,
    StopString,
    TokenLimit,
    Wire,
)

MAX_SEQUENCES = 16


class Block(Wire, frozen=True, kw_only=True):
    """One content block of any kind."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    source: dict[str, Any] | None = None


class TurnMessage(Wire, frozen=True, kw_only=True):
    """One message; `role` is `user`, `assistant` or, in the middle of a conversation, `system`."""

    role: str
    content: str | list[Block]


class ToolDefinition(Wire, frozen=True, kw_only=True):
    """A tool; only those of the client's own (`custom`) can be served."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolUseChoice(Wire, frozen=True, kw_only=True):
    """How tools may be used."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Wire, frozen=True, kw_only=True):
    """The schema that the answer must satisfy."""

    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(Wire, frozen=True, kw_only=True):
    """What the answer looks like."""

    format: OutputFormat | None = None
    effort: str | None = None


class CountRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    messages: Annotated[list[TurnMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    max_tokens: TokenLimit | None = None
    system: str | list[Block] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_SEQUENCES)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolUseChoice | None = None
    metadata: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    magnitude: MagnitudeOptions | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: TokenLimit
