"""Every body and chunk of the running product, real model behind it, against OpenAI's response schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from testkit import wire
from testkit.serve import Server

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": "Say héllo 👋"}], "max_tokens": 12}
TEXT: dict[str, Any] = {"model": "smollm2", "prompt": "One, two,", "max_tokens": 8}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CHANGES: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 1.5, "seed": 1},
    {"logprobs": True, "top_logprobs": 5},
    {"stop": ["o", "!"]},
    {"tools": [TOOL], "tool_choice": "auto", "max_tokens": 40},
    {"temperature": 0, "ignore_eos": True, "max_tokens": 30},
    {"frequency_penalty": 1.0, "presence_penalty": -1.0, "logit_bias": {"100": 5}, "top_p": 0.9, "top_k": 20},
    {"max_completion_tokens": 3, "min_p": 0.1},
]


@pytest.fixture(autouse=True)
def schemas() -> None:
    wire.needs_schemas()


def chunks(server: Server, path: str, body: dict[str, Any]) -> Iterator[Any]:
    """Yields the parsed chunks of a stream and checks that it ends with [DONE]."""
    last = ""
    with httpx.stream("POST", f"{server.base_url}{path}", json={**body, "stream": True}, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line.startswith("data: "):
                last = line.removeprefix("data: ")
                if last != "[DONE]":
                    yield json.loads(last)
    assert last == "[DONE]"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "+".join(change) or "plain")
def test_chat_bodies_and_chunks(server: Server, change: dict[str, Any]) -> None:
    body = {**CHAT, **change}
    answer = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    wire.check("CreateChatCompletionResponse", answer.json())
    assert len(answer.json()["choices"]) == body.get("n", 1)
    seen = list(chunks(server, "/chat/completions", {**body, "stream_options": {"include_usage": True}}))
    for chunk in seen:
        wire.check_chat_chunk(chunk)
    assert seen[-1]["usage"]["completion_tokens"] > 0
    finished = [c["index"] for chunk in seen for c in chunk["choices"] if c["finish_reason"]]
    assert sorted(finished) == list(range(body.get("n", 1)))


@pytest.mark.parametrize("change", [{}, {"echo": True}, {"logprobs": 2}, {"prompt": ["One,", "Two,"], "n": 2}])
def test_completion_bodies_and_chunks(server: Server, change: dict[str, Any]) -> None:
    body = {**TEXT, **change}
    answer = httpx.post(f"{server.base_url}/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    wire.check("CreateCompletionResponse", answer.json())
    for chunk in chunks(server, "/completions", body):
        wire.check_completion_chunk(chunk)


def test_models_and_errors(server: Server) -> None:
    wire.check("ListModelsResponse", httpx.get(f"{server.base_url}/models").json())
    for path, body, status in (
        ("/chat/completions", {**CHAT, "messages": "hi"}, 400),
        ("/chat/completions", {**CHAT, "model": "no-such-model"}, 404),
        ("/chat/completions", {**CHAT, "tool_choice": "required"}, 400),
        ("/chat/completions", {**CHAT, "n": 1000}, 400),
        ("/completions", {**TEXT, "prompt": ""}, 400),
        ("/nowhere", {}, 404),
    ):
        answer = httpx.post(f"{server.base_url}{path}", json=body, timeout=60)
        assert answer.status_code == status, answer.text
        wire.check_error(answer.json())
