"""The published anthropic SDK against a running server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from testkit.serve import Server

pytestmark = pytest.mark.slow

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "Current weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}
# This SDK has no argument for what newer models of Anthropic do not take; the wire has it.
GREEDY = {"temperature": 0}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PLAIN: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "extra_body": GREEDY}


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.origin, api_key="any", max_retries=0, timeout=120) as sdk:
        yield sdk


def test_answers_and_streams_the_same(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**PLAIN, system=[{"type": "text", "text": "Be brief."}])
    assert whole.content[0].type == "text"
    assert "Paris" in whole.content[0].text
    assert whole.stop_reason in ("end_turn", "max_tokens")
    assert str(whole._request_id).startswith("req_")
    with client.messages.stream(**PLAIN, system="Be brief.") as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert streamed == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    read = final.usage.cache_read_input_tokens or 0
    assert read > 0
    assert final.usage.input_tokens + read == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)


def test_counts_what_is_then_used(client: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": QUESTION, "system": "Be brief.", "tools": [WEATHER]}
    counted = client.messages.count_tokens(**asked)
    usage = client.messages.create(**asked, max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_stop_sequence_is_named_and_cut(client: anthropic.Anthropic) -> None:
    free = client.messages.create(**PLAIN).content[0]
    assert free.type == "text"
    stop = free.text[5:9]
    cut = client.messages.create(**PLAIN, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].type == "text"
    assert cut.content[0].text == free.text[: free.text.index(stop)]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_two_tool_calls(client: anthropic.Anthropic, streamed: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Compare the weather of Paris and Rome."}]
    asked: dict[str, Any] = {"model": "smollm2", "max_tokens": 64, "extra_body": GREEDY, "tools": [WEATHER]}
    choices: list[Any] = [{"type": "any", "disable_parallel_tool_use": True}] * 2 + [{"type": "none"}]
    before = 0
    for step, choice in enumerate(choices):
        if streamed:
            with client.messages.stream(**asked, messages=messages, tool_choice=choice) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**asked, messages=messages, tool_choice=choice)
        read = answer.usage.cache_read_input_tokens or 0
        # A step computes what is new of its prompt, and at most one page more.
        assert read >= before - 16
        before = read + answer.usage.input_tokens
        messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if step == 2:
            break
        assert answer.stop_reason == "tool_use"
        assert len(calls) == 1
        assert isinstance(calls[0].input["city"], str)
        result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": f"{11 + step} degrees"}
        messages.append({"role": "user", "content": [result]})
    assert calls == []
    assert [block.type for block in answer.content] == ["text"]


def test_errors_are_typed_and_name_the_field(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="top_k"):
        client.messages.create(**{**PLAIN, "extra_body": {"top_k": -5}})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\]: the local worker does not read"):
        client.messages.create(**{**PLAIN, "messages": [{"role": "user", "content": [PICTURE]}]})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**PLAIN, "messages": [{"role": "user", "content": "word " * 9000}]})
    with pytest.raises(anthropic.NotFoundError, match="nobody") as caught:
        client.messages.create(**{**PLAIN, "model": "nobody"})
    assert caught.value.type == "not_found_error"
    assert str(caught.value.request_id).startswith("req_")
