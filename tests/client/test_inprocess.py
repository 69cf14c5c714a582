"""The in-process engine: real engine and real requests, on a tiny random model; once on the real model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from magnitude import AgentConfig, MagnitudeEngine
from magnitude_engine.errors import (
    ConfigError,
    EngineError,
    FeatureUnsupported,
    ModelDoesNotFit,
    ModelNotFound,
    RequestError,
)
from magnitude_engine.inprocess import find_model
from testkit.inprocess import use_tiny_model
from testkit.model import smollm2_path

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MagnitudeEngine]:
    use_tiny_model(tmp_path, monkeypatch)
    config = AgentConfig(model="meta-llama/Meta-Llama-3-70B-Instruct", max_parallel_branches=4)
    with MagnitudeEngine(config, kv_memory_mb=1) as made:
        yield made


@pytest.mark.thorough
def test_questions_are_answered_and_sessions_reuse_their_cache(engine: MagnitudeEngine) -> None:
    engine.warmup()
    engine.warmup()
    first = engine.generate(session_id="run", prompt="Goal: a long enough prompt to fill pages", raw=True, **GREEDY)
    again = engine.generate(session_id="run", prompt="Goal: a long enough prompt to fill pages", raw=True, **GREEDY)
    assert first["text"] == again["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    usage = again["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    # The second run says what the first said, so what is drafted is right; how much that is depends on what steps cost.
    drafted = usage["magnitude"]["drafted_tokens"]
    assert 0 < drafted < usage["completion_tokens"]
    assert usage["magnitude"] == {
        "drafted_tokens": drafted,
        "accepted_tokens": drafted,
        "forced_tokens": 0,
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "cached_host_tokens": 0,
        "cached_disk_tokens": 0,
    }
    assert (first["session_id"], first["route"], first["tool_calls"]) == ("run", "local", [])
    assert first["finish_reason"] in ("stop", "length")


@pytest.mark.thorough
def test_a_stream_carries_the_same_answer(engine: MagnitudeEngine) -> None:
    whole = engine.chat([{"role": "user", "content": "hi"}], tools=[TOOL], **GREEDY)
    items = list(engine.chat([{"role": "user", "content": "hi"}], tools=[TOOL], stream=True, **GREEDY))
    result = items[-1]["result"]
    assert result is not None
    assert "".join(item["text"] for item in items) == result["text"] == whole["text"]


@pytest.mark.thorough
def test_logprobs_come_when_asked(engine: MagnitudeEngine) -> None:
    result = engine.generate(prompt="hi", logprobs=2, **GREEDY)
    positions = result["logprobs"]["content"]
    assert len(positions) == result["usage"]["completion_tokens"]
    assert {len(position["top_logprobs"]) for position in positions} == {2}
    assert "logprobs" not in engine.generate(prompt="hi", **GREEDY)


@pytest.mark.thorough
def test_a_stream_closed_early_frees_the_engine(engine: MagnitudeEngine) -> None:
    stream = engine.generate(prompt="hi", temperature=0.0, max_tokens=400, stream=True)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert engine.generate(prompt="hi", **GREEDY)["usage"]["completion_tokens"] <= 8


@pytest.mark.thorough
async def test_the_async_twins_answer_at_the_same_time(engine: MagnitudeEngine) -> None:
    alone = await engine.agenerate(prompt="hi", **GREEDY)
    together = await asyncio.gather(*(engine.agenerate(prompt="hi", **GREEDY) for _ in range(3)))
    assert {result["text"] for result in together} == {alone["text"]}
    items = [item async for item in await engine.achat([{"role": "user", "content": "hi"}], stream=True, **GREEDY)]
    assert items[-1]["result"] is not None
    assert items[-1]["result"]["text"] == alone["text"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"temperature": float("nan")}, RequestError),
        ({"temperature": -1.0}, RequestError),
        ({"tools": [{"type": "function"}]}, RequestError),
        ({"tools": [TOOL, TOOL]}, RequestError),
        ({"response_format": {"type": "words"}}, RequestError),
        ({"response_format": {"type": "json_schema"}}, RequestError),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, FeatureUnsupported),
        ({"tools": [TOOL], "tool_choice": "maybe"}, RequestError),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, RequestError),
        ({"tool_choice": "required"}, RequestError),
        ({"extra_body": {"top_k": 4}}, FeatureUnsupported),
        ({"prune": ["thinking"]}, FeatureUnsupported),
        ({"stop_sequences": [""]}, RequestError),
    ],
)
def test_what_cannot_be_asked_is_named(
    engine: MagnitudeEngine, wrong: dict[str, Any], kind: type[RequestError]
) -> None:
    with pytest.raises(kind):
        engine.generate(prompt="hi", **wrong)
    with pytest.raises(RequestError, match="messages"):
        engine.chat([{"role": "nobody", "content": "hi"}])
    assert engine.generate(prompt="hi", **GREEDY)["finish_reason"]


@pytest.mark.thorough
def test_calls_and_json_are_as_asked_for(engine: MagnitudeEngine) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    many: dict[str, Any] = {"temperature": 0.0, "max_tokens": 200, "tools": [tool]}
    for choice, finish in (("required", "tool_calls"), ({"type": "function", "function": {"name": "look"}}, "stop")):
        called = engine.generate(prompt="hi", tool_choice=choice, **many)
        assert json.loads(called["tool_calls"][0]["function"]["arguments"])["n"] in (1, 2)
        assert called["usage"]["magnitude"]["forced_tokens"] > 0
        assert called["finish_reason"] in (finish, "length")
        # A call that the limit cuts off is text, as the model wrote it.
        assert called["finish_reason"] == "length" or called["text"] == ""
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    told = engine.generate(prompt="hi", response_format=wanted, temperature=0.0, max_tokens=200)
    assert json.loads(told["text"])["n"] in (1, 2)


@pytest.mark.thorough
def test_one_stop_text_needs_no_list(engine: MagnitudeEngine) -> None:
    whole = engine.generate(prompt="hi", **GREEDY)["text"]
    stop = whole[2]
    for given in (stop, [stop]):
        assert engine.generate(prompt="hi", stop_sequences=given, **GREEDY)["text"] == whole[: whole.index(stop)]


def test_a_config_of_another_kind_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"AgentConfig\(model='smollm2'\).*not dict") as caught:
        MagnitudeEngine({"model": "x"})  # type: ignore[arg-type]
    assert caught.value.param == "config"


def test_a_closed_engine_says_so(engine: MagnitudeEngine) -> None:
    engine.warmup()
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(prompt="hi")


def test_a_model_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGNITUDE_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("MAGNITUDE_MODEL", raising=False)
    with pytest.raises(ModelNotFound, match=r"magnitude pull smollm2.*MAGNITUDE_MODEL"):
        MagnitudeEngine(AgentConfig(model="meta-llama/Meta-Llama-3-70B-Instruct")).warmup()


def test_models_are_found_by_path_and_by_pulled_name(tmp_path: Path) -> None:
    pulled = tmp_path / "models" / "smollm2" / "SmolLM2.gguf"
    pulled.parent.mkdir(parents=True)
    pulled.write_bytes(b"GGUF")
    assert find_model("smollm2", tmp_path) == pulled
    assert find_model(str(pulled), tmp_path / "other") == pulled
    with pytest.raises(ModelNotFound):
        find_model("../models/smollm2", tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_parallel_branches": 0},
        {"max_parallel_branches": True},
        {"optimization_level": "max"},
        {"enable_hierarchical_cache": "yes"},
        {"model": ""},
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        AgentConfig(**wrong)
    assert caught.value.param == next(iter(wrong))
    with pytest.raises(TypeError, match="branches"):
        AgentConfig(branches=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "wrong", [{"kv_memory_mb": 0}, {"kv_memory_mb": 1.5}, {"kv_host_mb": -1}, {"kv_disk_mb": True}, {"kv_disk_mb": "1"}]
)
def test_wrong_sizes_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number of at least") as caught:
        MagnitudeEngine(**wrong)
    assert caught.value.param == next(iter(wrong))


@pytest.mark.slow
def test_a_model_that_does_not_fit_says_what_it_needs_and_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAGNITUDE_MODEL", str(smollm2_path()))
    monkeypatch.setenv("MAGNITUDE_DATA_DIR", str(tmp_path))
    with pytest.raises(ModelDoesNotFit, match=r"needs about \d{9,} MiB .* but \d+ MiB are available.*kv_memory_mb"):
        MagnitudeEngine(kv_memory_mb=10**8).warmup()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_readme_example_runs_on_the_real_model(tmp_path: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    _, found, rest = readme.partition("In process, without a server")
    example = rest.split("```python\n")[1].split("```")[0]
    assert found
    assert "engine.branches(" in example
    places = {"MAGNITUDE_MODEL": str(smollm2_path()), "MAGNITUDE_DATA_DIR": str(tmp_path)}
    ran = subprocess.run(
        (sys.executable, "-c", example), capture_output=True, text=True, env={**os.environ, **places}, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    text, _, cached = ran.stdout.strip().rpartition(" ")
    assert text
    assert int(cached) > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_published_example_runs_on_the_real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAGNITUDE_MODEL", str(smollm2_path()))
    monkeypatch.setenv("MAGNITUDE_DATA_DIR", str(tmp_path))
    config = AgentConfig(
        model="meta-llama/Meta-Llama-3-70B-Instruct",
        enable_hierarchical_cache=True,
        max_parallel_branches=8,
        optimization_level="aggressive",
    )
    with MagnitudeEngine(config) as engine:
        engine.warmup()
        # Its likeliest answers all name the city; which of them comes may hang on a near-tie.
        result = engine.generate(
            session_id="s", prompt="Is Paris the capital of France?", temperature=0.0, max_tokens=16
        )
    assert "Paris" in result["text"]
