"""Writes grammars in the library's form: JSON by schema, and tool calls with free text around them.

JSON is written as `json.dumps` writes it by default (", " and ": "), which is also what chat templates write, so that
most of a call is forced and a replayed call has the generated tokens.

In mode `auto` text goes on until it ends in the begin marker, wherever token boundaries fall; from there on only
a call is allowed:

    start: (lead gap body gap end)* text        lead: the shortest text that ends in the begin marker
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import llguidance

from magnitude_engine.decode.grammar.schema import OPTIONS
from magnitude_engine.decode.grammar.spec import ToolCalls
from magnitude_engine.errors import RequestError

_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_LENIENT = {**_FORM, "lenient": True, "coerce_one_of": True}
_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
# What else may say something of an object's properties.
_ELSEWHERE = frozenset(
    {"$dynamicRef", "$recursiveRef", "$ref", "additionalProperties", "allOf", "anyOf", "const", "dependencies"}
    | {"dependentRequired", "dependentSchemas", "enum", "if", "minProperties", "not", "oneOf", "patternProperties"}
    | {"propertyNames", "unevaluatedProperties"}
)
_TEXT = "text: TEXT\nTEXT: /(.|\\n)*/\n"


def json_text(schema: dict[str, Any], lenient: bool) -> str:
    """Returns a schema with the form of the output written into it; `lenient` has unknown keywords allow anything."""
    return json.dumps({**schema, OPTIONS: _LENIENT if lenient else _FORM})


def json_grammar(schema_text: str) -> str:
    """Returns the grammar of what a schema from `json_text` allows."""
    grammar: str = llguidance.LLMatcher.grammar_from_json_schema(schema_text)
    return grammar


def regex_grammar(pattern: str) -> str:
    """Returns the grammar of what a regular expression matches."""
    grammar: str = llguidance.LLMatcher.grammar_from_regex(pattern)
    return grammar


def lark_grammar(source: str) -> str:
    """Returns the grammar of a Lark source."""
    grammar: str = llguidance.LLMatcher.grammar_from_lark(source)
    return grammar


def arguments_schema(parameters: dict[str, Any], param: str) -> dict[str, Any]:
    """Returns a schema of a call's arguments, which are an object; no schema at all means no arguments.

    Where a schema names properties and does not say what else there may be, a call has none besides: agents pass
    arguments to functions, which take what they name.

    Raises:
        RequestError: the schema asks for something else than an object.
    """
    if not parameters:
        return _NOTHING
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise RequestError(
            f"{param} describes {json.dumps(kind)[:80]}; a tool's arguments are an object: use type 'object'",
            param=param,
        )
    closed = {"additionalProperties": False} if _names_all(parameters) else {}
    return {**parameters, **closed, "type": "object"}


def _names_all(parameters: dict[str, Any]) -> bool:
    """True when `properties` is all that a schema says of its properties, and what it requires is among them."""
    named, required = parameters.get("properties"), parameters.get("required", [])
    if not isinstance(named, dict) or not isinstance(required, list) or not _ELSEWHERE.isdisjoint(parameters):
        return False
    return all(isinstance(name, str) and name in named for name in required)


def call_grammar(spec: ToolCalls, schemas: Sequence[str]) -> str:
    """Returns the grammar of calls to the tools of `spec`; `schemas` (`json_text`) are those of their arguments."""
    begin, end, gap = spec.format.begin, spec.format.end, spec.gap
    names = [tool.name for tool in spec.tools]
    chosen = [i for i, name in enumerate(names) if spec.mode != "named" or name == spec.name]
    rest = f"{_literal(gap)} body {_literal(gap + end)}"
    if spec.mode == "auto":
        once = f"lead {rest}"
        rules = f"start: ({once})* text\n" if spec.parallel else f"start: text | {once}\n"
        rules += f"lead[lazy]: TEXT {_literal(begin)}\n{_TEXT}"
    else:
        many = spec.parallel and spec.mode == "required"
        rules = f"start: one ({_literal(gap)} one)*\n" if many else "start: one\n"
        rules += f"one: {_literal(begin)} {rest}\n"
    rules += "body: " + " | ".join(f"call_{i}" for i in chosen) + "\n"
    for i in chosen:
        opening = f'{{"name": {json.dumps(names[i], ensure_ascii=False)}, "arguments": '
        rules += f"call_{i}: {_literal(opening)} %json {schemas[i]} {_literal('}')}\n"
    return lark_grammar("%llguidance {}\n" + rules)


def _literal(text: str) -> str:
    """Returns the text as a literal of a Lark grammar; an empty one as nothing."""
    return json.dumps(text, ensure_ascii=False) if text else ""
