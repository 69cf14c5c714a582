"""The form that a client wants its answer in: OpenAI's `response_format`, and the fields that vLLM has for it.

| field | value |
|---|---|
| `response_format` | type `text`, `json_object`, or `json_schema` with `json_schema: {name, schema, strict}` |
| `guided_json` | a schema, or its JSON text |
| `guided_regex`, `guided_choice`, `guided_grammar` | a pattern, texts of which one is the answer, a Lark grammar |
| `structured_outputs` | an object with one of `json`, `regex`, `choice`, `grammar`, `json_object` |

Raises `BadRequest` with the JSON path of what is wrong; what a schema or grammar holds is the worker's to judge.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from magnitude_engine import api
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.wire.requests import Common, ResponseFormat, StructuredOutputs

_KINDS = ("json", "regex", "choice", "grammar", "json_object")
# Every character that means something in Rust's regular expressions.
_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def read_format(asked: Common) -> api.Format | None:
    """Returns the form of the answer; None for any."""
    structured = asked.structured_outputs or StructuredOutputs()
    given = [
        *_response_format(asked.response_format),
        *_guided("guided_", {name: getattr(asked, f"guided_{name}") for name in _KINDS[:4]}),
        *_guided("structured_outputs.", {name: getattr(structured, name) for name in _KINDS}),
    ]
    if len(given) > 1:
        first, second = (wanted.param.removesuffix(".json_schema.schema") for wanted in given[:2])
        raise BadRequest(f"{second} asks for another form than {first}; send one of them", param=second)
    return given[0] if given else None


def _response_format(given: ResponseFormat | None) -> Iterator[api.Format]:
    if given is None or given.type == "text":
        return
    if given.type == "json_object":
        yield api.JsonObjectFormat()
        return
    place = "response_format.json_schema"
    described = given.json_schema
    if described is None:
        raise BadRequest(f"{place} is missing; type json_schema needs it", param=place)
    if not isinstance(described.schema, dict | bool):
        raise BadRequest(f"{place}.schema must be a JSON Schema: an object", param=f"{place}.schema")
    yield api.JsonSchemaFormat(schema=described.schema, strict=bool(described.strict), name=described.name or "")


def _guided(prefix: str, given: Mapping[str, Any]) -> Iterator[api.Format]:
    """Yields what vLLM's fields ask for; those that are absent are None."""
    for name, value in given.items():
        param = prefix + name
        if value is None or value is False:
            continue
        if name == "json":
            yield api.JsonSchemaFormat(schema=_schema(value, param), param=param)
        elif name == "regex":
            yield api.RegexFormat(pattern=value, param=param)
        elif name == "choice":
            yield api.RegexFormat(pattern=_one_of(value, param), param=param)
        elif name == "grammar":
            yield api.LarkFormat(source=value, param=param)
        else:
            yield api.JsonObjectFormat(param=param)


def _schema(value: object, param: str) -> object:
    """Returns the schema; vLLM takes it as JSON text too."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise BadRequest(f"{param} is a text but not JSON: {error}", param=param) from error
    if not isinstance(value, dict | bool):
        raise BadRequest(f"{param} must be a JSON Schema: an object, or its JSON text", param=param)
    return value


def _one_of(texts: list[str], param: str) -> str:
    """Returns the pattern of one of the texts."""
    if not texts or not all(texts):
        raise BadRequest(f"{param} must hold at least one text, and no empty one", param=param)
    return "|".join(_META.sub(lambda found: "\\" + found[0], text) for text in texts)
