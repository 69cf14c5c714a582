"""Conversations: what a model is asked, in a form that no client's wire dictates."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
ToolMode = Literal["auto", "none", "required", "named"]


class Frozen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every struct that crosses a boundary."""


class ToolCall(Frozen, frozen=True, kw_only=True):
    """One complete tool call in the history. `arguments` is the model's own text, never re-serialised."""

    id: str
    name: str
    arguments: str


class Message(Frozen, frozen=True, kw_only=True):
    """One message of a conversation; content parts are already joined to text."""

    role: Role
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Tool(Frozen, frozen=True, kw_only=True):
    """A function the model may call; `parameters` is its JSON Schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolChoice(Frozen, frozen=True, kw_only=True):
    """How tools may be used; `name` is set for mode `named`."""

    mode: ToolMode = "auto"
    name: str | None = None
    parallel: bool = True


class ChatInput(Frozen, tag="chat", frozen=True, kw_only=True):
    """A conversation, rendered by the worker's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()


class TextInput(Frozen, tag="text", frozen=True, kw_only=True):
    """Raw text, tokenised as it stands with special tokens off."""

    text: str


class TokenInput(Frozen, tag="tokens", frozen=True, kw_only=True):
    """Token ids, used as they stand."""

    ids: tuple[int, ...]


Input = ChatInput | TextInput | TokenInput


class JsonObjectFormat(Frozen, tag="json_object", frozen=True, kw_only=True):
    """Any JSON object. `param`, here and below, is the field that the client asked with."""

    param: str = "response_format"


class JsonSchemaFormat(Frozen, tag="json_schema", frozen=True, kw_only=True):
    """JSON that a JSON Schema (an object or a boolean) accepts; it is enforced whether `strict` is set or not."""

    schema: Any
    strict: bool = False
    name: str = ""
    param: str = "response_format.json_schema.schema"


class RegexFormat(Frozen, tag="regex", frozen=True, kw_only=True):
    """Text that a regular expression (Rust's syntax, without look-around) matches as a whole."""

    pattern: str
    param: str = "guided_regex"


class LarkFormat(Frozen, tag="lark", frozen=True, kw_only=True):
    """Text that a Lark grammar derives from its rule `start`."""

    source: str
    param: str = "guided_grammar"


Format = JsonObjectFormat | JsonSchemaFormat | RegexFormat | LarkFormat
