"""Tools, events, sessions, feedback and predictions, on a real worker with a tiny model and on the running product."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from magnitude_engine import MagnitudeClient
from magnitude_engine.errors import StatusError
from testkit.model import smollm2_path
from testkit.serve import Server, lend_model, serving
from testkit.tiny_served import Tiny, tiny_served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SYSTEM = "You are a careful assistant who works in a folder of source files and looks before it changes anything."
LIST = {
    "type": "function",
    "function": {
        "name": "list_files",
        "description": "Lists the files of a folder.",
        "parameters": {
            "type": "object",
            "properties": {"folder": {"type": "string", "maxLength": 8}},
            "required": ["folder"],
            "additionalProperties": False,
        },
    },
}
ASKED = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which files are there?"}]
OUTPUT = "".join(f"-rw-r--r-- 1 dev dev {n * 37:5} src/module_{n}.py\n" for n in range(8))


@pytest.fixture
async def tiny(tmp_path: Path) -> AsyncIterator[Tiny]:
    async with tiny_served(tmp_path) as made:
        yield made


async def told(tiny: Tiny, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = (await tiny.ask({"tools": [LIST], **body})).json
    return answer


def cached(answer: dict[str, Any]) -> float:
    """The share of the prompt that was cached."""
    usage = answer["usage"]
    return float(usage["prompt_tokens_details"]["cached_tokens"]) / usage["prompt_tokens"]


async def test_registered_tools_are_warm_before_the_first_request(tiny: Tiny) -> None:
    registered = await tiny.client.register_tools([LIST], system=SYSTEM)
    assert [(tool.name, tool.grammar) for tool in registered.tools] == [("list_files", "exact")]
    await tiny.idle()
    assert cached(await told(tiny, messages=ASKED, max_tokens=1)) > 0.9


async def test_a_tools_output_is_computed_while_it_is_told(tiny: Tiny) -> None:
    shares = {}
    for name in ("told", "silent"):
        forced = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 128}
        first = await told(tiny, messages=ASKED, magnitude={"session": name}, **forced)
        message = first["choices"][0]["message"]
        call = message["tool_calls"][0]["id"]
        output = f"{name}\n{OUTPUT}"
        if name == "told":
            async with tiny.client.session(name).events() as events:
                await events.tool_started(call, "list_files")
                for line in output.splitlines(keepends=True):
                    await events.tool_output(call, line)
                await events.tool_finished(call)
            assert events.receipt is not None
            assert events.receipt.delivered == events.receipt.events == 11
        await tiny.idle()
        result = {"role": "tool", "tool_call_id": call, "content": output}
        messages = [*ASKED, {"role": "assistant", "content": None, "tool_calls": message["tool_calls"]}, result]
        shares[name] = cached(await told(tiny, messages=messages, magnitude={"session": name}, max_tokens=1))
    assert shares["told"] > 0.95
    assert shares["silent"] < 0.8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    lend_model(folder / "data", smollm2_path())
    with serving(folder, "--threads", "1") as running:
        yield running


@pytest.fixture
async def client(server: Server) -> AsyncIterator[MagnitudeClient]:
    async with MagnitudeClient(server.base_url) as made:
        yield made


async def test_hostile_schemas_are_refused_by_name_and_harm_nobody(server: Server, client: MagnitudeClient) -> None:
    workers = server.child("worker")
    hostile = {
        "nested": {"type": "string", "pattern": "(" * 30_000 + ")" * 30_000},
        "many": {"enum": [f"member {n}" for n in range(70_000)]},
        "far": {"$ref": "https://example.com/schema.json"},
    }
    for name, schema in hostile.items():
        tool = {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": {name: schema}}},
        }
        with pytest.raises(StatusError, match=f"tool '{name}'") as refused:
            await client.register_tools([LIST, tool])
        assert (refused.value.status, refused.value.param) == (400, "tools[1].function.parameters")
    assert server.child("worker") == workers


async def test_a_run_is_judged_shown_and_forgotten(server: Server, client: MagnitudeClient) -> None:
    for tracked in (True, False):
        await client.generate_optimized(session_id="judged", prompt="Say hello.", max_tokens=4, track_feedback=tracked)
    feedback = {"session_id": "judged", "success": False, "error_reason": "rude", "timestamp": "2100-01-01T00:00:00Z"}
    for _ in range(2):
        assert await client.submit_telemetry_feedback(feedback) == {"status": "acknowledged"}
    session = client.session("judged")
    report = await session.report()
    while report.cache is None:  # the worker answers between two steps, which is late on a busy machine
        report = await session.report()
    assert (report.steps, len(report.feedback)) == (2, 1)
    assert [(step.step, step.success) for step in report.tracked_steps] == [(0, False)]
    listed = httpx.get(f"{server.base_url}/sessions").json()["data"]
    assert report.id in [each["id"] for each in listed]
    await session.end()
    assert (await client.submit_telemetry_feedback(feedback))["status"] == "rejected"
    assert "magnitude_feedback_total" in server.metrics()


def chat(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{server.base_url}/chat/completions", json={"temperature": 0, **body}, timeout=300)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_a_prediction_is_accounted_for(server: Server) -> None:
    ask = {"messages": [{"role": "user", "content": "Count from one to twenty in words."}], "max_tokens": 48}
    plain = chat(server, ask)
    assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]
    text = plain["choices"][0]["message"]["content"]
    predicted = chat(server, {**ask, "prediction": {"type": "content", "content": text}})
    details = predicted["usage"]["completion_tokens_details"]
    assert predicted["choices"][0]["message"]["content"] == text
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0
