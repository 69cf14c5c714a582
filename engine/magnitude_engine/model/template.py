"""Renders a conversation to text with the model's own chat template, in Jinja's immutable sandbox.

The environment is that of Hugging Face's `apply_chat_template` (trimmed blocks, `tojson` that keeps key order and
escapes nothing, `raise_exception`, `strftime_now` from an injected clock). A template that does not show the model
its tools, or the calls and results of earlier steps, is completed here in the Hermes form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from magnitude_engine.api import Message, Tool, ToolCall
from magnitude_engine.decode.tools import ToolFormat
from magnitude_engine.errors import ModelUnsupported, RequestError

_PROBE_NAME = "probe_tool_8f1c"
_PROBE_ARGUMENTS = '{"probe": 1}'
_PROBE_RESULT = "probe result 8f1c"


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")

_TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n"
    '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class Verbatim(str):
    """JSON text that `tojson` passes through unchanged, so that a call is replayed in the model's own words."""


class ChatTemplate:
    """One model's template.

    Attributes:
        native_tools: the template itself shows tools, calls and results, with the markers of `HERMES`.
    """

    def __init__(self, source: str, special: dict[str, str], clock: Callable[[], datetime]) -> None:
        """Compiles the template; `special` gives it names such as `bos_token`.

        Raises:
            ModelUnsupported: the template is not valid Jinja.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols], autoescape=False
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelUnsupported(f"the model's chat template cannot be compiled: {error}") from error
        self._special = special
        self.native_tools = self._shows_tools()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        """Returns the text up to the start of the next answer.

        Raises:
            RequestError: the template refuses these messages.
        """
        if self.native_tools:
            return self._apply([_record(m) for m in messages], [_definition(t) for t in tools])
        return self._apply([_record(m) for m in _in_plain_messages(messages, tools)], [])

    def _apply(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=True, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            # A template runs on the client's data, so any of these is a form of the messages it cannot show.
            raise RequestError(
                f"the model's chat template refuses these messages: {error}; check the roles and their order",
                param="messages",
            ) from error

    def _shows_tools(self) -> bool:
        """Renders one step with a tool, a call and its result, and looks for all three."""
        call = ToolCall(id="probe8f1c", name=_PROBE_NAME, arguments=_PROBE_ARGUMENTS)
        probe = (
            Message(role="user", content="question"),
            Message(role="assistant", tool_calls=(call,)),
            Message(role="tool", content=_PROBE_RESULT, tool_call_id=call.id),
        )
        tool = Tool(name="other_8f1c", description="a tool", parameters={"type": "object", "properties": {}})
        try:
            text = self._apply([_record(m) for m in probe], [_definition(tool)])
        except RequestError:
            return False
        written = f'{HERMES.begin}\n{{"name": "{_PROBE_NAME}", "arguments": {_PROBE_ARGUMENTS}}}\n{HERMES.end}'
        return tool.name in text and written in text and _PROBE_RESULT in text


def _record(message: Message) -> dict[str, Any]:
    """Returns the message in the form that templates read."""
    record: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        record["name"] = message.name
    if message.tool_call_id is not None:
        record["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        record["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": Verbatim(c.arguments)}}
            for c in message.tool_calls
        ]
    return record


def _definition(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _in_plain_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[Message]:
    """Yields the conversation with tools, calls and results written into ordinary message text."""
    rest = list(messages)
    if tools:
        own = rest.pop(0).content if rest and rest[0].role == "system" else ""
        listed = "\n".join(_to_json(_definition(tool)) for tool in tools)
        parts = [own, _TOOLS_BEFORE + listed + _TOOLS_AFTER] if own else [_TOOLS_BEFORE + listed + _TOOLS_AFTER]
        yield Message(role="system", content="\n\n".join(parts))
    results: list[str] = []
    for message in rest:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.content}\n</tool_response>")
            continue
        if results:
            yield Message(role="user", content="\n".join(results))
            results = []
        yield _with_calls(message)
    if results:
        yield Message(role="user", content="\n".join(results))


def _with_calls(message: Message) -> Message:
    """Returns the message with its tool calls appended to its text."""
    if not message.tool_calls:
        return message
    written = [
        f'{HERMES.begin}\n{{"name": {_to_json(c.name)}, "arguments": {c.arguments}}}\n{HERMES.end}'
        for c in message.tool_calls
    ]
    return Message(role=message.role, content="\n".join([message.content, *written] if message.content else written))


def _to_json(value: Any, indent: int | None = None, **_: object) -> str:
    """Returns JSON with ", " and ": " between items, in the order given, unescaped."""
    if isinstance(value, Verbatim):
        return str(value)
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
