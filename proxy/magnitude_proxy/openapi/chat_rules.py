"""The rules of Chat Completions and Completions."""

from __future__ import annotations

from magnitude_engine.config import AgentRuntimeConfig
from magnitude_proxy.openapi.rule import (
    FILLED,
    JSON_SCHEMA,
    LISTED,
    NULL,
    OBJECT,
    TEXT,
    TOOL_NAME,
    TOOLS_TO_CHOOSE,
    Rule,
    Schema,
    given_with,
    having,
    one_at_most,
    one_of_kind,
    where,
)
from magnitude_proxy.wire.requests import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionDefinition,
    Prediction,
    ResponseFormat,
    StructuredOutputs,
    WireMessage,
    WireTool,
    WireToolCall,
)

_NO_STRUCTURE: dict[str, Schema] = {
    **dict.fromkeys(("json", "regex", "choice", "grammar"), NULL),
    "json_object": {"enum": [None, False]},
}
_NO_FORM: dict[str, Schema] = {
    "response_format": {"anyOf": [NULL, where({"type": {"const": "text"}})]},
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), NULL),
    "structured_outputs": {"anyOf": [NULL, where(_NO_STRUCTURE)]},
}
_COMMON = Rule(
    properties={
        "logit_bias": {"propertyNames": {"pattern": "^[0-9]{1,10}$"}},
        "guided_choice": {"minItems": 1, "items": FILLED},
    },
    all_of=(
        given_with("stream_options", "stream", {"const": True}),
        one_at_most(_NO_FORM),
    ),
)
_NOT_A_CALL = where({"tool_calls": {"anyOf": [NULL, {"maxItems": 0}]}})
_SAID = {"content": {"type": ["string", "array"]}}
_TOKENS: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_FUNCTION_NAMED = one_of_kind({"function": {"function": having({"name": TEXT})}, "allowed_tools": {}, "custom": {}})

CHAT: dict[type, Rule] = {
    AgentRuntimeConfig: Rule(properties={"max_batch_size": {"minimum": 1}}),
    ContentPart: Rule(
        all_of=(one_of_kind({"text": {"text": TEXT}, "refusal": {}, "image_url": {}, "input_audio": {}, "file": {}}),)
    ),
    Prediction: Rule(
        properties={
            "content": {"anyOf": [TEXT, {"type": "array", "items": having({"type": {"const": "text"}, "text": TEXT})}]}
        }
    ),
    FunctionDefinition: Rule(properties={"name": {"type": "string", **TOOL_NAME}}),
    WireTool: Rule(all_of=(one_of_kind({"function": {"function": OBJECT}, "custom": {}}),)),
    WireToolCall: Rule(all_of=({"anyOf": [having({"type": {"const": "custom"}}), having({"function": OBJECT})]},)),
    WireMessage: Rule(
        all_of=(
            {
                "anyOf": [
                    having({"role": {"const": "assistant"}}),
                    {"allOf": [having({"role": {"const": "tool"}, **_SAID, "tool_call_id": TEXT}), _NOT_A_CALL]},
                    {
                        "allOf": [
                            having({"role": {"enum": ["system", "developer", "user", "function"]}, **_SAID}),
                            _NOT_A_CALL,
                        ]
                    },
                ]
            },
        )
    ),
    ResponseFormat: Rule(
        all_of=(
            {
                "anyOf": [
                    where({"type": {"enum": ["text", "json_object"]}}),
                    having({"json_schema": having({"schema": JSON_SCHEMA})}),
                ]
            },
        )
    ),
    StructuredOutputs: Rule(
        properties={"choice": {"minItems": 1, "items": FILLED}},
        all_of=(one_at_most(_NO_STRUCTURE),),
    ),
    ChatRequest: Rule(
        properties={
            **_COMMON.properties,
            "tool_choice": {"anyOf": [NULL, {"enum": ["none", "auto", "required"]}, _FUNCTION_NAMED]},
        },
        all_of=(
            *_COMMON.all_of,
            given_with("top_logprobs", "logprobs", {"const": True}),
            TOOLS_TO_CHOOSE,
        ),
    ),
    CompletionRequest: Rule(
        properties={
            **_COMMON.properties,
            "magnitude": where({"prune": {"maxItems": 0}}),
            "prompt": {
                "anyOf": [
                    TEXT,
                    {**LISTED, "items": _TOKENS},
                    {**LISTED, "maxItems": MAX_PROMPTS, "items": TEXT},
                    {**LISTED, "maxItems": MAX_PROMPTS, "items": {**LISTED, "items": _TOKENS}},
                ]
            },
        },
        all_of=_COMMON.all_of,
    ),
}
