"""Tool calls in text: what is a call, what stays text, and that cuts change nothing."""

from __future__ import annotations

import itertools
import json
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine import api
from magnitude_engine.decode.tools import ToolCallParser, ToolFormat

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
TOOLS = (api.Tool(name="search"), api.Tool(name="add"))
SEARCH = '<tool_call>{"name": "search", "arguments": {"query": "tea"}}</tool_call>'
ADD = '<tool_call>\n{"arguments": { "a": 1,"b":[2, {}] }, "name": "add"}\n</tool_call>'


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]], list[tuple[str, tuple[api.ToolCallDelta, ...]]]]:
    """All plain text, all calls as (name, arguments), and what each piece gave."""
    parser = ToolCallParser(HERMES, TOOLS, lambda index: f"call_{index}")
    steps = [*(parser.push(p) for p in pieces), parser.finish()]
    deltas = [delta for _, calls in steps for delta in calls]
    assert [(d.index, d.id) for d in deltas] == [(i, f"call_{i}") for i in range(len(deltas))]
    assert parser.called == bool(deltas)
    return "".join(text for text, _ in steps), [(d.name or "", d.arguments) for d in deltas], steps


@pytest.mark.parametrize(
    ("text", "plain", "calls"),
    [
        (SEARCH, "", [("search", '{"query": "tea"}')]),
        (ADD, "", [("add", '{ "a": 1,"b":[2, {}] }')]),
        (f"Let me see. {SEARCH}", "Let me see. ", [("search", '{"query": "tea"}')]),
        (f"{SEARCH}\n{ADD}\n", "", [("search", '{"query": "tea"}'), ("add", '{ "a": 1,"b":[2, {}] }')]),
        (f"{SEARCH}\nand {ADD}", "\nand ", [("search", '{"query": "tea"}'), ("add", '{ "a": 1,"b":[2, {}] }')]),
        (f"a\n{SEARCH}", "a\n", [("search", '{"query": "tea"}')]),
        (SEARCH.removesuffix("</tool_call>"), "", [("search", '{"query": "tea"}')]),
        (SEARCH.removesuffix("ol_call>"), "", [("search", '{"query": "tea"}')]),
        (f"<tool_call><tool_call>{SEARCH}", "<tool_call><tool_call>", [("search", '{"query": "tea"}')]),
        (f'<tool_call>{{"name": {SEARCH}', '<tool_call>{"name": ', [("search", '{"query": "tea"}')]),
        (
            '<tool_call>{"name":"search","arguments":{"query":"</tool_call> \\" <tool_call>"}}</tool_call>',
            "",
            [("search", '{"query":"</tool_call> \\" <tool_call>"}')],
        ),
        (
            '<tool_call>{"name":"search","arguments":{"q":"é \\ud83d\\ude00 😀"},"id":7}</tool_call>x',
            "x",
            [("search", '{"q":"é \\ud83d\\ude00 😀"}')],
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": [-2E+999, %s]}}</tool_call>' % ("9" * 5000),
            "",
            [("add", '{"a": [-2E+999, %s]}' % ("9" * 5000))],
        ),
    ],
)
def test_calls(text: str, plain: str, calls: list[tuple[str, str]]) -> None:
    assert read([text])[:2] == (plain, calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "a < b <tool",
        "<tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>search(tea)</tool_call>",
        '<tool_call>{"name": "search"}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "search", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {}} extra</tool_call>',
        '<tool_call>[{"name": "search", "arguments": {}}]</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"a": 1,}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"a": nul}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"a": "\n"}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"a": "\\x"}}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"a": 1]}</tool_call>',
        '<tool_call>{"name": "search", "arguments": {"query": "te',
        '<tool_call>{"name": "search", "arguments": {"query": "tea"}',
        "</tool_call>",
        '<tool_call>{"name": "search", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001 + "</tool_call>",
    ],
)
def test_what_is_no_call_stays_as_it_was(text: str) -> None:
    assert read([text])[:2] == (text, [])


@pytest.mark.parametrize("text", [f"Now {SEARCH}\n{ADD} <tool_call>{{no}}</tool_call> <tool_ca", SEARCH + ADD[:-3]])
def test_every_cut_gives_the_same(text: str) -> None:
    expected = read([text])[:2]
    assert read(list(text))[:2] == expected
    for place in range(len(text) + 1):
        assert read([text[:place], text[place:]])[:2] == expected


