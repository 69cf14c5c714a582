"""JSON Schemas of the structs on the wire, named by their class, for `#/components/schemas`.

Each has what `rules` says beside its struct. An answer's is strict: every field that is always sent is required, and
none has a default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, inspect

from magnitude_proxy.openapi.rule import Rule
from magnitude_proxy.openapi.rules import RULES
from magnitude_proxy.wire.requests import Wire

Schema = dict[str, Any]
PLACE = "#/components/schemas/{name}"
_NULL: Schema = {"type": "null"}


def components(kinds: Sequence[Any]) -> tuple[dict[Any, Schema], dict[str, Schema]]:
    """Returns a reference for each of `kinds`, and the schemas of all structs in them by name."""
    found, made = msgspec.json.schema_components(kinds, ref_template=PLACE)
    names = _names(kinds)
    requests = _within(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Wire))
    for name, schema in made.items():
        schema["properties"] = _compact(schema["properties"])
        kind = names[name]
        schema.pop("title", None)
        if kind not in requests:
            _make_strict(schema, kind)
        _add_rule(schema, RULES.get(kind, Rule()))
    return dict(zip(kinds, found, strict=True)), dict(made)


def _compact(node: Any) -> Any:
    """Returns a schema with nullable values in their short form, and without defaults that are null."""
    if isinstance(node, list):
        return [_compact(one) for one in node]
    if not isinstance(node, dict):
        return node
    made = {name: _compact(value) for name, value in node.items() if (name, value) != ("default", None)}
    kinds = made.get("anyOf")
    if not isinstance(kinds, list) or len(kinds) != 2 or kinds[1] != _NULL or "type" not in kinds[0]:
        return made
    del made["anyOf"]
    return {**kinds[0], "type": [kinds[0]["type"], "null"], **made}


def any_of(schemas: Sequence[Schema]) -> Schema:
    """Returns the schema of what is one of these."""
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def _add_rule(schema: Schema, rule: Rule) -> None:
    for name, more in rule.properties.items():
        schema["properties"][name] = _narrowed(schema["properties"].get(name, {}), more)
    missing = [name for name in rule.required if name not in schema["required"]]
    schema["required"] = [*schema["required"], *missing]
    if rule.all_of:
        schema["allOf"] = list(rule.all_of)


def _narrowed(schema: Schema, more: Mapping[str, Any]) -> Schema:
    """Returns a schema with the keywords of another, which go before its own but for those of named items."""
    made = {**schema, **more}
    if "$ref" in schema.get("items", ()) and "items" in more:
        made["items"] = {"allOf": [schema["items"], more["items"]]}
    return made


def _make_strict(schema: Schema, kind: type[msgspec.Struct]) -> None:
    """Requires what is always there; a struct that leaves its defaults out stays as it is."""
    if kind.__struct_config__.omit_defaults:
        return
    tag = kind.__struct_config__.tag_field
    sent = [field.encode_name for field in msgspec.structs.fields(kind) if field.default is not UNSET]
    schema["required"] = [*([] if tag is None else [tag]), *sent]
    for described in schema["properties"].values():
        described.pop("default", None)


def _names(kinds: Iterable[Any]) -> Mapping[str, type[msgspec.Struct]]:
    """Returns the structs by the names that msgspec gives them: the class's, with its module where two share one."""
    structs = _within(kinds)
    uses = Counter(kind.__name__ for kind in structs)
    return {
        kind.__name__ if uses[kind.__name__] == 1 else f"{kind.__module__}.{kind.__qualname__}": kind
        for kind in structs
    }


def _within(kinds: Iterable[Any]) -> frozenset[type[msgspec.Struct]]:
    """Returns all structs in `kinds`, at any depth."""
    found: set[type[msgspec.Struct]] = set()
    open_ones = list(inspect.multi_type_info(list(kinds)))
    while open_ones:
        info = open_ones.pop()
        if isinstance(info, inspect.StructType):
            if info.cls in found:
                continue
            found.add(info.cls)
        open_ones += _inner(info)
    return frozenset(found)


def _inner(info: inspect.Type) -> Iterator[inspect.Type]:
    """Yields the types that a type is made of."""
    for name in info.__struct_fields__:
        value = getattr(info, name)
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, inspect.Field):
                yield one.type
            elif isinstance(one, inspect.Type):
                yield one
