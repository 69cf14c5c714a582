"""The published openai SDK against a running server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from testkit.serve import Server

pytestmark = pytest.mark.slow

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
HISTORY: Any = [
    {"role": "system", "content": "You are a travel agent."},
    {"role": "user", "content": "How is the weather in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "rain", "celsius": 11}'},
]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0, timeout=120) as sdk:
        yield sdk


def test_answers_a_question(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.object == "chat.completion"


def test_streams_the_same_text_as_it_answers(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=24)
    pieces, usage, reasons = [], None, []
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=24,
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            pieces.append(choice.delta.content or "")
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert "".join(pieces) == whole.choices[0].message.content
    assert reasons == [whole.choices[0].finish_reason]
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_no_usage_chunk_unless_asked_for(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=4, stream=True)
    chunks = list(stream)
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)


def test_stop_string_is_cut_and_never_leaks(client: openai.OpenAI) -> None:
    free = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=32)
    text = free.choices[0].message.content or ""
    stop = text[5:9]
    cut = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=32, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=32, stop=[stop], stream=True
    )
    streamed = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert streamed == text[: text.index(stop)]


def test_n_choices_differ_and_share_one_prompt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Invent a name for a cat."}],
        n=3, temperature=1.2, max_tokens=16, seed=7,
    )  # fmt: skip
    texts = [choice.message.content for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 3 * 16


def test_logprobs_describe_the_text(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    text = b"".join(bytes(t.bytes or []) for t in logprobs.content).decode()
    assert text.startswith(answer.choices[0].message.content or "?")
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob


def test_tools_in_the_history_reach_the_model(client: openai.OpenAI) -> None:
    with_result = client.chat.completions.create(
        model="smollm2", messages=HISTORY, tools=[WEATHER], temperature=0, max_tokens=48
    )
    without = client.chat.completions.create(model="smollm2", messages=HISTORY[:2], temperature=0, max_tokens=48)
    assert with_result.usage is not None
    assert without.usage is not None
    # The definition, the call and its result are all in the prompt.
    assert with_result.usage.prompt_tokens > without.usage.prompt_tokens + 60
    content = with_result.choices[0].message.content or ""
    assert content or with_result.choices[0].message.tool_calls


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_two_tool_calls(client: openai.OpenAI, streamed: bool) -> None:
    """The real small model, made to call twice and to answer then; nothing names the session."""
    schema = {**WEATHER["function"]["parameters"], "additionalProperties": False}
    schema["properties"] = {"city": {"type": "string", "maxLength": 12}}
    tool = {"type": "function", "function": {**WEATHER["function"], "parameters": schema}}
    history: list[Any] = [
        {"role": "system", "content": f"You compare the weather. {streamed}"},
        {"role": "user", "content": "Compare the weather of Paris and Rome. Begin with Paris."},
    ]
    asked: dict[str, Any] = {"model": "smollm2", "tools": [tool], "temperature": 0, "max_tokens": 64}
    sessions, before = set(), 0
    for step, choice in enumerate(["required", {"type": "function", "function": {"name": "get_weather"}}, "none"]):
        now = {**asked, "messages": history, "tool_choice": choice, "parallel_tool_calls": False}
        if streamed:
            with client.chat.completions.stream(**now, stream_options={"include_usage": True}) as stream:
                answer: Any = stream.get_final_completion()
                sessions.add(stream._response.headers["x-magnitude-session"])
        else:
            raw = client.chat.completions.with_raw_response.create(**now)
            answer = raw.parse()
            sessions.add(raw.headers["x-magnitude-session"])
        assert answer.usage.prompt_tokens_details.cached_tokens >= before - 16
        before = answer.usage.prompt_tokens
        message = answer.choices[0].message
        history.append(message.to_dict())
        if step == 2:
            break
        (call,) = message.tool_calls
        city = json.loads(call.function.arguments)["city"]
        assert 0 < len(city) <= 12
        history.append({"role": "tool", "tool_call_id": call.id, "content": f"{11 + step} degrees in {city}"})
    assert message.content
    assert not message.tool_calls
    assert len(sessions) == 1


def test_a_session_computes_only_what_is_new(client: openai.OpenAI) -> None:
    history: list[Any] = [{"role": "system", "content": "You answer briefly. " * 40}, *QUESTION]
    headers = {"x-magnitude-session": "sdk-session-1"}
    first = client.chat.completions.create(
        model="smollm2", messages=history, temperature=0, max_tokens=16, extra_headers=headers
    )
    history += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = client.chat.completions.create(
        model="smollm2", messages=history, temperature=0, max_tokens=16, extra_headers=headers
    )
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= first.usage.prompt_tokens - 16


def test_completions_and_models(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="smollm2", prompt="One, two, three,", max_tokens=8, temperature=0)
    assert "four" in answer.choices[0].text
    names = [model.id for model in client.models.list()]
    assert names
    assert client.models.retrieve(names[0]).id == names[0]


def test_abort_frees_the_worker_and_the_next_request_works(client: openai.OpenAI, server: Server) -> None:
    with client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Count from one to five hundred."}],
        max_tokens=2000, stream=True, extra_body={"ignore_eos": True},
    ) as stream:  # fmt: skip
        next(iter(stream))
    answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content
    for _ in range(100):
        worker = server.health()["worker"]
        if worker["running"] == 0:
            break
        time.sleep(0.1)
    assert worker["running"] == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_bad_fields_are_named(client: openai.OpenAI, change: dict[str, Any], param: str) -> None:
    arguments: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**arguments)
    assert caught.value.param == param


def test_a_prompt_over_the_context_names_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "word " * 9000}])
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in json.dumps(caught.value.body)


async def test_requests_progress_together(server: Server) -> None:
    import asyncio

    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="any", max_retries=0) as sdk:

        async def one(i: int) -> list[float]:
            loop = asyncio.get_running_loop()
            stream = await sdk.chat.completions.create(
                model="smollm2", messages=[{"role": "user", "content": f"Tell me about the number {i}."}],
                max_tokens=24, stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            return [loop.time() async for chunk in stream if chunk.choices and chunk.choices[0].delta.content]

        times = await asyncio.gather(*(one(i) for i in range(4)))
    latest_first = max(t[0] for t in times)
    earliest_last = min(t[-1] for t in times)
    assert latest_first < earliest_last
