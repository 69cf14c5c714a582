"""Tools in one order, whatever order a client's program keeps them in, for those who ask (`magnitude.canonical_tools`).

Only what cannot change meaning is moved:

    tools                   by name: a request has a set of tools, and nothing refers to a place in it
    keywords of a schema    in one order: they are keys of a JSON object, and each asserts by itself
    `required`              in the order of `properties`: it is a set of names

Everything else stays where it is: the names in `properties` (arguments are written in their order, and an argument that
explains may have to come before one that decides), `enum`, `type`, `anyOf` and the like (the first may be meant as the
usual one), and all data (`default`, `const`, `examples`). Even so a model may answer otherwise, since its prompt is
another one; therefore nothing is moved unasked.
"""

from __future__ import annotations

from typing import Any

_TOOL = ("type", "function")
_FUNCTION = ("name", "description", "parameters", "strict")
_KEYWORDS = ("$schema", "$id", "$ref", "type", "title", "description", "properties", "required", "items", "enum")
_BY_NAME = frozenset({"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"})
_SCHEMAS = frozenset(
    {
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "anyOf", "oneOf", "allOf"),
        *("additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else"),
    }
)


def canonical_tools(tools: list[Any]) -> list[Any]:
    """Returns checked tools of a chat request, in JSON as they came, in one order."""
    return sorted(map(_tool, tools), key=_name)


def _name(tool: Any) -> str:
    return str(_function(tool).get("name", ""))


def _function(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function if isinstance(function, dict) else {}


def _tool(tool: Any) -> Any:
    function = _function(tool)
    if not function:
        return tool
    parts = {key: _schema(value) if key == "parameters" else value for key, value in _ordered(function, _FUNCTION)}
    return dict(_ordered({**tool, "function": parts}, _TOOL))


def _ordered(given: dict[str, Any], first: tuple[str, ...]) -> list[tuple[str, Any]]:
    """Returns the items of an object: those of `first` in that order, then the others by name."""
    place = {key: index for index, key in enumerate(first)}
    return sorted(given.items(), key=lambda item: (place.get(item[0], len(first)), item[0]))


def _schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _keyword(key, value, schema) for key, value in _ordered(schema, _KEYWORDS)}


def _keyword(key: str, value: Any, schema: dict[str, Any]) -> Any:
    if key in _BY_NAME and isinstance(value, dict):
        return {name: _schema(each) for name, each in value.items()}
    if key in _SCHEMAS:
        return _schema(value)
    if key == "required" and isinstance(value, list):
        properties = schema.get("properties")
        place = {name: index for index, name in enumerate(properties)} if isinstance(properties, dict) else {}
        return sorted(value, key=lambda name: place.get(name, len(place)) if isinstance(name, str) else len(place))
    return value
