"""The requests of OpenAI's Responses API as they stand on the wire; what is not declared is ignored and named."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from magnitude_proxy.wire.requests import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MagnitudeOptions,
    Share,
    Temperature,
    TokenLimit,
    TopCount,
    Wire,
)


class ItemPart(Wire, frozen=True, kw_only=True):
    """One part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class InputItem(Wire, frozen=True, kw_only=True):
    """One item of the input, of any kind; without a type it is a message."""

    type: str = "message"
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None


class FlatTool(Wire, frozen=True, kw_only=True):
    """A tool: a function, or a namespace of functions."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: list[FlatTool] | None = None


class TextFormat(Wire, frozen=True, kw_only=True):
    """The form of the answer's text."""

    type: str
    name: str | None = None
    description: str | None = None
    schema: Any = None
    strict: bool | None = None


class TextConfig(Wire, frozen=True, kw_only=True):
    """What the answer's text looks like."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Wire, frozen=True, kw_only=True):
    """How much the model thinks; a local worker's does not."""

    effort: str | None = None


class ResponsesRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /v1/responses`."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: TokenLimit | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_logprobs: TopCount | None = None
    include: list[str] | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    background: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    service_tier: str | None = None
    magnitude: MagnitudeOptions | None = None
