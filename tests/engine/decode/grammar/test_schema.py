"""The table of keywords, the bounds on a schema, and the forms in which it reaches the grammar compiler."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnitude_engine import api
from magnitude_engine.decode.grammar.keywords import FORMATS, KEYWORDS, REFUSED_FORMATS, Treatment
from magnitude_engine.decode.grammar.schema import SchemaLimits, check_size, survey
from magnitude_engine.decode.grammar.spec import JsonObject, JsonSchema, Lark, Regex, ToolCalls
from magnitude_engine.errors import FeatureUnsupported, RequestError
from magnitude_engine.model.template import HERMES

CORE = {"$schema", "$id", "$ref", "$anchor", "$dynamicRef", "$dynamicAnchor", "$vocabulary", "$comment", "$defs"}
FORMATS_2020 = (
    "date-time date time duration email idn-email hostname idn-hostname ipv4 ipv6 uri uri-reference iri iri-reference "
    "uuid uri-template json-pointer relative-json-pointer regex"
)


def keywords_of_the_draft() -> set[str]:
    """Returns every keyword that the metaschema's vocabularies of draft 2020-12 define."""
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    root = "https://json-schema.org/draft/2020-12"
    names = ("core", "applicator", "unevaluated", "validation", "format-annotation", "content", "meta-data")
    found: set[str] = set()
    for name in names:
        found |= set(REGISTRY.contents(f"{root}/meta/{name}")["properties"])
    return found


def test_every_keyword_of_the_draft_is_treated() -> None:
    draft = keywords_of_the_draft()
    assert draft >= CORE
    assert len(draft) > 50
    assert sorted(draft - set(KEYWORDS)) == []


def test_every_format_of_the_draft_is_treated() -> None:
    assert sorted(set(FORMATS_2020.split()) - set(FORMATS) - REFUSED_FORMATS) == []


@pytest.mark.parametrize("word", sorted(w for w, t in KEYWORDS.items() if t is Treatment.CHECKED))
def test_checked_keywords_are_named_with_their_place(word: str) -> None:
    found = survey({"properties": {"a/b": {"items": {word: {}}}}}, "p")
    assert found.checked == (f"{word} at #/properties/a~1b/items",)


def test_properties_may_be_named_like_keywords() -> None:
    schema = {"properties": {"not": {"type": "string"}, "format": {"type": "integer"}, "if": True}}
    found = survey(schema, "p")
    assert (found.checked, found.ignored, found.grammar) == ((), (), schema)


def test_the_grammar_s_form_is_what_a_grammar_can_express() -> None:
    schema = {
        "type": "array",
        "minItems": 2.0,
        "uniqueItems": False,
        "title": "t",
        "items": {"multipleOf": 5000, "format": "byte", "x-guidance": {}, "x-other": 1},
    }
    found = survey(schema, "p")
    assert found.grammar == {"type": "array", "minItems": 2, "items": {"x-other": 1}}
    assert found.checked == ("multipleOf at #/items",)
    assert found.ignored == ("format byte at #/items", "x-guidance at #/items", "x-other at #/items")


def test_the_relaxed_form_allows_more() -> None:
    schema = {
        "patternProperties": {"a*": {"type": "integer"}},
        "additionalProperties": False,
        "properties": {"b": {"pattern": "(?=a)", "minLength": 1}, "c": {"pattern": "a"}},
    }
    found = survey(schema, "p")
    assert found.grammar == schema
    assert found.relaxed == {"properties": {"b": {"minLength": 1}, "c": {"pattern": "a"}}}
    assert found.loosened == ("pattern at #/properties/b", "patternProperties at #")


@pytest.mark.parametrize(("draft", "alone"), [("draft-04", True), ("draft-07", True), ("draft/2020-12", False)])
def test_older_drafts_ignore_what_stands_beside_a_reference(draft: str, alone: bool) -> None:
    beside = {"$ref": "#/definitions/a", "minLength": 3}
    schema = {"$schema": f"http://json-schema.org/{draft}/schema#", "items": beside, "definitions": {"a": {}}}
    assert survey(schema, "p").grammar["items"] == ({"$ref": "#/definitions/a"} if alone else beside)


def test_formats_that_nobody_can_check_are_refused() -> None:
    with pytest.raises(FeatureUnsupported, match=r"format 'uri-template' at #/items") as refused:
        survey({"items": {"format": "uri-template"}}, "response_format")
    assert refused.value.param == "response_format"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "other"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.thorough
@given(schema=JSON)
def test_any_object_is_surveyed_and_the_result_is_settled(schema: Any) -> None:
    refused = isinstance(schema, dict | bool) is False
    with pytest.raises(RequestError) if refused else nullcontext():
        found = survey(schema, "p")
    if refused:
        return
    assert isinstance(found.grammar, dict)
    assert survey(found.grammar, "p").grammar == found.grammar
    assert {k for k in found.grammar if KEYWORDS.get(k) is Treatment.ANNOTATION} <= {"$schema"}


@pytest.mark.parametrize(
    ("schema", "limits"),
    [
        ({"a": {"b": {}}}, SchemaLimits(depth=3)),
        ({"const": "abcdef", "b": 1}, SchemaLimits(characters=20)),
        ({"enum": [1, 2]}, SchemaLimits(alternatives=2)),
        ({"properties": {"a": {}, "b": {}}, "required": ["a"]}, SchemaLimits(optional=1)),
        ([1, 2, 3], SchemaLimits(nodes=4)),
    ],
)
def test_bounds_are_exact(schema: Any, limits: SchemaLimits) -> None:
    check_size(schema, limits, "p")
    for field in ("depth", "characters", "alternatives", "optional", "nodes"):
        if getattr(limits, field) != getattr(SchemaLimits(), field):
            tighter = SchemaLimits(**{field: getattr(limits, field) - 1})
            with pytest.raises(RequestError, match="p "):
                check_size(schema, tighter, "p")


def test_keys_are_of_the_content() -> None:
    tools = (api.Tool(name="a", description="x", parameters={"type": "object"}),)
    calls = ToolCalls(tools=tools, format=HERMES)
    other = (api.Tool(name="a", description="y", parameters={"type": "object"}),)
    assert calls.key() == ToolCalls(tools=other, format=HERMES, param="t").key()
    specs = (
        JsonObject(),
        JsonSchema(schema={"a": 1, "b": 2}),
        JsonSchema(schema={"b": 2, "a": 1}),
        Regex(pattern="a"),
        Lark(source="a"),
        calls,
        ToolCalls(tools=tools, format=HERMES, mode="required"),
        ToolCalls(tools=tools, format=HERMES, parallel=False),
        ToolCalls(tools=tools, format=HERMES, gap=""),
    )
    assert len({s.key() for s in specs}) == len(specs)


def test_the_library_s_draft_is_the_table_s() -> None:
    assert jsonschema.Draft202012Validator.META_SCHEMA["$id"] == "https://json-schema.org/draft/2020-12/schema"
