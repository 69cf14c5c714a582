"""The sessions that the package carries, and the requests that are made of them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnitude_engine.api import ChatInput
from magnitude_engine.errors import ConfigError
from magnitude_engine.model.template import ChatTemplate
from magnitude_proxy.bench import recorded
from magnitude_proxy.bench.replay import chat
from testkit.tiny import CHATML

OWN = [trace for path in recorded.trace_files([]) for trace in recorded.read_traces(path)]


def test_the_package_carries_sessions_of_different_kinds() -> None:
    assert len({trace.trace_id for trace in OWN}) == len(OWN) >= 10
    assert len({trace.group for trace in OWN}) >= 10
    assert all(recorded.steps(trace, as_text=True) for trace in OWN)
    called = {call.function.name for trace in OWN for message in trace.messages for call in message.tool_calls or ()}
    assert len(called) > 10


def test_a_step_asks_the_same_as_text_and_with_tools() -> None:
    """The product renders OpenAI's fields to the very text that every peer is sent."""
    template = ChatTemplate(CHATML, {}, datetime.now)

    def rendered(question: ChatInput) -> str:
        return template.render(question.messages, question.tools)

    for trace in OWN:
        for plain, native in zip(recorded.steps(trace, True), recorded.steps(trace, False), strict=True):
            assert not plain.tools
            assert plain.offered == native.offered == trace.tools
            assert {message.role for message in plain.messages} <= {"system", "user", "assistant"}
            assert rendered(chat(plain)) == rendered(chat(native))


def test_what_is_sent_is_what_was_recorded() -> None:
    record: dict[str, Any] = {
        "trace_id": "t",
        "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Where"}, {"type": "text", "text": "is it?"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "there"},
            {"role": "assistant", "content": "There."},
        ],
        "ignored": True,
    }
    trace = msgspec.convert(record, recorded.Trace)
    first, second = recorded.steps(trace, as_text=False)
    assert first.answer == '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'
    assert (second.number, second.answer) == (1, "There.")
    sent = msgspec.json.decode(msgspec.json.encode(second.messages))
    assert sent[1]["tool_calls"] == record["messages"][1]["tool_calls"]
    assert sent[2] == record["messages"][2]
    assert msgspec.json.decode(msgspec.json.encode(second.tools)) == record["tools"]
    assert recorded.steps(trace, as_text=True)[0].messages[1].text == "Where\nis it?"


def test_a_line_that_is_no_trace_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"trace_id": "a", "messages": []}\n\n{"messages": 1}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl, line 3: .*messages"):
        list(recorded.read_traces(path))
    with pytest.raises(ConfigError, match="neither a JSONL file nor a folder"):
        recorded.trace_files([tmp_path / "absent"])
