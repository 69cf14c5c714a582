"""Why a prompt leaves an earlier one: the decision alone, on prompts of the tiny model's template."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from magnitude_engine import api
from magnitude_engine.explain.cause import Told
from magnitude_engine.explain.finding import Finding, find, find_beside, told
from magnitude_engine.explain.overlap import GRAM, common, count, pack, repeated, unpack
from magnitude_engine.explain.volatile import Change, volatile
from magnitude_engine.model.loader import LoadedModel
from testkit.traces import Trace, own_traces, public_traces_or_skip, turns

RULES = "You are a careful assistant. Look before you change anything, and say what you found. " * 3
TASK = "Find out why the tests of the parser fail."
LISTING = "".join(f"-rw-r--r-- 1 dev dev {n * 37:5} src/module_{n}.py\n" for n in range(12))


def tool(name: str, **properties: Any) -> api.Tool:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return api.Tool(name=name, description=f"Does what {name} says, and returns what came of it.", parameters=schema)


TOOLS = (tool("list_files", folder={"type": "string"}), tool("run_tests", path={"type": "string"}))
CALL = api.ToolCall(id="call_1", name="list_files", arguments='{"folder": "src", "deep": true}')
CHAT = api.ChatInput(
    messages=(
        api.Message(role="system", content=RULES),
        api.Message(role="user", content=TASK),
        api.Message(role="assistant", content="I look at the files.", tool_calls=(CALL,)),
        api.Message(role="tool", content=LISTING, tool_call_id="call_1"),
        api.Message(role="assistant", content="There are twelve modules; the parser is the third."),
        api.Message(role="user", content="Go on, then, and run its tests."),
    ),
    tools=TOOLS,
)


@dataclass
class Encoder:
    model: LoadedModel

    def prompt(self, source: api.Input) -> Told:
        return told(source, pack(self.model.prompts.encode(source)))

    def read(self, ids: bytes, start: int, stop: int) -> str:
        tokenizer = self.model.tokenizer
        texts = [tokenizer.token_bytes(i) or tokenizer.token_text(i).encode() for i in unpack(ids, start, stop)]
        return b"".join(texts).decode(errors="replace")

    def find(self, before: api.Input | Told, now: api.Input, cached: int | None = None) -> Finding | None:
        """Compares two prompts; by default everything up to their first difference was cached."""
        old = before if isinstance(before, Told) else self.prompt(before)
        new = self.prompt(now)
        at = common(old.ids, new.ids)
        return find(old, new, min(at, new.prompt - 1) if cached is None else cached, self.read)

    def cause(self, before: api.Input | Told, now: api.Input) -> str | None:
        found = self.find(before, now)
        return None if found is None else found.cause.name


@pytest.fixture
def encoder(model: LoadedModel) -> Encoder:
    return Encoder(model)


def changed(index: int, chat: api.ChatInput = CHAT, **fields: Any) -> api.ChatInput:
    messages = list(chat.messages)
    messages[index] = replace(messages[index], **fields)
    return replace(chat, messages=tuple(messages))


def more(chat: api.ChatInput, *texts: str) -> api.ChatInput:
    added = tuple(api.Message(role=r, content=t) for r, t in zip(("assistant", "user") * 9, texts, strict=False))
    return replace(chat, messages=chat.messages + added)


def with_system(text: str) -> api.ChatInput:
    return changed(0, content=f"{text}\n{RULES}")


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("Now: 2026-12-01T03:37:15Z.", "Now: 2026-12-01T03:37:16Z."),
        ("Now: 2026-12-01 03:37:15.120+01:00", "Now: 2026-12-01 04:01:02.9+01:00"),
        ("Today's date is 2026-12-01.", "Today's date is 2026-12-02."),
        ("Date: Tue, 01 Dec 2026 03:37:15 GMT", "Date: Tue, 01 Dec 2026 03:38:00 GMT"),
        ("It is Tue Dec  1 03:37:15 UTC 2026", "It is Wed Dec  2 03:37:15 UTC 2026"),
        ("Today is Tuesday, December 1, 2026.", "Today is Wednesday, December 2, 2026."),
        ("Today is 1 December 2026.", "Today is 30 November 2026."),
        ("The time is 3:37 PM.", "The time is 3:38 PM."),
        ("The time is 9:59 AM.", "The time is 10:00 AM."),
        ("Heute ist der 01.12.2026", "Heute ist der 02.12.2026"),
        ("Date: 12/01/2026", "Date: 12/02/2026"),
        ("started_at=1796096235", "started_at=1796096239"),
        ('{"ts": 1796096235123}', '{"ts": 1796096240001}'),
        ("run 20261201T033715Z", "run 20261201T033801Z"),
    ],
)
def test_a_time_in_the_system_prompt_is_seen_in_any_form(encoder: Encoder, before: str, now: str) -> None:
    found = encoder.find(with_system(before), more(with_system(now), "Done.", "Thanks."))
    assert found is not None
    assert found.cause == ("timestamp", 0)
    # All that stands behind the time was computed again, to the token.
    old, new = encoder.prompt(with_system(before)), encoder.prompt(with_system(now))
    pairs = zip(reversed(unpack(old.ids, 0, old.prompt)), reversed(unpack(new.ids, 0, new.prompt)), strict=False)
    same = next(n for n, (one, other) in enumerate(pairs) if one != other)
    # "Tuesday, December 1" and "Wednesday, December 2" have a stretch in common themselves.
    assert found.wasted - same in (0, 15)
    assert same > 1000


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("Session 0d6f1c1e-7a4f-4a0e-9b43-1f1f0a7f4c11.", "Session 5b1d9a7e-0c57-4b8e-8f6d-2a9c1f0e7d22."),
        ("Request id: req_8fK2mQ9xZ1", "Request id: req_2hT7pW4cY8"),
        ("Trace 4bf92f3577b34da6a3ce929d0e0e4736", "Trace 00f067aa0ba902b7d3ce929d0e0e4736"),
        ("Budget: 41233 tokens are left.", "Budget: 39870 tokens are left."),
        ("nonce=83920175620", "nonce=11736209875"),
    ],
)
def test_a_value_that_changes_at_every_step_is_a_nonce(encoder: Encoder, before: str, now: str) -> None:
    assert encoder.cause(with_system(before), more(with_system(now), "Done.", "Thanks.")) == "nonce"


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ("the version is 1.2.34", "the version is 1.2.35", None),
        ("see module_number_12 for it", "see module_number_13 for it", None),
        ("ask getUserNameById first", "ask getUserMailById first", None),
        ("it is 3 o'clock", "it is 4 o'clock", None),
        ("on May Day", "on Mayor Street", None),
        ("at 12:30 we met", "and 12:30 we met", None),
    ],
)
def test_other_words_are_neither_times_nor_nonces(before: str, now: str, expected: str | None) -> None:
    at = next(i for i, (one, other) in enumerate(zip(before, now, strict=False)) if one != other)
    assert volatile(Change(before, now, at)) == expected


LONG_AGO = api.Message(role="user", content="Summary of the work so far: the parser's tests fail in module 3.")
REORDERED = '{ "deep":true, "folder":"src" }'
OTHER_KEYS = {"required": ["folder"], "type": "object", "properties": {"folder": {"type": "string"}}}
CAUSES: dict[str, tuple[api.ChatInput, str | None]] = {
    "goes on": (more(CHAT, "Done.", "Thanks."), None),
    "asks again": (CHAT, None),
    "asks an earlier question again": (replace(CHAT, messages=CHAT.messages[:4]), None),
    "tools in another order": (replace(CHAT, tools=TOOLS[::-1]), "tool_order"),
    "keys in another order": (replace(CHAT, tools=(replace(TOOLS[0], parameters=OTHER_KEYS), TOOLS[1])), "tool_order"),
    "one tool more": (replace(CHAT, tools=(*TOOLS, tool("read_file"))), "tool_change"),
    "one tool described anew": (
        replace(CHAT, tools=(replace(TOOLS[0], description="Lists."), TOOLS[1])),
        "tool_change",
    ),
    "no tools": (replace(CHAT, tools=()), "tool_change"),
    "tools and a time": (replace(with_system("It is 03:37:15."), tools=TOOLS[::-1]), "system_change"),
    "a rule more": (changed(0, content=RULES + "Never push."), "system_change"),
    "another system prompt": (changed(0, api.ChatInput(messages=CHAT.messages[:2]), content="Name it."), "unseen"),
    "another task": (api.ChatInput(messages=(CHAT.messages[0], LONG_AGO), tools=TOOLS), "compaction"),
    "a task of its own": (changed(1, replace(CHAT, messages=CHAT.messages[:2]), content="Bake bread."), "unseen"),
    "summarised": (replace(CHAT, messages=(*CHAT.messages[:2], LONG_AGO, *CHAT.messages[4:])), "compaction"),
    "the oldest dropped": (replace(CHAT, messages=(*CHAT.messages[:2], *CHAT.messages[4:])), "compaction"),
    "a result cleared": (changed(3, content="[old result cleared]"), "compaction"),
    "a result corrected": (changed(3, content=LISTING.replace("module_2", "parser")), "edited_history"),
    "another last question": (changed(5, content="No, stop."), "edited_history"),
    "an earlier question, asked otherwise": (
        changed(4, replace(CHAT, messages=CHAT.messages[:5]), content="There are some."),
        "edited_history",
    ),
    "arguments written again": (changed(2, tool_calls=(replace(CALL, arguments=REORDERED),)), "reserialised"),
    "white space": (changed(4, content=CHAT.messages[4].content + "\n"), "reserialised"),
    "a last message that grew": (changed(5, content=CHAT.messages[5].content + "\nThought: done."), None),
}


@pytest.mark.parametrize("case", CAUSES)
def test_what_changed_is_the_cause(encoder: Encoder, case: str) -> None:
    now, expected = CAUSES[case]
    assert encoder.cause(CHAT, now) == expected


def test_an_answer_that_comes_back_in_another_form_is_reserialised_and_any_other_is_not_a_miss(
    encoder: Encoder,
) -> None:
    call = api.ToolCall(id="call_9", name="run_tests", arguments='{"path":"tests/test_parser.py","verbose":true}')
    answer = api.Message(role="assistant", content="", tool_calls=(call,))
    written = more(CHAT)
    written = replace(written, messages=(*CHAT.messages, answer))
    before = encoder.prompt(CHAT)
    whole = encoder.prompt(written)
    start = common(before.ids, whole.ids)
    assert start == before.prompt
    before = before._replace(ids=whole.ids, answer=answer)

    def cause(message: api.Message) -> str | None:
        result = api.Message(role="tool", content="1 failed", tool_call_id="call_9")
        return encoder.cause(before, replace(CHAT, messages=(*CHAT.messages, message, result)))

    other = replace(call, arguments='{"path": "tests/test_parser.py", "verbose": true}')
    assert cause(answer) is None
    assert cause(replace(answer, tool_calls=(other,))) == "reserialised"
    assert cause(replace(answer, tool_calls=(replace(call, id="call_0"),))) is None
    assert cause(replace(answer, tool_calls=(replace(call, arguments='{"path":"tests"}'),))) is None
    assert cause(api.Message(role="assistant", content="I would rather not.")) is None


def test_the_same_conversation_in_another_template_is_a_template(encoder: Encoder) -> None:
    """A client that renders its prompts itself, and one whose server's template takes back what it showed."""
    raw = api.TextInput(text=f"### System\n{RULES}\n### User\n{TASK}\n{LISTING}")
    assert encoder.cause(CHAT, raw) == "template"
    before, now = encoder.prompt(CHAT), encoder.prompt(more(CHAT, "Done.", "Thanks."))
    thought = pack(encoder.model.tokenizer.encode("<think>Hm. Let me see what there is.</think>"))
    shown = before._replace(
        ids=before.ids[:1200] + thought + before.ids[1200:], prompt=before.prompt + len(thought) // 4
    )
    found = find(shown, now, 300, encoder.read)
    assert found is not None
    assert (found.cause.name, found.at, found.wasted) == ("template", 300, before.prompt - 300)


