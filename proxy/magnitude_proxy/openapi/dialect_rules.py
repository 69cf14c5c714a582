"""The rules of Anthropic's Messages and OpenAI's Responses."""

from __future__ import annotations

from collections.abc import Sequence

from magnitude_proxy.dialect.messages_wire import (
    CountRequest,
    MessagesRequest,
    OutputFormat,
    ToolDefinition,
    ToolUseChoice,
    TurnMessage,
)
from magnitude_proxy.dialect.responses_replies import ContentEvent, ItemEvent, PieceEvent, ResponseEvent
from magnitude_proxy.dialect.responses_wire import InputItem, ResponsesRequest, TextFormat
from magnitude_proxy.openapi.rule import (
    FILLED,
    JSON_SCHEMA,
    LISTED,
    NOTHING,
    NULL,
    OBJECT,
    TEXT,
    TOOL_NAME,
    TOOLS_TO_CHOOSE,
    Rule,
    Schema,
    having,
    one_of_kind,
    typed,
    where,
)

_TEXT_BLOCK = having({"type": {"const": "text"}, "text": TEXT})
_BLOCKS: dict[str, Schema] = {
    "text": _TEXT_BLOCK,
    "image": having({"type": {"const": "image"}, "source": having({"type": {"enum": ["base64", "url"]}})}),
    "tool_use": having({"type": {"const": "tool_use"}, "id": FILLED, "name": FILLED}),
    "tool_result": having({"type": {"const": "tool_result"}, "tool_use_id": TEXT}, content={"items": _TEXT_BLOCK}),
    "thinking": having({"type": {"enum": ["thinking", "redacted_thinking"]}}),
}
_SAYS = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "tool_use", "thinking"),
    "system": ("text",),
}


def _turn(role: str, kinds: Sequence[str]) -> Schema:
    """Returns the schema of a message whose blocks are of these kinds."""
    return having({"role": {"const": role}, "content": {"items": {"anyOf": [_BLOCKS[kind] for kind in kinds]}}})


_COUNT = Rule(
    properties={"system": {"items": _TEXT_BLOCK}, "mcp_servers": NOTHING},
    all_of=(
        {
            "anyOf": [
                where({"tool_choice": {"anyOf": [NULL, where({"type": {"enum": ["auto", "none"]}})]}}),
                having({"tools": LISTED}),
            ]
        },
    ),
)
MESSAGES: dict[type, Rule] = {
    TurnMessage: Rule(all_of=({"anyOf": [_turn(role, kinds) for role, kinds in _SAYS.items()]},)),
    ToolDefinition: Rule(
        properties={"name": TOOL_NAME, "type": {"enum": [None, "custom"]}, "input_schema": OBJECT},
        required=("input_schema",),
    ),
    ToolUseChoice: Rule(all_of=(one_of_kind({"auto": {}, "any": {}, "none": {}, "tool": {"name": TEXT}}),)),
    OutputFormat: Rule(properties={"type": {"const": "json_schema"}, "schema": OBJECT}, required=("schema",)),
    CountRequest: _COUNT,
    MessagesRequest: _COUNT,
}
_TEXT_PARTS: dict[str, dict[str, Schema]] = {
    **{kind: {"text": TEXT} for kind in ("input_text", "output_text", "text")},
    "refusal": {"refusal": TEXT},
}
_TEXTS: Schema = {"type": ["string", "array"], "items": one_of_kind(_TEXT_PARTS)}
_PARTS: Schema = {**_TEXTS, "items": one_of_kind({**_TEXT_PARTS, "input_image": {"image_url": TEXT}})}
_MESSAGE: Schema = {"const": "message"}
_FUNCTION = having({"type": {"const": "function"}, "name": TOOL_NAME | TEXT})
_TOOL: Schema = {
    "anyOf": [
        _FUNCTION,
        having({"type": {"const": "namespace"}, "name": FILLED}, tools={"items": _FUNCTION}),
        having({"type": {"pattern": "^web_search"}}),
    ]
}
_PIECES: dict[str, dict[str, Schema]] = {
    "response.output_text.delta": {"content_index": {}, "delta": TEXT, "logprobs": {}},
    "response.output_text.done": {"content_index": {}, "text": TEXT, "logprobs": {}},
    "response.refusal.delta": {"content_index": {}, "delta": TEXT},
    "response.refusal.done": {"content_index": {}, "refusal": TEXT},
    "response.function_call_arguments.delta": {"delta": TEXT},
    "response.function_call_arguments.done": {"name": TEXT, "arguments": TEXT},
}
RESPONSES: dict[type, Rule] = {
    InputItem: Rule(
        all_of=(
            {
                "anyOf": [
                    having({"role": {"enum": ["user", "system", "developer"]}, "content": _PARTS}, type=_MESSAGE),
                    having({"role": {"const": "assistant"}, "content": _TEXTS}, type=_MESSAGE),
                    having({"type": {"const": "function_call"}, "call_id": TEXT, "name": TEXT, "arguments": TEXT}),
                    having({"type": {"const": "function_call_output"}, "call_id": TEXT, "output": _TEXTS}),
                    having({"type": {"const": "reasoning"}}),
                ]
            },
        )
    ),
    TextFormat: Rule(all_of=(one_of_kind({"text": {}, "json_object": {}, "json_schema": {"schema": JSON_SCHEMA}}),)),
    ResponsesRequest: Rule(
        properties={
            "background": {"enum": [None, False]},
            "conversation": NOTHING,
            "prompt": NOTHING,
            "tools": {"items": _TOOL},
            "tool_choice": {
                "anyOf": [
                    NULL,
                    {"enum": ["none", "auto", "required"]},
                    having({"type": {"const": "function"}, "name": TEXT}),
                ]
            },
        },
        all_of=(TOOLS_TO_CHOOSE,),
    ),
    ResponseEvent: typed(
        *(f"response.{what}" for what in ("created", "in_progress", "completed", "incomplete", "failed"))
    ),
    ItemEvent: typed("response.output_item.added", "response.output_item.done"),
    ContentEvent: typed("response.content_part.added", "response.content_part.done"),
    PieceEvent: Rule(all_of=(one_of_kind(_PIECES),)),
}