PARTS = (SEARCH, ADD, "<tool_call>", "</tool_call>", "<tool", "{", "}", '"', "\\", " ", "\n", "x", "😀")
fragments = st.sampled_from([*PARTS, '{"name": "add", ', '"arguments": {}}'])


@pytest.mark.thorough
@settings(deadline=None, max_examples=80)
@given(st.lists(fragments, max_size=8).map("".join), st.data())
def test_any_cut_of_any_text_gives_the_same(text: str, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    whole, cut = read([text]), read(pieces)
    assert cut[:2] == whole[:2]
    if not whole[1]:
        assert whole[0] == text


strings = st.text(st.characters(codec="utf-8"), max_size=20)
numbers = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(strings, values, max_size=3),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_any_object_can_be_an_argument(arguments: dict[str, object], escape: bool, indent: int | None) -> None:
    written = json.dumps(arguments, ensure_ascii=escape, indent=indent)
    text = f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>'
    assert read([text])[:2] == ("", [("add", written)])


def test_plain_text_is_not_delayed() -> None:
    steps = read(["I will ", "search <", "b> <tool", "_call", ">no", " way"])[2]
    assert [text for text, _ in steps] == ["I will ", "search ", "<b> ", "", "<tool_call>no", " way", ""]


def test_a_call_is_given_with_the_piece_that_completes_it() -> None:
    steps = read([SEARCH[:-1], ">", " done"])[2]
    assert [len(calls) for _, calls in steps] == [0, 1, 0, 0]
    assert msgspec.to_builtins(steps[1][1][0]) == {
        "index": 0,
        "id": "call_0",
        "name": "search",
        "arguments": '{"query": "tea"}',
    }
    assert steps[2][0] == " done"


STREAMED = '<tool_call>\n{"name": "search", "arguments": {"query": "}\\" {tea }", "n": [1, {}]}}\n</tool_call>'
EMPTY = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


class Shown(NamedTuple):
    """What a client puts together from the pieces of calls."""

    text: str
    calls: list[tuple[str, str]]
    deltas: list[api.ToolCallDelta]
    called: bool


def stream(pieces: list[str], *open_tools: str) -> Shown:
    parser = ToolCallParser(HERMES, TOOLS, lambda index: f"call_{index}", frozenset(open_tools))
    steps = [*(parser.push(p) for p in pieces), parser.finish()]
    deltas = [delta for _, calls in steps for delta in calls]
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        # Id and name come once, with the first piece.
        assert (delta.id is None) == (delta.index in calls) == (delta.name is None)
        assert delta.id in (None, f"call_{delta.index}")
        name, arguments = calls.get(delta.index, (delta.name or "", ""))
        calls[delta.index] = (name, arguments + delta.arguments)
    assert list(calls) == list(range(len(calls)))
    return Shown("".join(text for text, _ in steps), list(calls.values()), deltas, parser.called)


@pytest.mark.thorough
@settings(deadline=None, max_examples=80)
@given(st.lists(st.sampled_from([STREAMED, EMPTY]), max_size=3), st.sampled_from(["", "Well, "]), st.data())
def test_calls_in_pieces_are_the_same_at_any_cut(blocks: list[str], lead: str, data: st.DataObject) -> None:
    text = lead + "\n".join(blocks)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]
    plain, calls, _ = read([text])
    for open_tools in (("search", "add"), ("add",), ()):
        shown = stream(pieces, *open_tools)
        assert (shown.text, shown.calls, shown.called) == (plain, calls, bool(blocks))


def test_every_character_of_an_open_call_is_shown_at_once() -> None:
    shown = stream(list(STREAMED + "\n" + EMPTY), "search")
    first = [delta.arguments for delta in shown.deltas if delta.index == 0]
    assert first[0] == ""
    assert max(map(len, first)) <= 2
    # The other tool's calls come as a whole.
    assert [delta.arguments for delta in shown.deltas if delta.index == 1] == ["{}"]


@pytest.mark.parametrize("length", range(len(STREAMED)))
def test_an_open_call_that_is_cut_off_is_no_call_and_no_text(length: int) -> None:
    shown = stream([STREAMED[:length]], "search")
    arguments = STREAMED.partition('"arguments": ')[2].removesuffix("}\n</tool_call>")
    complete = length > STREAMED.index("\n</tool_call>") - 1
    assert shown.called == complete
    if shown.calls:
        assert shown.text == ""
        assert arguments.startswith(shown.calls[0][1])
    else:
        assert shown.text == STREAMED[:length]
