"""Arguments of the wrong form: refused by name, before anything is sent or loaded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnitude import MagnitudeEngine
from magnitude_engine import MagnitudeClient
from magnitude_engine.errors import ConfigError, ModelNotFound, RequestError
from testkit.server import Reply, ScriptedServer, scripted


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with scripted() as running:
        yield running


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[MagnitudeClient]:
    async with MagnitudeClient(server.base_url, max_retries=0) as made:
        yield made


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"endpoint": 0}, "endpoint must be a URL as text, not int"),
        ({"api_key": b""}, "api_key must be printable ASCII text without line breaks"),
        ({"timeout": True}, "timeout must be seconds above 0, not True"),
        ({"timeout": float("nan")}, "timeout must be seconds above 0, not nan"),
        ({"max_retries": True}, "max_retries must be 0, 1, 2 …, not True"),
    ],
)
def test_a_client_is_not_made_with_arguments_of_the_wrong_form(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MagnitudeClient(**wrong)
    assert caught.value.message == message
    assert caught.value.param in wrong


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": 5}, "prompt must be text, not int"),
        ({"prompt": 5, "raw": True}, "prompt must be text, not int"),
        ({"max_tokens": "a"}, "max_tokens must be a whole number or None, not str"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"stop_sequences": [1]}, "stop_sequences[0] must be text, not int"),
        ({"stop_sequences": 1}, "stop_sequences must be text or a list or None, not int"),
        ({"temperature": "hot"}, "temperature must be a number or None, not str"),
        ({"temperature": float("nan")}, "temperature must be a finite number, not nan"),
        ({"top_p": float("inf")}, "top_p must be a finite number, not inf"),
        ({"seed": 1.5}, "seed must be a whole number or None, not float"),
        ({"tools": [5]}, "tools[0] must be a mapping with text keys, not int"),
        ({"session_id": 5}, "session_id must be text or None, not int"),
        ({"session_id": ""}, "session_id must be a non-empty text, or None"),
        ({"stream": "yes"}, "stream must be True or False, not str"),
    ],
)
async def test_arguments_of_the_wrong_form_are_named_before_anything_is_sent(
    server: ScriptedServer, client: MagnitudeClient, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await client.generate_optimized(**({"prompt": "Hi"} | wrong))
    assert caught.value.message == message
    assert caught.value.param in wrong
    assert server.asked == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (5, "messages must be a list or None, not int"),
        (None, "messages must be a list of OpenAI messages, not None"),
        ("Hi", "messages must be a list or None, not str"),
        (["Hi"], "messages[0] must be a mapping with text keys, not str"),
        ([{1: "Hi"}], "a key of messages[0] must be text, not int"),
        ({"role": "user"}, "messages must be a list or None, not dict"),
    ],
)
async def test_messages_of_the_wrong_form_are_named_before_anything_is_sent(
    server: ScriptedServer, client: MagnitudeClient, wrong: Any, message: str
) -> None:
    with pytest.raises(RequestError) as caught:
        await client.chat(wrong)
    assert caught.value.message == message
    assert caught.value.param == "messages"
    assert server.asked == []


async def test_a_value_without_a_form_in_json_is_refused_before_anything_is_sent(
    server: ScriptedServer, client: MagnitudeClient
) -> None:
    with pytest.raises(RequestError, match="JSON"):
        await client.generate_optimized(prompt="Hi", extra_body={"top_k": object()})
    assert server.asked == []


async def test_one_stop_text_needs_no_list(server: ScriptedServer, client: MagnitudeClient) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
    server.play("POST /v1/chat/completions", Reply({"id": "chatcmpl-1", "choices": [choice]}))
    await client.generate_optimized(prompt="Hi", stop_sequences="abc")
    assert server.bodies("/v1/chat/completions")[0]["stop"] == "abc"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"max_tokens": "a"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [1]}, "stop_sequences"),
        ({"temperature": float("nan")}, "temperature"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "maybe"}, "tool_choice"),
    ],
)
async def test_arguments_of_the_wrong_form_are_named_before_a_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], param: str
) -> None:
    monkeypatch.setenv("MAGNITUDE_MODEL", str(tmp_path / "none.gguf"))
    unloaded = MagnitudeEngine()
    arguments = {"prompt": "Hi"} | wrong
    with pytest.raises(RequestError, match=param) as caught:
        unloaded.generate(**arguments)
    assert caught.value.param == param
    with pytest.raises(RequestError, match=param):
        await unloaded.agenerate(**arguments)
    with pytest.raises(RequestError, match="messages must be a list or None, not int"):
        unloaded.chat(5)  # type: ignore[call-overload]
    with pytest.raises(RequestError, match="messages must be a list or None, not int"):
        await unloaded.achat(5)  # type: ignore[call-overload]
    with pytest.raises(ModelNotFound):
        unloaded.generate(prompt="Hi")
