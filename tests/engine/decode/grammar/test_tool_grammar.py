"""Tool calls: what each mode allows, that token boundaries do not matter, and that a call replays as it was."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_engine.decode.grammar.compiler import CompilerLimits, GrammarCompiler
from magnitude_engine.decode.grammar.spec import CallMode, ToolCalls
from magnitude_engine.decode.grammar.validate import Invalid, Valid, Validator
from magnitude_engine.decode.tools import ToolCallParser
from magnitude_engine.errors import RequestError
from magnitude_engine.model.template import HERMES, ChatTemplate
from magnitude_engine.model.tokenizer import Tokenizer
from testkit.grammar import Walker, accepts, allowed, text_of
from testkit.tiny import CHATML

SEARCH = api.Tool(
    name="search",
    parameters={
        "type": "object",
        "properties": {"query": {"$ref": "#/$defs/text"}, "limit": {"type": "integer"}},
        "required": ["query"],
        "additionalProperties": False,
        "$defs": {"text": {"type": "string", "maxLength": 8}},
    },
)
NOW = api.Tool(name='now "é😀"')
TOOLS = (SEARCH, NOW)
S = '<tool_call>\n{"name": "search", "arguments": {"query": "tea"}}\n</tool_call>'
N = '<tool_call>\n{"name": "now \\"é😀\\"", "arguments": {}}\n</tool_call>'


def calls(mode: CallMode, *, parallel: bool = True, name: str | None = None, tools: Any = TOOLS) -> ToolCalls:
    """Returns a specification in the Hermes form."""
    return ToolCalls(tools=tools, format=HERMES, mode=mode, parallel=parallel, name=name)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (
            calls("auto"),
            ["", "Hi <b>\nyou", S, f"Let me see.\n{S}", f"{S}\n{N}", f"a{S}b{N}c\n", "<tool_cal", "é\x00"],
            ["<tool_call>", f"{S[:-1]}", S.replace("search", "other"), S.replace("query", "q"), S.replace("\n", " ")],
        ),
        (calls("auto", parallel=False), ["", "Hi", S, f"a {N}"], [f"{S}\n", f"{S}\n{N}", f"{S} done", "<tool_call>x"]),
        (calls("required"), [S, N, f"{S}\n{N}\n{S}"], ["", "Hi", f" {S}", f"{S}{N}", f"{S}\n", f"{S}\nHi"]),
        (calls("required", parallel=False), [S, N], ["", f"{S}\n{N}"]),
        (calls("named", name="search"), [S], ["", N, f"{S}\n{S}"]),
    ],
    ids=["auto", "auto, one", "required", "required, one", "named"],
)
def test_modes(
    spec: ToolCalls, good: list[str], bad: list[str], compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(spec)
    assert grammar.check is None
    assert [text for text in good if not accepts(grammar, tokenizer, text)] == []
    assert [text for text in bad if accepts(grammar, tokenizer, text)] == []


def test_token_boundaries_across_the_marker_do_not_matter(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(calls("auto"))
    text = "I use the tool <tool_call>"
    for seed in range(20):
        draw, state, at = random.Random(seed), grammar.begin(), 0
        while at < len(text):
            end = draw.randint(at + 1, len(text))
            for token in tokenizer.encode(text[at:end]):
                state.accept(token)
            at = end
        assert text_of(tokenizer, state.forced()) == '\n{"name": "'
        assert not state.may_end


def test_a_call_is_forced_as_the_template_writes_it(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(CHATML, {}, lambda: datetime(2026, 11, 30, tzinfo=UTC))
    call = api.ToolCall(id="c", name=NOW.name, arguments="{}")
    shown = template.render([api.Message(role="assistant", tool_calls=(call, call))], ())
    state = compiler.compile(calls("named", name=NOW.name)).begin()
    written = text_of(tokenizer, state.forced())
    assert f"{written}\n{written}<|im_end|>" in shown
    for token in state.forced():
        state.accept(token)
    assert state.ended


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_what_is_drawn_parses_as_valid_calls(mode: CallMode, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(calls(mode))
    finished = 0
    for seed in range(6):
        state, walker = grammar.begin(), Walker(tokenizer, seed)
        output = tokenizer.encode("Hi <tool_call>") if mode == "auto" else []
        for token in output:
            state.accept(token)
        output += walker.walk(state, 400)
        if not state.may_end:
            continue
        finished += 1
        parser = ToolCallParser(HERMES, TOOLS, str)
        found = [*parser.push(text_of(tokenizer, output))[1], *parser.finish()[1]]
        assert found
        for call in found:
            arguments = json.loads(call.arguments)
            assert call.name in (SEARCH.name, NOW.name)
            assert set(arguments) <= ({"query", "limit"} if call.name == SEARCH.name else set())
    assert finished


A = {"a": {"type": "boolean"}}


@pytest.mark.parametrize(
    ("parameters", "open_"),
    [
        ({"properties": A}, False),
        ({"type": "object", "properties": A, "required": ["a"]}, False),
        ({"type": "object", "properties": A, "additionalProperties": True}, True),
        ({"type": "object", "properties": A, "additionalProperties": {"type": "integer"}}, True),
        ({"type": "object", "properties": A, "required": ["a", "b"]}, True),
        ({"type": "object", "properties": A, "patternProperties": {"^b$": {"type": "integer"}}}, True),
        ({"type": "object", "properties": A, "allOf": [{"properties": {"b": {"type": "integer"}}}]}, True),
        ({"type": "object"}, True),
    ],
)
def test_a_call_has_no_arguments_besides_those_that_are_named(
    parameters: dict[str, Any], open_: bool, compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Agents call a function of these parameters, which takes no others."""
    grammar = compiler.compile(calls("named", name="f", tools=(api.Tool(name="f", parameters=parameters),)))
    head, tail = '<tool_call>\n{"name": "f", "arguments": {"a": true', "}}\n</tool_call>"
    assert accepts(grammar, tokenizer, f"{head}{tail}") is not ("b" in parameters.get("required", ()))
    assert accepts(grammar, tokenizer, f'{head}, "b": 1{tail}') is open_