def test_pages_that_are_gone_are_an_eviction_unless_more_was_lost_otherwise(encoder: Encoder) -> None:
    now = more(CHAT, "Done.", "Thanks.")
    size = encoder.prompt(CHAT).prompt
    # A page is what a resume may have to compute again.
    assert encoder.find(CHAT, now, cached=size - 15) is None
    found = encoder.find(CHAT, now, cached=size - 160)
    assert found is not None
    assert (found.cause.name, found.at, found.wasted, found.evicted) == ("eviction", size - 160, 160, 160)
    late = encoder.find(CHAT, changed(5, now, content="No, stop."), cached=64)
    assert late is not None
    assert (late.cause.name, late.at) == ("eviction", 64)
    assert late.wasted > late.evicted > 0
    early = encoder.find(with_system("It is 03:37 by the clock."), with_system("It is 03:38 by the clock."), cached=0)
    assert early is not None
    assert (early.cause.name, early.evicted > 0) == ("timestamp", True)
    assert early.wasted > early.evicted


def test_what_another_session_has_computed_meanwhile_is_not_lost(encoder: Encoder) -> None:
    before, now = with_system("At 03:37."), with_system("At 03:38.")
    assert encoder.find(before, now, cached=encoder.prompt(now).prompt - 1) is None


def test_a_new_session_blames_only_what_sessions_of_one_agent_share(encoder: Encoder) -> None:
    def beside(before: api.ChatInput, now: api.ChatInput) -> str | None:
        old, new = encoder.prompt(before), encoder.prompt(now)
        found = find_beside(old, new, min(common(old.ids, new.ids), new.prompt - 1), encoder.read)
        return None if found is None else found.cause.name

    first = replace(CHAT, messages=(CHAT.messages[0], api.Message(role="user", content="Bake bread.")))
    assert beside(CHAT, first) == "unseen"
    timed = with_system("At 03:37.")
    other = replace(timed, messages=(with_system("At 03:38.").messages[0], first.messages[1]))
    assert beside(timed, other) == "timestamp"
    assert beside(CHAT, replace(first, tools=TOOLS[::-1])) == "tool_order"
    # A session whose id changes with every call says the same as one that keeps it.
    assert beside(CHAT, more(CHAT, "Done.", "Thanks.")) is None
    assert beside(CHAT, CAUSES["the oldest dropped"][0]) == "compaction"


