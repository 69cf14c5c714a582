"""langchain-openai against a running server."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import Field, SecretStr

from testkit.serve import Server

pytestmark = pytest.mark.slow


@tool
def get_weather(city: Annotated[str, Field(max_length=12)]) -> str:
    """Current weather of a city."""
    return f"rain in {city}"


@pytest.fixture
def chat(server: Server) -> ChatOpenAI:
    return ChatOpenAI(
        model="smollm2",
        base_url=server.base_url,
        api_key=SecretStr("any"),
        temperature=0,
        max_retries=0,
        timeout=120,
        stream_usage=True,
    )


def test_invoke(chat: ChatOpenAI) -> None:
    answer = chat.bind(max_tokens=32).invoke("What is the capital of France?")
    assert "Paris" in str(answer.content)
    assert isinstance(answer, AIMessage)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream_equals_invoke(chat: ChatOpenAI) -> None:
    bound = chat.bind(max_tokens=24)
    whole = bound.invoke("Name three colours.")
    assert "".join(str(c.content) for c in bound.stream("Name three colours.")) == whole.content


def test_stop_and_batch(chat: ChatOpenAI) -> None:
    answers = chat.bind(max_tokens=24, stop=["."]).batch(["Say hello.", "Say goodbye."])
    assert len(answers) == 2
    assert all("." not in str(a.content) for a in answers)


def test_tool_history(chat: ChatOpenAI) -> None:
    answer = (
        chat.bind_tools([get_weather])
        .bind(max_tokens=32)
        .invoke(
            [
                SystemMessage("You are a travel agent."),
                HumanMessage("How is the weather in Paris?"),
                AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "Paris"}, "id": "call_1"}]),
                ToolMessage("rain in Paris", tool_call_id="call_1"),
            ]
        )
    )
    assert isinstance(answer, AIMessage)
    assert answer.content or answer.tool_calls
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] > 80


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_of_two_tool_calls(chat: ChatOpenAI, server: Server, streamed: bool) -> None:
    """The real small model, made to call twice and to answer then; nothing names the session."""
    history: list[Any] = [
        SystemMessage(f"You compare the weather. langchain {streamed}"),
        HumanMessage("Compare the weather of Paris and Rome. Begin with Paris."),
    ]
    known = server.sessions()
    for choice in ("any", "get_weather", "none"):
        bound = chat.bind_tools([get_weather], tool_choice=choice, strict=True, parallel_tool_calls=False)
        limited = bound.bind(max_tokens=64)
        pieces = list(limited.stream(history)) if streamed else [limited.invoke(history)]
        answer = pieces[0]
        for piece in pieces[1:]:
            answer = answer + piece  # type: ignore[assignment]
        assert isinstance(answer, AIMessage)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] > 0
        history += [answer, *(get_weather.invoke(call) for call in answer.tool_calls)]
    results = [message for message in history if isinstance(message, ToolMessage)]
    assert len(results) == 2
    assert all(str(result.content).startswith("rain in ") for result in results)
    assert answer.content
    (session,) = [session for id, session in server.sessions().items() if id not in known]
    assert (session["steps"], session["failures"]) == (3, 0)
