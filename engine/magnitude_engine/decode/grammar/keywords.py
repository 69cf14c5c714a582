"""How each keyword of JSON Schema is treated: one table for draft 2020-12 and what older drafts had besides.

`ENFORCED`    the grammar allows only what satisfies it.
`CHECKED`     the grammar allows more; the finished text is checked with jsonschema before it is released.
`ANNOTATION`  asserts nothing, by the specification.
`STRUCTURE`   holds or names subschemas that other keywords refer to.

`oneOf` is enforced where its alternatives provably exclude each other, else checked; `format` is treated by its
value (`FORMATS`). A keyword that is not here asserts nothing either; it is reported, never silently ignored.
"""

from __future__ import annotations

import re
from enum import Enum


class Treatment(Enum):
    """What becomes of a keyword."""

    ENFORCED = "enforced"
    CHECKED = "checked"
    ANNOTATION = "annotation"
    STRUCTURE = "structure"


def _table(**groups: str) -> dict[str, Treatment]:
    return {word: Treatment(name) for name, words in groups.items() for word in words.split()}


KEYWORDS: dict[str, Treatment] = _table(
    enforced="""
        $ref type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength minLength pattern
        maxItems minItems maxProperties minProperties required properties patternProperties additionalProperties
        prefixItems items allOf anyOf oneOf format additionalItems
    """,
    checked="""
        $dynamicRef $dynamicAnchor contains minContains maxContains uniqueItems propertyNames dependentSchemas
        dependentRequired if then else not unevaluatedItems unevaluatedProperties
        dependencies $recursiveRef $recursiveAnchor
    """,
    annotation="""
        $schema $comment $vocabulary title description default deprecated readOnly writeOnly examples
        contentEncoding contentMediaType contentSchema
    """,
    structure="$id $anchor $defs definitions id",
)

SINGLE = frozenset(
    {"additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"}
    | {"propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
LISTS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
MAPS = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"})
COUNTS = frozenset(
    {"maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties"}
)

FORMATS: dict[str, Treatment] = {
    **dict.fromkeys(
        ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"),
        Treatment.ENFORCED,
    ),
    **dict.fromkeys(
        ("idn-email", "iri", "iri-reference", "json-pointer", "regex", "relative-json-pointer", "uri-reference"),
        Treatment.CHECKED,
    ),
}
# Formats of the standard that nothing here can check; others, such as OpenAPI's int32, are annotations.
REFUSED_FORMATS = frozenset({"idn-hostname", "uri-template"})

_URI = r"[A-Za-z0-9\-._~:/?@!$&'()*+,;=\[\]{more}]|%[0-9A-Fa-f]{{2}}"
_REFERENCE = r"(?:{chars})*(?:#(?:{chars})*)?"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_ASCII = _REFERENCE.format(chars=_URI.format(more=""))
_WIDE = _REFERENCE.format(chars=_URI.format(more="\\u00a0-\\U0010ffff"))
FORMAT_PATTERNS: dict[str, re.Pattern[str]] = {
    "iri": re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:" + _WIDE),
    "iri-reference": re.compile(_WIDE),
    "json-pointer": re.compile(_POINTER),
    "relative-json-pointer": re.compile(r"(?:0|[1-9][0-9]*)(?:#|" + _POINTER + ")"),
    "uri-reference": re.compile(_ASCII),
}