@pytest.mark.thorough
@pytest.mark.parametrize("read", [own_traces, pytest.param(public_traces_or_skip, marks=pytest.mark.slow)])
def test_recorded_agents_that_only_go_on_miss_nothing(encoder: Encoder, read: Callable[[], list[Trace]]) -> None:
    """Each step of each trace goes on from the one before, whatever was answered meanwhile."""
    steps = 0
    for trace in read():
        before: Told | None = None
        for turn in turns(trace, encoder.model):
            now = told(turn.chat, pack(turn.prompt))
            if before is not None:
                assert find(before, now, min(common(before.ids, now.ids), now.prompt - 1), encoder.read) is None
                steps += 1
            said = api.Message(role="assistant", content="What the model says.")
            before = now._replace(ids=now.ids + pack(turn.answer), answer=said)
    assert steps > 50


@pytest.mark.thorough
def test_repeated_stretches_are_counted_to_the_token() -> None:
    draw = random.Random(7)
    for _ in range(200):
        kept = [[draw.randrange(900) for _ in range(draw.randrange(2 * GRAM, 90))] for _ in range(4)]

        def noise() -> list[int]:
            return [1000 + draw.randrange(10**6) for _ in range(draw.randrange(1, 40))]

        head = [draw.randrange(900) for _ in range(20)]
        before = pack([*head, *noise(), *kept[0], *noise(), *kept[1], *noise(), *kept[2], *kept[3]])
        now = pack([*head, *noise(), *kept[0], *noise(), *kept[1], *noise(), *kept[3], *noise()])
        at = common(before, now)
        assert at == 20
        size = sum(map(len, (kept[0], kept[1], kept[3])))
        assert repeated(before, now, at, at) == size
        assert repeated(before, now, at, count(now)) == 0
