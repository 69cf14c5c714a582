"""The published client against the product: a real proxy before a stub, and `magnitude serve` with a real model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from magnitude_engine import AgentRuntimeConfig, MagnitudeClient
from magnitude_engine.errors import StatusError
from testkit.model import smollm2_path
from testkit.proxy import proxy_config, proxying
from testkit.serve import Server, lend_model, serving
from testkit.upstream import OpenAIStub

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CONFIG = AgentRuntimeConfig(
    max_batch_size=32,
    enable_predictive_caching=True,
    speculative_decoding_enabled=True,
    draft_model_path="magnitude-1b-instruct-draft",
    target_model_path="meta-llama/Llama-3.3-70B-Instruct",
    optimization_target="latency_and_cost",
)


@pytest.fixture
async def stub() -> AsyncIterator[OpenAIStub]:
    async with OpenAIStub() as running:
        yield running


@pytest.fixture
async def client(stub: OpenAIStub, tmp_path: Path) -> AsyncIterator[MagnitudeClient]:
    async with (
        proxying(proxy_config(tmp_path, stub.url)) as proxy,
        MagnitudeClient(proxy.url, config=CONFIG, max_retries=0) as made,
    ):
        yield made


@pytest.mark.thorough
async def test_answers_come_through_the_proxy(client: MagnitudeClient, stub: OpenAIStub) -> None:
    result = await client.generate_optimized(session_id="run-1", prompt="Goal: x", max_tokens=8, track_feedback=True)
    assert (result["text"], result["session_id"], result["finish_reason"]) == ("Hello from upstream", "run-1", "stop")
    assert result["route"] == "upstream:u0"
    assert result["request_id"]
    assert result["usage"]["total_tokens"] == 8
    assert "magnitude" not in stub.requests[0].body


async def test_streams_come_through_the_proxy(client: MagnitudeClient) -> None:
    stream = await client.generate_optimized(session_id="run-1", prompt="Goal: x", stream=True, logprobs=1)
    items = [item async for item in stream]
    result = items[-1]["result"]
    assert result is not None
    assert "".join(item["text"] for item in items) == result["text"] == "Hello from upstream"
    assert len(result["logprobs"]["content"]) == 3
    assert result["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_come_through_the_proxy(client: MagnitudeClient, stream: bool) -> None:
    if stream:
        items = [
            item async for item in await client.chat([{"role": "user", "content": "?"}], tools=[TOOL], stream=True)
        ]
        result = items[-1]["result"]
    else:
        result = await client.chat([{"role": "user", "content": "?"}], tools=[TOOL])
    assert result is not None
    assert [call["function"] for call in result["tool_calls"]] == [
        {"name": "weather", "arguments": '{"city": "Paris"}'}
    ]
    assert result["finish_reason"] == "tool_calls"


async def test_raw_prompts_come_through_the_proxy(client: MagnitudeClient, stub: OpenAIStub) -> None:
    result = await client.generate_optimized(prompt="Goal:", raw=True, logprobs=1)
    assert result["text"] == "Hello from upstream"
    assert result["logprobs"]["tokens"] == ["Hello", " from", " upstream"]
    assert stub.requests[0].path == "/v1/completions"


async def test_errors_of_the_proxy_keep_their_field(client: MagnitudeClient) -> None:
    with pytest.raises(StatusError) as caught:
        await client.generate_optimized(prompt="q", temperature=9.0)
    assert (caught.value.status, caught.value.param) == (400, "temperature")
    assert caught.value.request_id


async def test_health_of_the_proxy_is_understood(client: MagnitudeClient) -> None:
    health = await client.verify_runtime_health()
    assert (health.status, health.model, health.cache) == ("ok", None, "none")
    assert any("does not speculate" in warning for warning in health.warnings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    lend_model(folder / "data", smollm2_path())
    with serving(folder) as running:
        yield running


@pytest.mark.slow
async def test_an_agent_runs_on_a_real_model(server: Server) -> None:
    async with MagnitudeClient(server.base_url, "any-key", CONFIG) as client:
        health = await client.verify_runtime_health()
        assert (health.status, health.model, health.cache, health.store) == ("ok", "smollm2", "on", "ok")
        prompt = "Goal: count to three\nObservation: one\nThought:"
        cached = []
        for _ in range(3):
            result = await client.generate_optimized(
                session_id="agent-1",
                prompt=prompt,
                temperature=0.0,
                max_tokens=24,
                stop_sequences=["Observation:", "</tool_call>"],
                track_feedback=True,
            )
            assert result["route"] == "local"
            assert "Observation:" not in result["text"]
            cached.append(result["usage"]["prompt_tokens_details"]["cached_tokens"])
            prompt += result["text"] + "\nObservation: go on\nThought:"
    assert cached[0] == 0
    assert cached[1] > 0


@pytest.mark.slow
async def test_a_stream_and_a_whole_answer_of_a_real_model_are_the_same(server: Server) -> None:
    # `packed` may decide near ties otherwise where a prompt is cached or drafted: both answers are computed alike.
    plain = AgentRuntimeConfig(speculative_decoding_enabled=False, enable_predictive_caching=False)
    async with MagnitudeClient(server.base_url, config=plain) as client:
        await client.generate_optimized(prompt="Name a colour.", temperature=1.0, seed=5, max_tokens=16)
        whole = await client.generate_optimized(prompt="Name a colour.", temperature=1.0, seed=5, max_tokens=16)
        stream = await client.generate_optimized(
            prompt="Name a colour.", temperature=1.0, seed=5, max_tokens=16, stream=True
        )
        items = [item async for item in stream]
    last = items[-1]["result"]
    assert last is not None
    assert (last["text"], last["finish_reason"]) == (whole["text"], whole["finish_reason"])
    assert "".join(item["text"] for item in items) == whole["text"]