@pytest.mark.thorough
def test_each_tool_has_its_own_check(compiler: GrammarCompiler, validator: Validator) -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    grammar = compiler.compile(calls("auto", tools=(SEARCH, api.Tool(name="add", parameters=unique))))
    assert grammar.check is not None
    assert grammar.check.rule("search") is None
    rule = grammar.check.rule("add")
    assert rule is not None
    assert rule.keywords == ("uniqueItems at #/properties/a",)
    assert isinstance(validator.check(rule, '{"a": [1, 2]}'), Valid)
    refused = validator.check(rule, '{"a": [1, 1]}')
    assert isinstance(refused, Invalid)
    assert refused.path == "/a"


@pytest.mark.parametrize(
    ("spec", "param", "problem"),
    [
        (calls("required", tools=()), "tools", "empty"),
        (calls("named", name="other"), "tool_choice", "'other'"),
        (calls("auto", tools=(SEARCH, SEARCH)), "tools", "twice"),
        (
            calls("auto", tools=(SEARCH, api.Tool(name="b", parameters={"type": "array"}))),
            "tools[1].function.parameters",
            "arguments are an object",
        ),
        (
            calls("auto", tools=(SEARCH, NOW, api.Tool(name="b", parameters={"properties": {"a": {"$ref": "#/x"}}}))),
            "tools[2].function.parameters",
            r"\$ref|Pointer",
        ),
    ],
    ids=["none", "unknown", "twice", "no object", "reference"],
)
def test_errors_name_the_tool(spec: ToolCalls, param: str, problem: str, compiler: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=problem) as refused:
        compiler.compile(spec)
    assert refused.value.param == param


def test_all_schemas_together_are_bounded(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, limits=CompilerLimits(tools=3, together=10_000))
    long = api.Tool(name="long", parameters={"description": "x" * 9_990})
    with pytest.raises(RequestError, match="larger than"):
        compiler.compile(calls("auto", tools=(long, SEARCH)))
    with pytest.raises(RequestError, match="3 are allowed"):
        compiler.compile(calls("auto", tools=tuple(api.Tool(name=str(i)) for i in range(4))))
    compiler.close()


def test_special_tokens_are_no_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    mask = set(allowed(compiler.compile(calls("auto")).begin().mask()))
    assert tokenizer.special_ids - mask == tokenizer.special_ids - tokenizer.eos_ids
