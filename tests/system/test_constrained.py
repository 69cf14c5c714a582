"""Tool calls and formatted answers over HTTP: a real proxy, a real worker's socket and engine, on a tiny model.

Once on the real model: every call that it is made to write satisfies its schema.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from magnitude_engine.config import EngineConfig
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import load_model
from magnitude_engine.server import Server
from magnitude_proxy.config import WorkerConfig
from testkit import wire
from testkit.engine import engine_config, run
from testkit.model import smollm2_path
from testkit.proxy import Proxy, proxy_config, proxying
from testkit.tiny import tiny_model
from testkit.traces import own_traces, public_traces
from testkit.validity import Size, ask, judge, tool_sets

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "side": {"enum": ["left", "right"]}},
    "required": ["x", "side"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "move", "parameters": SCHEMA}}
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}], "max_completion_tokens": 150, "seed": 1}
ONE: dict[str, Any] = {**ASK, "tools": [TOOL], "parallel_tool_calls": False}
NAMED = {"type": "function", "function": {"name": "move"}}
STRICT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Proxy]:
    engine = Engine(tiny_model(), engine_config(), pages=256)
    socket = folder / "worker.sock"
    server = Server(engine, socket)
    await server.start()
    engine.start()
    try:
        config = proxy_config(folder, worker=WorkerConfig(mode="attach", socket=str(socket)))
        async with proxying(config) as proxy:
            while (await proxy.get(f"{proxy.origin}/health/ready")).status != 200:
                await asyncio.sleep(0.01)
            yield proxy
    finally:
        await asyncio.to_thread(engine.close)
        await server.close()


async def chat(proxy: Proxy, body: dict[str, Any]) -> dict[str, Any]:
    """One answer, checked, whole and in a stream; both say the same."""
    reply = await proxy.post("/chat/completions", body)
    assert reply.status == 200, reply.body
    wire.check("CreateChatCompletionResponse", reply.json)
    (whole,) = reply.json["choices"]
    stream = await proxy.post("/chat/completions", {**body, "stream": True})
    *chunks, end = stream.events
    assert end == "[DONE]"
    calls: list[dict[str, Any]] = []
    text, finish = "", None
    for chunk in chunks:
        wire.check_chat_chunk(chunk)
        (choice,) = chunk["choices"]
        text += choice["delta"].get("content") or ""
        finish = choice["finish_reason"] or finish
        for piece in choice["delta"].get("tool_calls", ()):
            if "id" in piece:
                calls.append({"type": piece["type"], "function": {**piece["function"]}})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    told = [{"type": call["type"], "function": call["function"]} for call in whole["message"].get("tool_calls", ())]
    assert (calls, text, finish) == (told, whole["message"]["content"] or "", whole["finish_reason"])
    return {**whole, "usage": reply.json["usage"]}


@pytest.mark.timeout(120)
async def test_forced_calls_and_forms_are_openais(tmp_path: Path) -> None:
    async with served(tmp_path) as proxy:
        for choice, finish in (("required", "tool_calls"), (NAMED, "stop")):
            told = await chat(proxy, {**ONE, "tool_choice": choice})
            (call,) = told["message"]["tool_calls"]
            jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
            assert (call["function"]["name"], told["message"]["content"]) == ("move", None)
            assert told["finish_reason"] == finish
            assert told["usage"]["magnitude"]["forced_tokens"] > 10
        for fields in ({"response_format": STRICT}, {"guided_json": SCHEMA}, {"structured_outputs": {"json": SCHEMA}}):
            told = await chat(proxy, {**ASK, **fields})
            jsonschema.validate(json.loads(told["message"]["content"]), SCHEMA)
            assert told["finish_reason"] == "stop"
        told = await chat(proxy, {**ASK, "guided_choice": ["a.b", "c|d"]})
        assert told["message"]["content"] in ("a.b", "c|d")
        text = await proxy.post("/completions", {"prompt": "go", "guided_regex": "[ab]{3}", "max_tokens": 9})
        wire.check("CreateCompletionResponse", text.json)
        assert set(text.json["choices"][0]["text"]) <= {"a", "b"}


@pytest.mark.timeout(120)
async def test_what_cannot_be_enforced_is_a_400_that_names_it(tmp_path: Path) -> None:
    odd = {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}
    unresolved = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "https://example.com/s"}}}
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({**ASK, "tools": [odd]}, "tools[0].function.parameters"),
        ({**ASK, "tools": [TOOL, unresolved]}, "tools[1].function.parameters"),
        ({**ONE, "response_format": STRICT}, "response_format"),
        ({**ASK, "guided_regex": "("}, "guided_regex"),
        ({**ASK, "guided_grammar": "start: ("}, "guided_grammar"),
        ({**ASK, "guided_json": {"type": "words"}}, "guided_json"),
    )
    async with served(tmp_path) as proxy:
        for body, param in wrong:
            for stream in (False, True):
                reply = await proxy.post("/chat/completions", {**body, "stream": stream})
                assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_call_of_the_real_model_satisfies_its_schema() -> None:
    torch.set_num_threads(2)
    config = EngineConfig(model_path=str(smollm2_path()), profile="packed", kv_memory_mb=256)
    model = load_model(config)
    small = [trace for trace in tool_sets(public_traces()) if len(trace.tools) < 5]
    traces = tool_sets(own_traces())[:3] + list({trace.group: trace for trace in small}.values())[:3]
    asked = [each for trace in traces for each in ask(trace, model, ("required", "begun"), Size(keep=32, cap=80))]
    engine = Engine(model, config)
    try:
        answers = run(engine, *(each.request for each in asked))
    finally:
        engine.close()
    begin = model.prompts.tool_format.begin
    judged = [judge(each, told, begin) for each, told in zip(asked, answers, strict=True)]
    print(f"{sum(each.calls for each in judged)} complete calls, {sum(each.cut for each in judged)} cut off")
    assert [each for each in judged if each.wrong or each.refused] == []
    # Of what is not complete, the limit of tokens is the reason.
    assert all(each.calls or each.cut for each in judged)
    assert sum(each.calls for each in judged) > len(judged) / 2
