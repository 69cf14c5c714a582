"""Pruning decisions on random histories: nothing is torn apart, nothing decided is taken back, no loss is made."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine import api
from magnitude_proxy.pruning.history import anchor, thoughts, together
from magnitude_proxy.pruning.plan import (
    KEEP,
    Cut,
    DeadStep,
    Idea,
    Pace,
    Wish,
    choose,
    propose,
    settle,
    shares,
    worth,
)
from magnitude_proxy.pruning.scene import Key as SessionKey
from magnitude_proxy.pruning.scene import Recent, Recents, Said, Scene, scene
from magnitude_proxy.store.pruned import Drop
from magnitude_proxy.wire.conversation import read_messages
from magnitude_proxy.wire.requests import ChatRequest, convert

pytestmark = pytest.mark.thorough

ALL = Wish(dead_ends=True, observations=True, thinking=True)
FOLLOWS = {("user", "assistant"), ("tool", "assistant"), ("assistant", "user")}
Messages = list[dict[str, Any]]

words = st.sampled_from(
    ["", "ls", "done", "<think>hm</think>", "<think>hm</think>\nok", "<think>open", "a<think>b</think>"]
)


@st.composite
def blocks(draw: st.DrawFn) -> Messages:
    """An answer and what follows it, now and then one that no agent should send; ids are often used twice."""
    kind = draw(st.sampled_from(["calls", "calls", "calls", "text", "text", "bare", "unanswered", "stray"]))
    message: dict[str, Any] = {"role": "assistant", "content": draw(words)}
    if draw(st.booleans()):
        message["reasoning_content"] = "aside"
    if kind in ("text", "bare"):
        follow = {"role": "user", "content": draw(st.sampled_from(["go on", "wrong", "Observation: 1"]))}
        return [message, follow] if kind == "text" else [message]
    ids = draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True))
    message["tool_calls"] = [
        {"id": i, "type": "function", "function": {"name": "f", "arguments": draw(st.sampled_from(["{}", '{"a":1}']))}}
        for i in ids
    ]
    results = [{"role": "tool", "tool_call_id": i, "content": draw(words)} for i in ids]
    if kind == "unanswered":
        results.pop()
    if kind == "stray":
        results.insert(len(results) - 1, {"role": "user", "content": "meanwhile"})
    return [message, *results]


@st.composite
def histories(draw: st.DrawFn) -> list[Messages]:
    """The opening of a session, then its blocks."""
    system = [{"role": "system", "content": "be careful"}] if draw(st.booleans()) else []
    return [[*system, {"role": "user", "content": "go"}], *draw(st.lists(blocks(), min_size=2, max_size=9))]


wishes = st.builds(Wish, st.booleans(), st.booleans(), st.booleans())


def seen(messages: Messages, wish: Wish = ALL) -> Scene:
    asked = convert({"messages": messages}, ChatRequest)
    return scene(api.ChatInput(messages=read_messages(asked.messages)), messages, wish)


def marked(view: Scene, places: set[int]) -> list[DeadStep]:
    """The answers at these places, as dead steps."""
    lines = view.lines
    found = [place for place in sorted(places) if place < len(lines) and lines[place].role == "assistant"]
    return [DeadStep(n, (lines[place].anchor,), place, "failed") for n, place in enumerate(found)]


def decided(view: Scene, ideas: list[Idea]) -> list[Drop]:
    return [
        Drop(
            kind=idea.kind,
            index=idea.start,
            count=idea.count,
            digest=together(view.lines[idea.start : idea.start + idea.count]),
            reason=idea.reason,
            branch="main",
            at_s=0.0,
            tokens=1,
        )
        for idea in ideas
    ]


def kept(view: Scene, cut: Cut) -> list[int]:
    return [index for index in range(len(view.lines)) if index not in cut.gone]


def check(view: Scene, cut: Cut) -> None:
    """What must hold of every pruned conversation."""
    messages, left = view.chat.messages, kept(view, cut)
    shown = view.shown(cut)
    assert [m.role for m in shown.messages] == [messages[i].role for i in left]
    assert read_messages(convert({"messages": list(shown.wire)}, ChatRequest).messages) == shown.messages
    first = next(i for i, m in enumerate(messages) if m.role == "user")
    assert shown.wire[: first + 1] == view.wire[: first + 1]
    assert shown.wire[-KEEP:] == view.wire[-KEEP:] or len(view.wire) <= KEEP + first
    for one, other in pairwise(left):
        assert other == one + 1 or (messages[one].role, messages[other].role) in FOLLOWS
    for index in cut.gone:
        # A result goes with the nearest call of its id, and a call with all of its results.
        if messages[index].role == "tool":
            owner = max(i for i in range(index) if messages[index].tool_call_id in view.lines[i].calls)
            assert owner in cut.gone
        for number, result in enumerate(messages[index + 1 :], index + 1):
            if result.role == "assistant":
                break
            assert result.tool_call_id not in view.lines[index].calls or number in cut.gone


@settings(max_examples=50, deadline=None)
@given(histories(), st.sets(st.integers(0, 40)), wishes)
def test_a_pruned_history_is_whole_ordered_and_stays_pruned(
    history: list[Messages], dead: set[int], wish: Wish
) -> None:
    drops: list[Drop] = []
    messages: Messages = []
    before: tuple[Any, ...] = ()
    for block in history:
        messages = [*messages, *block]
        view = seen(messages, wish)
        held = settle(view.lines, drops, wish)
        # Growing changes nothing of what was decided, nor of what was shown.
        assert held.drops == tuple(drops)
        assert view.shown(held).messages[: len(before)] == before
        ideas = propose(view.lines, drops, wish, marked(view, dead))
        drops += decided(view, ideas)
        cut = settle(view.lines, drops, wish)
        assert cut.drops == tuple(drops)
        check(view, cut)
        assert propose(view.lines, drops, wish, marked(view, dead)) == []
        assert wish.dead_ends or not cut.gone
        assert wish.thinking or not (cut.bare or cut.silent)
        before = view.shown(cut).messages


@settings(max_examples=50, deadline=None)
@given(histories(), st.sets(st.integers(0, 40)), st.data())
def test_any_part_of_a_decision_leaves_a_whole_history(
    history: list[Messages], dead: set[int], data: st.DataObject
) -> None:
    view = seen([message for block in history for message in block])
    drops = decided(view, propose(view.lines, [], ALL, marked(view, dead)))
    some = data.draw(st.lists(st.sampled_from(drops), unique_by=lambda d: (d.kind, d.index))) if drops else []
    other = data.draw(histories())
    for shown in (view, seen([message for block in other for message in block])):
        check(shown, settle(shown.lines, some, ALL))


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>a\nb</think>\n\nThe answer.", "The answer."),
        (" <think>a</think><think>b</think> c", "c"),
        ("<think>never closed", "<think>never closed"),
        ("Write <think>x</think> so.", "Write <think>x</think> so."),
        ("<think>a</think> <think>open", "<think>open"),
        ("<think></think>" * 50_000 + "end", "end"),
    ],
)
def test_only_finished_thinking_at_the_beginning_counts(text: str, left: str) -> None:
    assert text[thoughts(text) :] == left


def call(number: int) -> Messages:
    calls = [{"id": f"c{number}", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]
    return [
        {"role": "assistant", "content": f"<think>{'hm ' * 40}</think>look", "tool_calls": calls},
        {"role": "tool", "tool_call_id": f"c{number}", "content": "x" * 400},
    ]


SESSION = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "go"},
    *(m for n in range(6) for m in call(n)),
]


def test_the_place_from_which_most_is_won_is_chosen() -> None:
    view = seen(SESSION)
    ideas = propose(view.lines, [], ALL, marked(view, {4}))
    assert [(idea.kind, idea.start) for idea in ideas] == [
        ("thinking", 2), ("dead-end", 4), ("thinking", 6), ("thinking", 8)
    ]  # fmt: skip
    nothing_cached, cached = Pace(3, 0.0, 20), Pace(3, 1.0, 20)
    assert choose(ideas, view.lines, Cut(), nothing_cached) == ideas
    assert choose(ideas, view.lines, Cut(), cached) == []
    long_lived = Pace(50, 0.97, 60)
    assert choose(ideas, view.lines, Cut(), long_lived) == ideas
    # The first thinking is little, and far ahead of everything; while nobody waits it goes, too.
    some = Pace(6, 0.9, 20)
    assert choose(ideas, view.lines, Cut(), some) != ideas
    assert choose(ideas, view.lines, Cut(), some._replace(idle=True)) == ideas


@given(st.integers(0, 1000), st.floats(0, 1), st.floats(0, 1000), st.floats(0, 1e6), st.floats(1, 1e6), st.booleans())
def test_what_is_worth_it_saves_more_than_it_costs(
    steps: int, hit: float, output: float, saved: float, again: float, idle: bool
) -> None:
    pace = Pace(steps, hit, output, idle)
    won = worth(pace, saved, again)
    assert worth(pace._replace(idle=True), saved, again) >= won
    assert worth(pace, saved, again * 2) <= won
    assert worth(pace, 0.0, again) <= 0.0
    # Never more than all tokens saved in as many steps as are counted on.
    assert won <= saved * min(max(steps, 2), 50) * (1 + 1e-9)


@given(st.lists(st.floats(0, 1e5), max_size=9), st.integers(0, 10**6))
def test_shares_add_up_to_what_was_counted(tokens: list[float], total: int) -> None:
    ideas = [Idea("thinking", index, 1, each, "") for index, each in enumerate(tokens)]
    assert sum(shares(ideas, total)) == (total if ideas else 0)
    assert shares(ideas, None) == [round(each) for each in tokens]


def test_an_answer_is_recognised_when_it_comes_back() -> None:
    said = Said()
    for piece in ("<think>a</think>", " Hel", "lo "):
        said.see(api.Delta(request="r", epoch=0, text=piece))
    said.see(api.Delta(request="r", epoch=0, choice=1, text="other"))
    assert said.anchors == (anchor("Hello", ()), anchor("other", ()))
    said.see(
        api.Delta(request="r", epoch=0, tool_calls=(api.ToolCallDelta(index=0, id="c1", name="ls", arguments="{"),))
    )
    said.see(api.Delta(request="r", epoch=0, tool_calls=(api.ToolCallDelta(index=0, arguments="}"),)))
    assert said.anchors[0] == anchor("anything", ["c1"])
    assert said.answer.tool_calls == (api.ToolCall(id="c1", name="ls", arguments="{}"),)


async def test_resting_sessions_are_kept_within_bounds() -> None:
    recents = Recents(max_chars=100)
    view = seen([{"role": "user", "content": "x" * 40}])
    held = [Recent(SessionKey(f"s{number}", "main"), view, "salt") for number in range(4)]
    for recent in held:
        recents.put(recent)
    assert [recents.holds(recent) for recent in held] == [False, False, True, True]
    recents.take(held[2].key)
    assert recents.of("s2") == []
    assert recents.of("s3") == [held[3]]
