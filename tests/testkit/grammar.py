"""Grammars for tests: a small set of schemas with instances, and ways to walk through a grammar."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from magnitude_engine.decode.grammar.compiler import CompiledGrammar
from magnitude_engine.decode.grammar.spec import JsonSchema
from magnitude_engine.decode.grammar.state import GrammarState
from magnitude_engine.model.tokenizer import Tokenizer

PARAM = "response_format.json_schema.schema"
_BITS = torch.arange(32, dtype=torch.int32)
_STRUCTURE = frozenset(b'"{}[],: 0123456789')


@dataclass(frozen=True, slots=True)
class Case:
    """A schema with instances, in the order of its properties; `checked` keywords are left to the check."""

    name: str
    schema: Any
    valid: tuple[Any, ...]
    invalid: tuple[Any, ...]
    checked: tuple[str, ...] = ()


def _closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_NODE = _closed(
    {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "value"
)
_TEXT = {"type": "string"}

CASES: tuple[Case, ...] = (
    Case(
        "closed object",
        _closed({"a": {"type": "integer"}, "b": _TEXT}, "a"),
        ({"a": 1}, {"a": -7, "b": "é😀"}),
        ({}, {"b": "x"}, {"a": 1.5}, {"a": 1, "c": 2}, []),
    ),
    Case(
        "enum and const",
        _closed({"e": {"enum": ["x", 3, None, ["<|im_end|>"]]}, "c": {"const": 'q"\\\n<|im_end|>'}}, "e"),
        ({"e": "x"}, {"e": None}, {"e": ["<|im_end|>"]}, {"e": 3, "c": 'q"\\\n<|im_end|>'}),
        ({"e": "y"}, {"e": 3, "c": "q"}),
    ),
    Case("numbers", {"type": "number", "minimum": -2, "exclusiveMaximum": 10.5}, (-2, 0, 10.25), (-3, 10.5, 11, "1")),
    Case("multiples", {"type": "integer", "multipleOf": 7, "minimum": 0}, (0, 7, 700), (1, 8, -7)),
    Case("large multiples", {"type": "integer", "multipleOf": 999983}, (0, 999983), (1,), ("multipleOf",)),
    Case(
        "strings",
        {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^[a-zß]+$"},
        ("ab", "aßcd"),
        ("a", "abcde", "AB"),
    ),
    Case(
        "look-around", {"type": "string", "pattern": "^(?!ab)[a-c]{2,3}$"}, ("ba", "cab"), ("ab", "abc"), ("pattern",)
    ),
    Case("formats", {"type": "string", "format": "date"}, ("2026-11-30",), ("2026-13-01", "today")),
    Case(
        "checked formats",
        {"type": "string", "format": "json-pointer"},
        ("", "/a/~0"),
        ("a", "/~2"),
        ("format json-pointer",),
    ),
    Case(
        "arrays",
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1.0, "maxItems": 3},
        ([True], [False, True]),
        ([], [1], [True] * 4),
    ),
    Case(
        "tuples",
        {"type": "array", "prefixItems": [_TEXT, {"type": "null"}], "items": False},
        ([], ["a", None]),
        ([1], ["a", None, 1]),
    ),
    Case(
        "unique",
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        ([], [1, 2]),
        ([1, 1],),
        ("uniqueItems",),
    ),
    Case(
        "recursion",
        {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
        ({"value": 1, "next": {"value": 2, "next": None}},),
        ({"value": 1, "next": 3},),
    ),
    Case(
        "negation",
        {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 3}}}},
        ({"a": 4},),
        ({"a": 3},),
        ("not",),
    ),
    Case("one of", {"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}, (1, 2.5), (3,), ("oneOf",)),
    Case(
        "condition",
        {
            "type": "object",
            "properties": {"k": {"enum": ["a", "b"]}, "v": _TEXT},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"required": ["v"]},
        },
        ({"k": "b"}, {"k": "a", "v": ""}),
        ({"k": "a"},),
        ("if", "then"),
    ),
    Case(
        "overlapping patterns",
        {"type": "object", "patternProperties": {"a*": {"type": "integer"}, "aaa*": {"maximum": 20}}},
        ({"a": 21}, {}),
        ({"aaaa": 31},),
        ("patternProperties",),
    ),
    Case("anything", True, (None, {"a": [1, "x"]}, "s"), ()),
)
REFUSED: tuple[tuple[Any, str], ...] = (
    ({"$ref": "https://example.com/schema"}, r"\$ref"),
    ({"not": {"$ref": "#/$defs/none"}}, r"\$ref"),
    ({"type": "string", "format": "uri-template"}, "uri-template"),
    ({"type": "string", "pattern": "("}, "pattern"),
    ({"type": "words"}, "not a valid JSON Schema.*words"),
    ({"properties": {"a": {"required": True}}}, "not a valid JSON Schema.*required"),
    ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "allows no answer"),
    (False, "allows no answer"),
    (3, "must be a JSON Schema"),
)


def spec(schema: Any) -> JsonSchema:
    """Returns the specification of a schema as a response format."""
    return JsonSchema(schema=schema, param=PARAM)


def allowed(mask: torch.Tensor) -> list[int]:
    """Returns the tokens of a mask, in order."""
    return ((mask.unsqueeze(1) >> _BITS) & 1).flatten().nonzero().squeeze(1).tolist()


def accepts(grammar: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether the grammar takes `text` as a whole, token by token under its masks."""
    state, tokens = grammar.begin(), tokenizer.encode(text)
    if len(state.masks(tokens).allowed) < len(tokens):
        return False
    for token in tokens:
        state.accept(token)
    return state.may_end


def written(instance: Any) -> str:
    """Returns the instance as a model is to write it."""
    return json.dumps(instance, ensure_ascii=False)


class Walker:
    """Draws tokens at random from masks, those of JSON's structure more often, so that most walks come to an end."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._random = random.Random(seed)
        self._structure = _structure(tokenizer)
        self._eos = tokenizer.eos_ids

    def choose(self, mask: torch.Tensor) -> int:
        """Returns one of the allowed tokens; the end, where it is allowed, half the time."""
        words: list[int] = mask.tolist()
        ends = [t for t in self._eos if words[t // 32] >> (t % 32) & 1]
        if ends and self._random.random() < 0.5:
            return ends[0]
        structure: list[int] = (mask & self._structure).tolist()
        return self._drawn(structure if any(structure) and self._random.random() < 0.7 else words)

    def walk(self, state: GrammarState, cap: int) -> Iterator[int]:
        """Yields tokens, which the state has then accepted, up to `cap` or before the end of the answer."""
        for _ in range(cap):
            token = self.choose(state.mask())
            if token in self._eos:
                return
            state.accept(token)
            yield token

    def _drawn(self, words: list[int]) -> int:
        """Returns a token of a random word of a mask that allows one."""
        at = self._random.choice([i for i, word in enumerate(words) if word])
        return at * 32 + self._random.choice([bit for bit in range(32) if words[at] >> bit & 1])


@functools.cache
def _structure(tokenizer: Tokenizer) -> torch.Tensor:
    """Returns the mask of tokens that JSON's structure and numbers are made of."""
    words = torch.zeros((tokenizer.vocab_size + 31) // 32 * 32, dtype=torch.int64)
    for token in range(tokenizer.vocab_size):
        if tokenizer.token_bytes(token) and set(tokenizer.token_bytes(token)) <= _STRUCTURE:
            words[token] = 1
    return (words.view(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)


def text_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Returns the text of tokens."""
    return b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
