"""The published openai SDK's Responses client against a running server, and every event against OpenAI's schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from testkit import wire
from testkit.serve import Server

pytestmark = pytest.mark.slow

PLAIN: dict[str, Any] = {
    "model": "smollm2",
    "input": "What is the capital of France?",
    "max_output_tokens": 24,
    "temperature": 0,
}
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]},
    "strict": False,
}


class Town(pydantic.BaseModel):
    """What the model is made to answer."""

    name: str = pydantic.Field(max_length=12)
    big: bool


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0, timeout=120) as sdk:
        yield sdk


def test_answers_and_streams_the_same(client: openai.OpenAI) -> None:
    whole = client.responses.create(**PLAIN, instructions="Be brief.")
    assert "Paris" in whole.output_text
    chat = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": PLAIN["input"]}],
        max_tokens=24,
        temperature=0,
    )
    assert whole.output_text == chat.choices[0].message.content
    with client.responses.stream(**PLAIN, instructions="Be brief.") as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(pieces) == final.output_text == whole.output_text
    assert final.status == whole.status
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens
    assert final.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("kept", [False, True])
def test_an_agent_of_two_tool_calls(client: openai.OpenAI, kept: bool) -> None:
    """`kept`: each step names the one before; otherwise it sends the whole history, streamed."""
    asked: dict[str, Any] = {"model": "smollm2", "tools": [WEATHER], "temperature": 0, "max_output_tokens": 64}
    history: list[Any] = [{"role": "user", "content": "Compare the weather of Paris and Rome."}]
    new, previous, before = list(history), None, 0
    for step, choice in enumerate(["required", {"type": "function", "name": "get_weather"}, "none"]):
        if kept:
            answer: Any = client.responses.create(
                **asked, input=new, tool_choice=choice, previous_response_id=previous, parallel_tool_calls=False
            )
        else:
            options: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False, "store": False}
            with client.responses.stream(**asked, **options, input=history) as stream:
                answer = stream.get_final_response()
        assert answer.usage.input_tokens_details.cached_tokens >= before - 16
        before = answer.usage.input_tokens
        previous = answer.id
        history += [item.to_dict(mode="json") for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if step == 2:
            break
        assert len(calls) == 1
        assert isinstance(json.loads(calls[0].arguments)["city"], str)
        new = [{"type": "function_call_output", "call_id": calls[0].call_id, "output": f"{11 + step} degrees"}]
        history += new
    assert calls == []
    assert answer.output_text


def test_a_kept_response_is_shown_and_deleted(client: openai.OpenAI) -> None:
    made = client.responses.create(**PLAIN, metadata={"a": "b"})
    shown = client.responses.retrieve(made.id)
    assert shown.to_dict() == made.to_dict()
    assert shown.metadata == {"a": "b"}
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="is not known"):
        client.responses.retrieve(made.id)


def test_an_answer_of_a_type(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model="smollm2", input="Name a town.", text_format=Town, temperature=0, max_output_tokens=64
    )
    assert isinstance(parsed.output_parsed, Town)


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    for change, param in [
        ({"temperature": 3}, "temperature"),
        ({"background": True}, "background"),
        ({"input": "word " * 9000}, "input"),
        ({"max_output_tokens": 8192}, "max_output_tokens"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{**PLAIN, **change})
        assert caught.value.param == param


@pytest.mark.parametrize(
    "change", [{}, {"tools": [WEATHER], "tool_choice": "required"}, {"include": ["message.output_text.logprobs"]}]
)
def test_every_event_fits_openais_schemas(server: Server, change: dict[str, Any]) -> None:
    wire.needs_schemas()
    body = {**PLAIN, **change}
    answer = httpx.post(f"{server.base_url}/responses", json=body, timeout=120)
    wire.check("Response", answer.json())
    with httpx.stream("POST", f"{server.base_url}/responses", json={**body, "stream": True}, timeout=120) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    for event in events:
        wire.check("ResponseStreamEvent", event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
