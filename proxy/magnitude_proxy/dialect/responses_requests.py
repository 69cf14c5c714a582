"""The requests of OpenAI's Responses API, read as a chat.

`instructions` become the first system message and are not carried over to a later response; the conversation of
`previous_response_id` stands before `input`; `function_call` items become tool calls of the assistant's message and
`function_call_output` items tool messages. Reasoning items of the history are taken and change nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import msgspec

from magnitude_proxy.dialect.responses_tools import Called, Tools
from magnitude_proxy.dialect.responses_wire import InputItem, ItemPart, ResponsesRequest, TextConfig
from magnitude_proxy.dialect.translate import Chat, Names, read_as_chat, refuse
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.wire.intake import Asked
from magnitude_proxy.wire.requests import ignored_fields

NAMES = Names(
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"tool_choice\.function", "tool_choice"),
    (r"response_format\.json_schema", "text.format"),
    ("response_format", "text.format"),
    (r"messages\[\d+\]", "input"),
    ("messages", "input"),
    ("max_completion_tokens", "max_output_tokens"),
    ("max_tokens", "max_output_tokens"),
)
LOGPROBS = "message.output_text.logprobs"
# Fields that change nothing here, or that are heard by their meaning (a prefix is always cached).
_SILENT = frozenset({"prompt_cache_retention", "prompt_cache_options", "include", "stream_options", "background"})
# The name of a schema whose client gave it none.
UNNAMED = "output"
_TEXTS = ("input_text", "output_text", "text")

Message = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ResponseAsked:
    """A checked request.

    Attributes:
        chat: the chat that it is.
        wire: the request as it came.
        definitions: its tools as the client wrote them.
        tools: its tools.
        names: of its fields.
        messages: the conversation as chat messages, without the instructions.
        dropped: what of it no route gets.
    """

    chat: Asked
    wire: ResponsesRequest
    definitions: tuple[dict[str, Any], ...]
    tools: Tools
    names: Names
    messages: tuple[Message, ...]
    dropped: tuple[str, ...]


def read_response_request(
    body: dict[str, Any], asked: ResponsesRequest, earlier: Sequence[Message], seed: int
) -> ResponseAsked:
    """Returns the checked request; `earlier` is the conversation that it goes on from.

    Args:
        body: the request's JSON, and `asked` the same as a struct.
        seed: of the draws.

    Raises:
        BadRequest: names the field.
    """
    for name in ("background", "conversation", "prompt"):
        if body.get(name):
            refuse(name, "is not served here; send the whole request and wait for its answer")
    tools = Tools(asked.tools or ())
    reading = _Reading(earlier)
    messages = reading.messages(asked.input)
    dropped = (*_unheard(body, asked), *tools.dropped, *reading.dropped)
    chat = Chat(_chat(body, asked, tools, messages), dropped, reading.refusal)
    names = NAMES.of_tools(tools.places)
    read = read_as_chat(chat, names, seed)
    session = (asked.metadata or {}).get("session_id")
    hints = msgspec.structs.replace(read.hints, metadata_session_id=session)
    return ResponseAsked(
        chat=dataclasses.replace(read, hints=hints, ignored=()),
        wire=asked,
        definitions=tuple(body.get("tools") or ()),
        tools=tools,
        names=names,
        messages=tuple(messages),
        dropped=dropped,
    )


def _chat(body: dict[str, Any], asked: ResponsesRequest, tools: Tools, messages: Sequence[Message]) -> dict[str, Any]:
    """Returns the body of Chat Completions that the request is."""
    system = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    chat: dict[str, Any] = {
        "model": asked.model or "",
        "messages": [*system, *messages],
        "stream": bool(asked.stream),
        "max_completion_tokens": asked.max_output_tokens,
        "response_format": _format(asked.text),
        "tools": tools.chat or None,
        "tool_choice": tools.choice(asked.tool_choice),
        # For upstreams; a worker has no words for them.
        "reasoning_effort": None if asked.reasoning is None else asked.reasoning.effort,
        "verbosity": None if asked.text is None else asked.text.verbosity,
    }
    passed = ("temperature", "top_p", "parallel_tool_calls", "prompt_cache_key", "safety_identifier", "user")
    chat |= {name: body.get(name) for name in (*passed, "service_tier", "magnitude")}
    if LOGPROBS in (asked.include or ()):
        chat |= {"logprobs": True, "top_logprobs": asked.top_logprobs}
    return {name: value for name, value in chat.items() if value is not None}


def _unheard(body: dict[str, Any], asked: ResponsesRequest) -> tuple[str, ...]:
    """Returns the fields that are taken and change nothing, for a header."""
    names = [name for name in ignored_fields(body, ResponsesRequest) if name not in _SILENT and body[name] is not None]
    if body.get("truncation") == "disabled":
        names.remove("truncation")
    if asked.reasoning is not None:
        names.append("reasoning")
    if asked.text is not None and asked.text.verbosity is not None:
        names.append("text.verbosity")
    return tuple(names)


class _Reading:
    """Reads items; notes the calls that were made, and what is dropped or refused."""

    def __init__(self, earlier: Sequence[Message]) -> None:
        self.dropped: list[str] = []
        self.refusal: tuple[str, str] | None = None
        self._messages = [*earlier]
        self._kept = len(self._messages)
        self._calls = {call["id"] for message in earlier for call in message.get("tool_calls", ())}

    def messages(self, given: str | list[InputItem]) -> list[Message]:
        """Returns the whole conversation as chat messages."""
        if isinstance(given, str):
            self._messages.append({"role": "user", "content": given})
        else:
            for index, item in enumerate(given):
                self._item(item, f"input[{index}]")
        if not self._messages:
            raise BadRequest("input holds no message and no function call; send one", param="input")
        return self._messages

    def _item(self, item: InputItem, place: str) -> None:
        if item.type == "message":
            self._messages.append(self._message(item, place))
        elif item.type == "function_call":
            self._call(item, place)
        elif item.type == "function_call_output":
            self._output(item, place)
        elif item.type == "reasoning":
            if "input.reasoning" not in self.dropped:
                self.dropped.append("input.reasoning")
        else:
            refuse(f"{place}.type", f"{item.type[:64]!r} is not served here")

    def _message(self, item: InputItem, place: str) -> Message:
        if item.role not in ("user", "assistant", "system", "developer"):
            raise BadRequest(f"{place}.role must be one of user, assistant, system, developer", param=f"{place}.role")
        if item.content is None:
            raise BadRequest(f"{place}.content is missing", param=f"{place}.content")
        if isinstance(item.content, str):
            return {"role": item.role, "content": item.content}
        if item.role == "assistant":
            # The text that the model said, in the form in which a chat repeats it.
            return {"role": "assistant", "content": "".join(_texts(item.content, f"{place}.content"))}
        parts = [self._part(part, f"{place}.content[{index}]") for index, part in enumerate(item.content)]
        return {"role": item.role, "content": parts}

    def _part(self, part: ItemPart, place: str) -> dict[str, Any]:
        """Returns a part of a chat message; images are for upstreams only."""
        if part.type != "input_image" or part.image_url is None:
            return {"type": "text", "text": _text(part, place)}
        self.refusal = self.refusal or (place, "the local worker does not read images")
        image = {"url": part.image_url, "detail": part.detail}
        return {"type": "image_url", "image_url": {name: value for name, value in image.items() if value is not None}}

    def _call(self, item: InputItem, place: str) -> None:
        """Adds a call to the assistant's message before it, or to one of its own."""
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None:
                raise BadRequest(f"{place}.{name} is missing", param=f"{place}.{name}")
        name = Called(item.name or "", item.namespace).joined
        self._calls.add(item.call_id)
        call = {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": item.arguments}}
        last = self._messages[-1] if len(self._messages) > self._kept else None
        if last is not None and last["role"] == "assistant":
            last.setdefault("tool_calls", []).append(call)
        else:
            self._messages.append({"role": "assistant", "content": "", "tool_calls": [call]})

    def _output(self, item: InputItem, place: str) -> None:
        if item.call_id not in self._calls:
            raise BadRequest(
                f"{place}.call_id {str(item.call_id)[:64]!r} answers no function_call before it",
                param=f"{place}.call_id",
            )
        if item.output is None:
            raise BadRequest(f"{place}.output is missing", param=f"{place}.output")
        output = item.output
        if not isinstance(output, str):
            output = "\n".join(_texts(output, f"{place}.output"))
        self._messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})


def _texts(parts: list[ItemPart], place: str) -> list[str]:
    return [_text(part, f"{place}[{index}]") for index, part in enumerate(parts)]


def _text(part: ItemPart, place: str) -> str:
    if part.type not in (*_TEXTS, "refusal"):
        refuse(f"{place}.type", f"{part.type[:64]!r} is not served here")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise BadRequest(f"{place} lacks its text", param=place)
    return text


def _format(text: TextConfig | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.type != "json_schema":
        raise BadRequest("text.format.type must be one of text, json_object, json_schema", param="text.format.type")
    described = {"name": form.name or UNNAMED, "schema": form.schema, "strict": form.strict}
    return {"type": "json_schema", "json_schema": {k: v for k, v in described.items() if v is not None}}
