"""Schemas that would hang or kill a server: a 400 that names the field, while another request goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from testkit.serve import Server, children

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_DOUBLING: dict[str, Any] = {
    f"a{i}": {
        "anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2
        + [{"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}]
    }
    for i in range(300)
}
HOSTILE: dict[str, dict[str, Any]] = {
    "30,000 nested groups": {"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000},
    "70,000 enum members": {"enum": [f"v{i}" for i in range(70_000)]},
    "references that double": {"$defs": {**_DOUBLING, "a300": {"type": "string"}}, "$ref": "#/$defs/a0"},
    "references without an end": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "products": {
        "allOf": [{"properties": {f"a{i}": {"anyOf": [{"type": "string"}, {"minimum": i}]}}} for i in range(400)]
    },
}


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0, timeout=300) as sdk:
        yield sdk


def story(client: openai.OpenAI) -> Iterator[str]:
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Tell me a story."}],
        temperature=0,
        max_tokens=64,
        stream=True,
    )
    for chunk in stream:
        yield chunk.choices[0].delta.content or "" if chunk.choices else ""


def form(schema: dict[str, Any]) -> Any:
    """The schema as the form of the answer, which, other than a tool, is no part of the prompt."""
    whole = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    # References are to the root of the schema.
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {"type": "json_schema", "json_schema": {"name": "hostile", "schema": {**whole, **definitions}}}


def test_hostile_schemas_are_refused_and_nobody_else_notices(client: openai.OpenAI, server: Server) -> None:
    expected = "".join(story(client))
    worker = server.child("magnitude_engine")
    pids = {server.process.pid, worker}
    running = story(client)
    told = next(running)
    for name, schema in HOSTILE.items():
        began = time.monotonic()
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model="smollm2",
                messages=[{"role": "user", "content": "go"}],
                response_format=form(schema),
                max_tokens=4,
            )
        print(f"{name}: {time.monotonic() - began:.2f} s: {refused.value.message[:160]}")
        assert (refused.value.param or "").startswith("response_format"), name
    assert told + "".join(running) == expected
    assert {server.process.pid, server.child("magnitude_engine")} == pids
    # The helper was killed, not the worker; another one has taken its place.
    assert any(children(worker))
