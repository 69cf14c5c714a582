"""What is so of a struct on the wire beyond its types and bounds, and the words of JSON Schema to say it with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a struct's schema has besides: keywords of properties, required names, and schemas that hold too."""

    properties: Mapping[str, Schema] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    all_of: Sequence[Schema] = ()


NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string"}
OBJECT: Schema = {"type": "object"}
JSON_SCHEMA: Schema = {"type": ["object", "boolean"]}
TOOL_NAME: Schema = {"pattern": "^[a-zA-Z0-9_-]{1,64}$"}
FILLED: Schema = {"type": "string", "minLength": 1}
LISTED: Schema = {"type": "array", "minItems": 1}
# What Python takes for no.
NOTHING: Schema = {"enum": [None, False, 0, "", [], {}]}


def having(properties: Mapping[str, Schema], **optional: Schema) -> Schema:
    """Returns the schema of an object that has all of these; `optional` ones are so, or absent."""
    return {"type": "object", "properties": {**properties, **optional}, "required": list(properties)}


def where(properties: Mapping[str, Schema]) -> Schema:
    """Returns the schema of an object in which these are so, or absent."""
    return {"properties": dict(properties)}


def one_of_kind(kinds: Mapping[str, Mapping[str, Schema]]) -> Schema:
    """Returns the schema of an object whose `type` is one of `kinds`, and which has that kind's fields."""
    plain = [kind for kind, fields in kinds.items() if not fields]
    full = [having({"type": {"const": kind}, **fields}) for kind, fields in kinds.items() if fields]
    return {"anyOf": [*full, *([having({"type": {"enum": plain}})] if plain else [])]}


def given_with(name: str, other: str, value: Schema) -> Schema:
    """Returns the schema of an object in which `name` is given only where `other` is so."""
    return {"anyOf": [where({name: NULL}), having({other: value})]}


def typed(*types: str) -> Rule:
    """Returns the rule of what tells its type by a plain text."""
    return Rule(properties={"type": {"enum": list(types)}})


def one_at_most(fields: Mapping[str, Schema]) -> Schema:
    """Returns the schema of an object of whose `fields` all but one are as they stand here, or absent."""
    names = list(fields)
    return {"anyOf": [where({name: fields[name] for name in names if name != kept}) for kept in names]}


TOOLS_TO_CHOOSE: Schema = {
    "anyOf": [where({"tool_choice": {"enum": [None, "none", "auto"]}}), having({"tools": LISTED})]
}
