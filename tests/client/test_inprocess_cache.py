"""What an in-process engine keeps and computes ahead: registered tools, running tools' output, pages on disk."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from magnitude import AgentConfig, MagnitudeEngine
from magnitude_engine.client.answers import GenerateResult
from magnitude_engine.errors import EngineError, RequestError
from magnitude_engine.inprocess import Branch
from testkit.inprocess import Passes, settle, use_tiny_model, wait_until
from testkit.tiny import tiny_tokenizer

pytestmark = pytest.mark.thorough

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
IN_MEMORY = AgentConfig(enable_hierarchical_cache=False)
PAGE = 16
IM_END = 2
SYSTEM = "You are a careful assistant."
QUESTION = {"role": "user", "content": "Which files are in the folder src?"}
OUTPUT = "main.py\nwarm.py\npredict.py\nREADME.md\n" * 5
LONG = "Goal: a prompt that is long enough for some pages of the cache, on disk and elsewhere."


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture
def passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Passes:
    return use_tiny_model(tmp_path, monkeypatch)


@pytest.fixture
def engine(passes: Passes) -> Iterator[MagnitudeEngine]:
    # Scripts say one token a pass.
    with MagnitudeEngine(IN_MEMORY, kv_memory_mb=1, speculation=False) as made:
        yield made


def figure(result: GenerateResult, name: str = "cached_tokens") -> int:
    """Returns one of the engine's own figures."""
    figures: dict[str, int] = result["usage"]["magnitude"]
    return figures[name]


def fresh(asked: list[dict[str, Any]], **options: Any) -> GenerateResult:
    """Returns the answer of an engine that has nothing cached."""
    with MagnitudeEngine(AgentConfig(optimization_level="off"), kv_memory_mb=1) as engine:
        result: GenerateResult = engine.chat(asked, **options)
        return result


@pytest.mark.slow
def test_the_prompt_of_registered_tools_is_there_before_the_first_request(
    engine: MagnitudeEngine, passes: Passes
) -> None:
    asked = [{"role": "system", "content": SYSTEM}, QUESTION]
    engine.register_tools([tool("look")], system=SYSTEM)
    engine.register_tools([tool("look")], system=SYSTEM)
    assert engine._engine is None
    engine.warmup()
    known = engine.chat(asked, tools=[tool("look")], **GREEDY)
    prompt = known["usage"]["prompt_tokens"]
    tail = len(tiny_tokenizer().encode(f"<|im_start|>user\n{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n"))
    assert figure(known) >= prompt - tail - PAGE
    assert known["text"] == fresh(asked, tools=[tool("look")], **GREEDY)["text"]
    # The tools are no default: without them the prompt is another one.
    assert engine.chat(asked, **GREEDY)["usage"]["prompt_tokens"] < prompt - tail
    other = engine.chat(asked, tools=[tool("find")], **GREEDY)
    assert figure(other) < figure(known) - PAGE
    engine.register_tools([tool("read")])
    engine.warmup()
    done = len(passes.widths)
    engine.warmup()
    engine.register_tools([tool("read")])
    engine.warmup()
    assert len(passes.widths) == done
    assert figure(engine.chat([QUESTION], tools=[tool("read")], **GREEDY)) > 2 * PAGE


@pytest.mark.slow
def test_optimization_off_computes_nothing_ahead(passes: Passes) -> None:
    with MagnitudeEngine(AgentConfig(optimization_level="off"), kv_memory_mb=1) as engine:
        engine.register_tools([tool("look")])
        engine.warmup()
        assert len(passes.widths) == 1
        for _ in range(2):
            assert figure(engine.chat([QUESTION], session_id="s", tools=[tool("look")], **GREEDY)) == 0
        assert engine.inspect().pages_idle == 0


