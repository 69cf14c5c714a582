"""From the messages and tools of Chat Completions to the neutral conversation.

Raises `BadRequest` with the JSON path of what is wrong.
"""

from __future__ import annotations

import re

from magnitude_engine import api
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.wire.requests import ChatRequest, ContentPart, Prediction, WireMessage, WireTool

# OpenAI's own bound: what passes here is taken by every route.
_TOOL_NAME = re.compile("[a-zA-Z0-9_-]{1,64}")
_PARTS = ("text", "refusal", "image_url", "input_audio", "file")


def read_messages(given: list[WireMessage]) -> tuple[api.Message, ...]:
    """Returns the neutral messages; every tool result must answer a call that stands before it."""
    calls: set[str] = set()
    messages = []
    for index, message in enumerate(given):
        place = f"messages[{index}]"
        if message.role == "tool":
            if message.tool_call_id is None:
                raise BadRequest(f"{place}.tool_call_id is missing", param=f"{place}.tool_call_id")
            if message.tool_call_id not in calls:
                raise BadRequest(
                    f"{place}.tool_call_id {message.tool_call_id[:64]!r} answers no tool call of an assistant message "
                    "before it",
                    param=f"{place}.tool_call_id",
                )
        made = _tool_calls(message, place)
        calls.update(call.id for call in made)
        messages.append(
            api.Message(
                role=_role(message),
                content=_text(message, place),
                name=message.name,
                tool_calls=made,
                tool_call_id=message.tool_call_id,
            )
        )
    return tuple(messages)


def _role(message: WireMessage) -> api.Role:
    if message.role == "developer":
        return "system"
    return "tool" if message.role == "function" else message.role


def _tool_calls(message: WireMessage, place: str) -> tuple[api.ToolCall, ...]:
    if not message.tool_calls:
        return ()
    if message.role != "assistant":
        raise BadRequest(f"{place}.tool_calls is only for assistant messages", param=f"{place}.tool_calls")
    made = []
    for index, call in enumerate(message.tool_calls):
        if call.function is None:
            if call.type == "function":
                raise BadRequest(
                    f"{place}.tool_calls[{index}].function is missing", param=f"{place}.tool_calls[{index}].function"
                )
            made.append(api.ToolCall(id=call.id, name="", arguments=""))
            continue
        made.append(api.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments))
    return tuple(made)


def _text(message: WireMessage, place: str) -> str:
    """Returns the message's text; text parts are joined by newlines, as vLLM and llama.cpp join them."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            raise BadRequest(f"{place}.content is missing", param=f"{place}.content")
        return message.refusal or ""
    if isinstance(content, str):
        return content
    return "\n".join(filter(None, (_part(part, f"{place}.content[{i}]") for i, part in enumerate(content))))


def _part(part: ContentPart, place: str) -> str | None:
    if part.type not in _PARTS:
        raise BadRequest(f"{place}.type must be one of {', '.join(_PARTS)}", param=f"{place}.type")
    if part.type == "text" and part.text is None:
        raise BadRequest(f"{place}.text is missing", param=f"{place}.text")
    return part.text if part.type == "text" else part.refusal


def read_tools(given: list[WireTool]) -> tuple[api.Tool, ...]:
    """Returns the function tools; other kinds are left out: the worker refuses them."""
    tools: dict[str, api.Tool] = {}
    for index, tool in enumerate(given):
        function = tool.function
        if function is None:
            if tool.type == "function":
                raise BadRequest(f"tools[{index}].function is missing", param=f"tools[{index}].function")
            continue
        if _TOOL_NAME.fullmatch(function.name) is None:
            raise BadRequest(
                f"tools[{index}].function.name {function.name[:80]!r} must be 1 to 64 letters (a-z, A-Z), digits, "
                "underscores or hyphens; rename the tool",
                param=f"tools[{index}].function.name",
            )
        if function.name in tools:
            raise BadRequest(
                f"tools[{index}].function.name {function.name!r} is used twice; names must differ",
                param=f"tools[{index}].function.name",
            )
        tools[function.name] = api.Tool(
            name=function.name, description=function.description or "", parameters=function.parameters or {}
        )
    return tuple(tools.values())


def read_prediction(given: Prediction) -> str:
    """Returns the text that the client expects the answer to follow."""
    if isinstance(given.content, str):
        return given.content
    for index, part in enumerate(given.content):
        if part.type != "text" or part.text is None:
            place = f"prediction.content[{index}]"
            raise BadRequest(f"{place} must be a text part: type text with a text", param=place)
    return "".join(part.text or "" for part in given.content)


def read_choice(asked: ChatRequest, tools: tuple[api.Tool, ...]) -> api.ToolChoice:
    given = asked.tool_choice
    parallel = asked.parallel_tool_calls is not False
    if given is None or given == "auto":
        return api.ToolChoice(parallel=parallel)
    if given == "none":
        return api.ToolChoice(mode="none", parallel=parallel)
    if not asked.tools:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    if given == "required":
        return api.ToolChoice(mode="required", parallel=parallel)
    if isinstance(given, str):
        raise BadRequest("tool_choice must be none, auto, required or name a function", param="tool_choice")
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if given.get("type") == "function":
        if not isinstance(name, str) or name not in {tool.name for tool in tools}:
            raise BadRequest("tool_choice.function.name must be one of tools", param="tool_choice.function.name")
        return api.ToolChoice(mode="named", name=name, parallel=parallel)
    if given.get("type") in ("allowed_tools", "custom"):
        return api.ToolChoice(mode="required", parallel=parallel)
    raise BadRequest("tool_choice.type must be function, allowed_tools or custom", param="tool_choice.type")
