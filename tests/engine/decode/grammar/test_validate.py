"""Checks of finished text, with a client's own schema, in a process that may be killed."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from magnitude_engine.decode.grammar.jobs import Budget
from magnitude_engine.decode.grammar.process import HelperLimits
from magnitude_engine.decode.grammar.validate import Invalid, PostCheck, Rule, TimedOut, Valid, Validator
from magnitude_engine.errors import EngineError


def rule(schema: Any) -> Rule:
    """Returns a rule for the whole answer."""
    return Rule(tool=None, schema=json.dumps(schema), keywords=("all",))


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"not": {"type": "string"}}, "1"),
        ({"format": "regex"}, '"[a-z]+"'),
        ({"format": "iri-reference"}, '"/é?q#f"'),
        ({"format": "uri-reference"}, '"../a%20b"'),
        ({"format": "relative-json-pointer"}, '"1/a"'),
        ({"$dynamicRef": "#node", "$defs": {"n": {"$dynamicAnchor": "node", "type": "integer"}}}, "3"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}}, '{"a": 1, "b": 2}'),
        (True, "null"),
    ],
)
def test_valid(schema: Any, text: str, validator: Validator) -> None:
    assert validator.check(rule(schema), text) == Valid()


@pytest.mark.parametrize(
    ("schema", "text", "message", "path"),
    [
        (
            {"properties": {"a/b": {"items": {"not": {"const": 1}}}}},
            '{"a/b": [0, 1]}',
            "should not be valid",
            "/a~1b/1",
        ),
        ({"format": "regex"}, '"["', "is not a 'regex'", ""),
        ({"format": "uri-reference"}, '"a b"', "is not a 'uri-reference'", ""),
        ({}, "{", "not JSON", ""),
        ({}, "NaN", "not JSON", ""),
        ({}, "[" * 100_000, "not JSON", ""),
        ({"$ref": "http://127.0.0.1:1/x"}, "1", "cannot be checked.*Unresolvable", ""),
        ({"$ref": "#"}, "1", "cannot be checked: RecursionError", ""),
        ({"pattern": "\\p{L}"}, '"a"', "cannot be checked", ""),
        (False, "1", "does not allow", ""),
    ],
)
def test_invalid(schema: Any, text: str, message: str, path: str, validator: Validator) -> None:
    verdict = validator.check(rule(schema), text)
    assert isinstance(verdict, Invalid)
    assert verdict.path == path
    assert re.search(message, verdict.message)


@pytest.mark.slow
def test_a_pattern_that_backtracks_forever_is_given_up() -> None:
    validator = Validator(HelperLimits(job=Budget(cpu_s=0.2, wall_s=1.0)))
    try:
        began = time.monotonic()
        verdict = validator.check(rule({"pattern": "^(a+)+$"}), json.dumps("a" * 40 + "b"))
        assert isinstance(verdict, TimedOut)
        assert "too long" in verdict.message
        assert time.monotonic() - began < 30
        assert validator.check(rule({"pattern": "^(a+)+$"}), '"aaa"') == Valid()
    finally:
        validator.close()
    with pytest.raises(EngineError, match="closed"):
        validator.check(rule({}), "1")


def test_rules_are_found_by_tool() -> None:
    whole, one = rule({}), Rule(tool="one", schema="{}", keywords=("not at #",))
    check = PostCheck(rules=(whole, one))
    assert (check.rule(), check.rule("one"), check.rule("two")) == (whole, one, None)