@pytest.mark.parametrize(
    ("wrong", "message", "param"),
    [
        ({"tools": 5}, "tools must be a list or None, not int", "tools"),
        ({"tools": None}, "tools are empty: give OpenAI tool definitions", "tools"),
        ({"tools": [5]}, r"tools\[0\] must be a mapping", "tools"),
        ({"tools": [{"type": "function"}]}, r"missing required field `function` - at `tools\[0\]`", "tools"),
        ({"tools": [tool("a"), {"function": {}}]}, r"field `name` - at `tools\[1\]\.function`", "tools"),
        ({"tools": [tool("a"), tool("a")]}, r"tools\[1\]\.function\.name 'a' is used twice", "tools"),
        ({"tools": [tool("")]}, r"tools\[0\]\.function\.name is empty", "tools"),
        ({"tools": [], "system": 5}, "system must be text, not int", "system"),
    ],
)
def test_wrong_tools_are_named_before_anything_is_loaded(
    engine: MagnitudeEngine, wrong: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        engine.register_tools(**wrong)
    assert caught.value.param == param
    assert engine._engine is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_warmup_shows_what_it_waits_for_and_ends_when_the_engine_is_closed(
    engine: MagnitudeEngine, passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    passes.gate.clear()
    engine.register_tools([tool("look")])
    with ThreadPoolExecutor(3) as threads:
        warming = threads.submit(engine.warmup)
        try:
            wait_until(lambda: "computing registered prompts 0/1" in terminal.getvalue())
            inspecting = threads.submit(engine.inspect)
            threads.submit(engine.close)
            with pytest.raises(EngineError, match="stopped before the registered tools"):
                warming.result(timeout=20)
            with pytest.raises(EngineError, match=r"stopped before it could be inspected|closed"):
                inspecting.result(timeout=20)
        finally:
            passes.gate.set()
    with pytest.raises(EngineError, match="closed"):
        engine.register_tools([tool("look")])


def call_tool(line: MagnitudeEngine | Branch, passes: Passes, **options: Any) -> dict[str, Any]:
    """Has the model call `look`; returns its message as the next request repeats it."""
    written = '<tool_call>\n{"name": "look", "arguments": {"path": "src"}}\n</tool_call>'
    passes.script.extend([*tiny_tokenizer().encode(written), IM_END])
    answer = line.chat([QUESTION], tools=[tool("look")], temperature=0.0, max_tokens=200, **options)
    assert answer["finish_reason"] == "tool_calls"
    return {"role": "assistant", "content": answer["text"], "tool_calls": answer["tool_calls"]}


@pytest.mark.slow
@pytest.mark.parametrize("on_branch", [False, True])
def test_a_running_tools_output_is_computed_as_it_comes(
    engine: MagnitudeEngine, passes: Passes, on_branch: bool
) -> None:
    line: Any = engine.branches("s").fork()[0] if on_branch else engine
    names = {} if on_branch else {"session_id": "s"}
    message = call_tool(line, passes, **names)
    call = message["tool_calls"][0]["id"]
    for at in range(0, len(OUTPUT), 80):
        line.tool_output(*names.values(), call, OUTPUT[at : at + 80])
    line.tool_output(*names.values(), call, "", finished=True)
    settle(engine)
    asked = [QUESTION, message, {"role": "tool", "content": OUTPUT, "tool_call_id": call}]
    result = line.chat(asked, tools=[tool("look")], **GREEDY, **names)
    assert figure(result) >= result["usage"]["prompt_tokens"] - PAGE
    assert result["text"] == fresh(asked, tools=[tool("look")], **GREEDY)["text"]
    with pytest.raises(RequestError, match="call_id"):
        line.tool_output(*names.values(), "", "text")
    with pytest.raises(RequestError, match="text must be text, not bytes"):
        line.tool_output(*names.values(), call, b"text")
    with pytest.raises(RequestError, match="finished must be True or False"):
        line.tool_output(*names.values(), call, "text", finished="yes")


@pytest.mark.slow
def test_output_for_the_session_reaches_the_branch_that_was_selected(engine: MagnitudeEngine, passes: Passes) -> None:
    branches = engine.branches("s")
    (branch,) = branches.fork()
    message = call_tool(branch, passes)
    branches.select(branch)
    call = message["tool_calls"][0]["id"]
    engine.tool_output("s", call, OUTPUT, finished=True)
    settle(engine)
    asked = [QUESTION, message, {"role": "tool", "content": OUTPUT, "tool_call_id": call}]
    result = engine.chat(asked, session_id="s", tools=[tool("look")], **GREEDY)
    assert figure(result) >= result["usage"]["prompt_tokens"] - PAGE


@pytest.mark.parametrize("level", ["balanced", "aggressive"])
def test_what_is_cached_outlives_the_process_on_disk(passes: Passes, tmp_path: Path, level: Any) -> None:
    results = []
    for _ in range(2):
        with MagnitudeEngine(AgentConfig(optimization_level=level), kv_memory_mb=1, kv_disk_mb=1) as engine:
            results.append(engine.generate(prompt=LONG, raw=True, **GREEDY))
            disk = [tier for tier in engine.inspect().tiers if tier.name == "disk"]
            assert [tier.limit_bytes for tier in disk] == [1024 * 1024]
    first, second = results
    assert second["text"] == first["text"]
    assert figure(first, "cached_disk_tokens") == 0
    assert figure(second, "cached_disk_tokens") == figure(second) >= 2 * PAGE
    assert (tmp_path / "data" / "kv" / "inprocess" / "VERSION").is_file()


@pytest.mark.parametrize(
    ("config", "disk"),
    [(IN_MEMORY, 64), (AgentConfig(), 0), (AgentConfig(optimization_level="off"), 64)],
    ids=["no tiers", "no disk", "off"],
)
def test_nothing_is_written_where_the_disk_tier_is_off(
    passes: Passes, tmp_path: Path, config: AgentConfig, disk: int
) -> None:
    with MagnitudeEngine(config, kv_memory_mb=1, kv_disk_mb=disk, kv_host_mb=1) as engine:
        engine.generate(prompt=LONG, **GREEDY)
        host = [tier.limit_bytes for tier in engine.inspect().tiers if tier.name == "host"]
    assert host == ([1024 * 1024] if disk == 0 else [])
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_two_engines_at_once_both_answer(passes: Passes, caplog: pytest.LogCaptureFixture) -> None:
    with MagnitudeEngine(kv_memory_mb=1) as first, MagnitudeEngine(kv_memory_mb=1) as second:
        answer = first.generate(prompt=LONG, **GREEDY)
        with caplog.at_level(logging.WARNING, "magnitude"):
            assert second.generate(prompt=LONG, **GREEDY)["text"] == answer["text"]
        assert [tier.limit_bytes for tier in second.inspect().tiers if tier.name == "disk"] == []
    (record,) = caplog.records
    assert "keeps no cache on disk, all else works: another process" in record.message
    caplog.clear()
    with MagnitudeEngine(kv_memory_mb=1) as third:
        assert figure(third.generate(prompt=LONG, **GREEDY), "cached_disk_tokens") > 0
    assert caplog.records == []


def test_a_folder_that_cannot_be_used_costs_cache_only(
    passes: Passes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "kv").write_text("a file")
    with MagnitudeEngine(kv_memory_mb=1) as engine:
        assert engine.generate(prompt=LONG, **GREEDY)["finish_reason"]
    assert "keeps no cache on disk" in caplog.text
    assert "cannot be used" in caplog.text
