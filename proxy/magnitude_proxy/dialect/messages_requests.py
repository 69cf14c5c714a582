"""The requests of Anthropic's Messages API, read as a chat.

`system` and its blocks become one system message; `tool_result` blocks become tool messages; `tool_use` blocks become
tool calls whose arguments are written as the worker's grammar writes JSON, so that a repeated call is the text that
the model once said. Thinking blocks of the history and `cache_control` are taken and change nothing: every prefix is
cached.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from magnitude_proxy.dialect.messages_wire import (
    Block,
    CountRequest,
    MessagesRequest,
    OutputFormat,
    ToolDefinition,
    ToolUseChoice,
    TurnMessage,
)
from magnitude_proxy.dialect.translate import Chat, Names, read_as_chat, refuse
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.wire.intake import Asked
from magnitude_proxy.wire.requests import convert, decode_json, ignored_fields

NAMES = Names(
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
    (r"response_format\.json_schema", "output_config.format"),
    ("response_format", "output_config.format"),
    ("stop", "stop_sequences"),
    ("max_completion_tokens", "max_tokens"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THOUGHTS = ("thinking", "redacted_thinking")
# Claude Code tells its session in `metadata.user_id`: at its end, or in JSON.
_SESSION = re.compile(r"_session_([0-9A-Za-z-]{8,64})$")


@dataclasses.dataclass(frozen=True, slots=True)
class MessagesAsked:
    """A checked request: the chat that it is, its own limit, what of it no route gets, whether it wants thoughts."""

    chat: Asked
    max_tokens: int
    dropped: tuple[str, ...]
    thoughts: bool


def read_messages_request(raw: bytes, seed: int, context: int | None) -> MessagesAsked:
    """Returns the checked body of `POST /v1/messages`; `seed` counts for the draws.

    `max_tokens` is a limit here, not a wish: where it is as long as the worker's whole `context`, the answer may go on
    to the context's end.

    Raises:
        BadRequest: names the field.
    """
    body = decode_json(raw)
    asked = convert(body, MessagesRequest)
    chat = as_chat(body, asked)
    read = read_as_chat(chat, NAMES, seed)
    limit = None if context is not None and asked.max_tokens >= context else asked.max_tokens
    stop = tuple(asked.stop_sequences or ())
    if stop:
        read.body["stop"] = list(stop)
    made = dataclasses.replace(
        read,
        generate=msgspec.structs.replace(read.generate, max_tokens=limit, stop=stop),
        hints=msgspec.structs.replace(read.hints, metadata_session_id=_session(asked.metadata or {})),
        ignored=(),
    )
    thinking = body.get("thinking")
    thoughts = isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive")
    return MessagesAsked(made, asked.max_tokens, chat.dropped, thoughts)


def read_count_request(raw: bytes, seed: int) -> Asked:
    """Returns the checked body of `POST /v1/messages/count_tokens`; raises BadRequest with the field."""
    body = decode_json(raw)
    return read_as_chat(as_chat(body, convert(body, CountRequest)), NAMES, seed)


def as_chat(body: dict[str, Any], asked: CountRequest) -> Chat:
    """Returns the request as a chat; `body` is its JSON.

    Raises:
        BadRequest: names the field.
    """
    if body.get("mcp_servers"):
        refuse("mcp_servers", "is not served here; run the servers yourself and send their tools in tools")
    reading = _Reading()
    messages = list(reading.system(asked.system))
    for index, message in enumerate(asked.messages):
        messages += reading.message(message, f"messages[{index}]")
    if asked.messages[-1].role == "assistant":
        refuse(
            f"messages[{len(asked.messages) - 1}]",
            "is the assistant's and the last: an answer that goes on from given words (prefill) is not served; "
            "end with a user message",
        )
    chat: dict[str, Any] = {"model": asked.model or "", "messages": messages, "stream": bool(asked.stream)}
    chat |= {name: body.get(name) for name in ("max_tokens", "temperature", "top_p", "top_k", "magnitude")}
    if asked.tools:
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools)]
    if asked.tool_choice is not None:
        chat |= _choice(asked.tool_choice)
    if asked.output_config is not None and asked.output_config.format is not None:
        chat["response_format"] = _format(asked.output_config.format)
    given = {name: value for name, value in chat.items() if value is not None}
    return Chat(given, (*_unheard(body), *reading.dropped), reading.refusal)


def _unheard(body: dict[str, Any]) -> tuple[str, ...]:
    """Returns the fields that are taken and change nothing, for a header; `cache_control` is heard: all is cached."""
    silent = {"cache_control"} if body.get("thinking") != {"type": "disabled"} else {"cache_control", "thinking"}
    effort = ("output_config.effort",) if (body.get("output_config") or {}).get("effort") is not None else ()
    return (*(name for name in ignored_fields(body, MessagesRequest) if name not in silent), *effort)


class _Reading:
    """Reads blocks; notes the calls that were made, and what is dropped or refused."""

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.refusal: tuple[str, str] | None = None
        self._calls: set[str] = set()

    def system(self, given: str | list[Block] | None) -> Iterator[dict[str, Any]]:
        """Yields the system message, if there is one."""
        text = given if isinstance(given, str) else self._texts(given or [], "system")
        if text:
            yield {"role": "system", "content": text}

    def message(self, message: TurnMessage, place: str) -> Iterator[dict[str, Any]]:
        """Yields the chat's messages for one of Anthropic's."""
        content = message.content
        if message.role not in ("user", "assistant", "system"):
            raise BadRequest(f"{place}.role must be one of user, assistant, system", param=f"{place}.role")
        if isinstance(content, str):
            yield {"role": message.role, "content": content}
        elif message.role == "user":
            yield from self._user(content, place)
        elif message.role == "assistant":
            yield self._assistant(content, place)
        else:
            yield {"role": "system", "content": self._texts(content, f"{place}.content")}

    def _user(self, blocks: list[Block], place: str) -> Iterator[dict[str, Any]]:
        """Yields tool messages and user messages in the order of the blocks."""
        parts: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            where = f"{place}.content[{index}]"
            if block.type != "tool_result":
                parts.append(self._part(block, where))
                continue
            if parts:
                yield {"role": "user", "content": parts}
                parts = []
            if block.tool_use_id not in self._calls:
                given = str(block.tool_use_id)[:64]
                raise BadRequest(
                    f"{where}.tool_use_id {given!r} answers no tool_use block of a message before it",
                    param=f"{where}.tool_use_id",
                )
            content = block.content or ""
            text = content if isinstance(content, str) else self._texts(content, f"{where}.content")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
        if parts:
            yield {"role": "user", "content": parts}

    def _assistant(self, blocks: list[Block], place: str) -> dict[str, Any]:
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            where = f"{place}.content[{index}]"
            if block.type == "tool_use":
                calls.append(self._call(block, where))
            elif block.type in _THOUGHTS:
                self._drop("messages.thinking")
            else:
                texts.append(self._text(block, where))
        message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        return {**message, "tool_calls": calls} if calls else message

    def _call(self, block: Block, place: str) -> dict[str, Any]:
        for name in ("id", "name"):
            if not getattr(block, name):
                raise BadRequest(f"{place}.{name} is missing", param=f"{place}.{name}")
        self._calls.add(block.id or "")
        arguments = json.dumps(block.input or {}, ensure_ascii=False)
        return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}

    def _part(self, block: Block, place: str) -> dict[str, Any]:
        """Returns a part of a user message; images are for upstreams only."""
        if block.type != "image":
            return {"type": "text", "text": self._text(block, place)}
        source = block.source or {}
        if source.get("type") == "base64":
            url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        elif source.get("type") == "url":
            url = str(source.get("url"))
        else:
            refuse(f"{place}.source", "must be of type base64 or url")
        self.refusal = self.refusal or (place, "the local worker does not read images")
        return {"type": "image_url", "image_url": {"url": url}}

    def _texts(self, blocks: list[Block], place: str) -> str:
        return "\n".join(self._text(block, f"{place}[{index}]") for index, block in enumerate(blocks))

    def _text(self, block: Block, place: str) -> str:
        if block.type != "text":
            refuse(place, f"is of type {block.type[:32]!r}, which is not served here")
        if block.text is None:
            raise BadRequest(f"{place}.text is missing", param=f"{place}.text")
        return block.text

    def _drop(self, name: str) -> None:
        if name not in self.dropped:
            self.dropped.append(name)


def _tool(tool: ToolDefinition, place: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        refuse(f"{place}.type", f"{tool.type[:64]!r} is not served here; only the client's own tools are (custom)")
    if tool.input_schema is None:
        raise BadRequest(f"{place}.input_schema is missing", param=f"{place}.input_schema")
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(given: ToolUseChoice) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if given.disable_parallel_tool_use is not None:
        made["parallel_tool_calls"] = not given.disable_parallel_tool_use
    if given.type in _CHOICES:
        return {**made, "tool_choice": _CHOICES[given.type]}
    if given.type != "tool" or given.name is None:
        raise BadRequest("tool_choice must be of type auto, any, none, or tool with a name", param="tool_choice")
    return {**made, "tool_choice": {"type": "function", "function": {"name": given.name}}}


def _format(given: OutputFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        raise BadRequest("output_config.format.type must be json_schema", param="output_config.format.type")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given.schema, "strict": True}}


def _session(metadata: dict[str, Any]) -> str | None:
    """Returns the session that a client tells in its metadata."""
    user = metadata.get("user_id")
    if not isinstance(user, str):
        return None
    found = _SESSION.search(user)
    if found:
        return found[1]
    try:
        told = msgspec.json.decode(user)
    except msgspec.DecodeError:
        return None
    session = told.get("session_id") if isinstance(told, dict) else None
    return session if isinstance(session, str) else None
