"""Pruning over real sockets, before an upstream and a real store: who asks for it sees less, nobody else does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from magnitude_proxy.config import StoreConfig
from testkit import store
from testkit.proxy import Proxy, Reply, proxy_config, proxying
from testkit.upstream import OpenAIStub

pytestmark = pytest.mark.thorough

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OPENING = [{"role": "system", "content": "You look before you act."}, {"role": "user", "content": "Which city is it?"}]
THOUGHT = f"<think>{'hm ' * 400}</think>"


@dataclass
class Agent:
    """Takes steps of one session; each is answered with a call, whose result it adds to its history."""

    proxy: Proxy
    session: str
    prune: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=lambda: list(OPENING))

    async def step(self, result: str = "nothing", **body: Any) -> Reply:
        """Takes a step and returns its answer."""
        headers = {"x_magnitude_session": self.session, **({"x_magnitude_prune": self.prune} if self.prune else {})}
        asked = {"model": "stub-model", "messages": self.messages, "tools": [TOOL], **body}
        reply = await self.proxy.post("/chat/completions", asked, **headers)
        assert reply.status == 200, reply.body
        said = reply.json["choices"][0]["message"]
        call = said["tool_calls"][0]
        self.messages = [
            *self.messages,
            {
                "role": "assistant",
                "content": f"{THOUGHT}I look.",
                "tool_calls": [call],
                "reasoning_content": "aside " * 300,
            },
            {"role": "tool", "tool_call_id": call["id"], "content": result * 40},
        ]
        return reply

    async def failed(self, step: int, reason: str) -> None:
        """Says that a step came to nothing."""
        event = {"type": "step_failed", "step": step, "reason": reason}
        reply = await self.proxy.post(f"/sessions/{self.session}/events", event)
        assert reply.status == 200, reply.body

    async def report(self) -> dict[str, Any]:
        """Returns what the proxy shows of the session."""
        shown: dict[str, Any] = (await self.proxy.get(f"/v1/sessions/{self.session}")).json
        return shown


@pytest.fixture
async def stub() -> AsyncIterator[OpenAIStub]:
    async with OpenAIStub() as upstream:
        yield upstream


@pytest.fixture(params=["valkey", "memory"])
async def proxy(request: pytest.FixtureRequest, tmp_path: Path, stub: OpenAIStub) -> AsyncIterator[Proxy]:
    if request.param == "memory":
        async with proxying(proxy_config(tmp_path, stub.url)) as made:
            yield made
        return
    async with store.server("valkey", tmp_path) as server:
        kept = StoreConfig(url=server.url, timeout_s=1.0)
        async with proxying(proxy_config(tmp_path, stub.url, store=kept)) as made:
            yield made


async def test_a_dead_step_leaves_the_prompt_and_is_written_down(proxy: Proxy, stub: OpenAIStub) -> None:
    agent = Agent(proxy, "run-1", "dead-ends")
    first = await agent.step()
    assert first.header("x-magnitude-pruned-tokens") == "0"
    assert first.json["usage"]["magnitude"]["pruned_tokens"] == 0
    await agent.step("no such file")
    await agent.failed(1, "wrong file")
    for _ in range(2):
        # The failed step is among the last messages: the model must see what became of it.
        assert (await agent.step()).header("x-magnitude-pruned-tokens") == "0"
        assert stub.requests[-1].body["messages"] == agent.messages[:-2]
    fifth = await agent.step()
    assert stub.requests[-1].body["messages"] == [*agent.messages[:4], *agent.messages[6:10]]
    (drop,) = (await agent.report())["pruned"]
    saved = drop["tokens"]
    assert saved > 50
    assert fifth.header("x-magnitude-pruned-tokens") == str(saved)
    assert fifth.json["usage"]["magnitude"]["pruned_tokens"] == saved
    assert {**drop, "at": 0, "digest": len(drop["digest"])} == {
        "kind": "dead-end", "messages": [4, 5], "digest": 32, "reason": "step 1 failed: wrong file", "step": 1,
        "branch": "main", "at": 0, "ahead": False, "tokens": saved, "counted": False,
    }  # fmt: skip
    sixth = await agent.step()
    assert stub.requests[-1].body["messages"] == [*agent.messages[:4], *agent.messages[6:12]]
    assert (await agent.report())["pruned"] == [drop]
    assert sixth.header("x-magnitude-pruned-tokens") == str(saved)
    # Whoever does not ask for it in a request sees everything in it.
    agent.prune = None
    assert (await agent.step()).header("x-magnitude-pruned-tokens") is None
    assert stub.requests[-1].body["messages"] == agent.messages[:-2]


async def test_the_steps_of_a_pruned_branch_are_dead_ends(proxy: Proxy, stub: OpenAIStub) -> None:
    agent = Agent(proxy, "run-1", "dead-ends")
    await agent.step()
    (branch,) = (await proxy.post("/sessions/run-1/branches", {})).json["data"]
    await agent.step("no such file", magnitude={"branch": branch["id"]})
    await proxy.post(f"/sessions/run-1/branches/{branch['id']}/prune", {"reason": "wrong file"})
    for _ in range(3):
        await agent.step()
    assert stub.requests[-1].body["messages"] == [*agent.messages[:4], *agent.messages[6:10]]
    (drop,) = (await agent.report())["pruned"]
    assert (drop["reason"], drop["step"]) == ("step 1 was on a pruned branch: wrong file", 1)


async def test_finished_thinking_leaves_the_prompt(proxy: Proxy, stub: OpenAIStub) -> None:
    agent = Agent(proxy, "run-1", "thinking")
    for _ in range(4):
        await agent.step()
    sent = stub.requests[-1].body["messages"]
    assert sent[2] == {**agent.messages[2], "content": "I look."}
    assert sent[3:] == agent.messages[3:8]
    # Thinking beside the text may be needed until the user speaks again.
    agent.messages.append({"role": "user", "content": "Go on."})
    await agent.step()
    sent = stub.requests[-1].body["messages"]
    assert [("reasoning_content" in m, THOUGHT in m["content"]) for m in sent if m["role"] == "assistant"] == [
        (False, False), (False, False), (False, False), (True, True)
    ]  # fmt: skip
    assert {(d["kind"], *d["messages"]) for d in (await agent.report())["pruned"]} == {
        (kind, place) for kind in ("thinking", "reasoning") for place in (2, 4, 6)
    }


async def test_what_is_not_asked_for_is_passed_on_as_it_came(proxy: Proxy, stub: OpenAIStub) -> None:
    agent = Agent(proxy, "run-1")
    for _ in range(3):
        await agent.step(seed=7)
        await agent.failed(0, "in vain")
    asked = [
        {"model": "stub-model", "messages": agent.messages[: 2 + 2 * n], "tools": [TOOL], "seed": 7, "stream": False}
        for n in range(3)
    ]
    assert [request.body for request in stub.requests] == asked
    report = await agent.report()
    assert (report["pruned"], [step["step"] for step in report["tracked_steps"]]) == ([], [0])


async def test_feedback_marks_the_steps_that_it_is_credited_to(proxy: Proxy, stub: OpenAIStub) -> None:
    agent = Agent(proxy, "run-1", "dead-ends")
    await agent.step(magnitude={"track_feedback": True})
    said = {"session_id": "run-1", "success": False, "error_reason": "no", "timestamp": "2100-01-01T00:00:00Z"}
    assert (await proxy.post("/feedback", said)).json["status"] == "acknowledged"
    for _ in range(3):
        await agent.step()
    assert stub.requests[-1].body["messages"] == [*OPENING, *agent.messages[4:8]]
    (drop,) = (await agent.report())["pruned"]
    assert (drop["reason"], drop["messages"]) == ("step 0 failed by feedback: no", [2, 3])


async def test_both_dialects_prune_and_an_ended_session_begins_anew(proxy: Proxy, stub: OpenAIStub) -> None:
    tool = {"name": "look", "input_schema": {"type": "object"}}
    asked: dict[str, Any] = {"model": "stub-model", "max_tokens": 9, "tools": [tool], "system": "Look."}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Which city is it?"}]
    product = {"session": "run-1", "prune": ["dead-ends"]}
    for step in range(4):
        reply = await proxy.post("/messages", {**asked, "messages": messages, "magnitude": product})
        assert reply.status == 200, reply.body
        if step == 0:
            await Agent(proxy, "run-1").failed(0, "")
        use = next(block for block in reply.json["content"] if block["type"] == "tool_use")
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "nothing"}
        messages = [*messages, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    assert int(reply.header("x-magnitude-pruned-tokens") or 0) == reply.json["usage"]["magnitude"]["pruned_tokens"] > 0
    assert [m["role"] for m in stub.requests[-1].body["messages"]] == ["system", "user", *["assistant", "tool"] * 2]
    assert (await proxy.http.delete(f"{proxy.url}/sessions/run-1")).status == 200
    reply = await proxy.post("/messages", {**asked, "messages": messages, "magnitude": product})
    assert len(stub.requests[-1].body["messages"]) == 10
    assert (await Agent(proxy, "run-1").report())["pruned"] == []


async def test_unknown_words_are_named(proxy: Proxy) -> None:
    body = {"model": "stub-model", "messages": OPENING}
    refused = await proxy.post("/chat/completions", body, x_magnitude_prune="thinking, all")
    assert (refused.status, refused.error["param"]) == (400, "x-magnitude-prune")
    assert "'all' is unknown; it takes dead-ends, observations, thinking" in refused.error["message"]
    refused = await proxy.post("/chat/completions", {**body, "magnitude": {"prune": ["all"]}})
    assert (refused.status, refused.error["param"]) == (400, "magnitude.prune[0]")
    assert refused.error["message"].endswith("must be one of dead-ends, observations, thinking")
    prompt = {"model": "stub-model", "prompt": "Hi", "magnitude": {"prune": ["thinking"]}}
    refused = await proxy.post("/completions", prompt)
    assert (refused.status, refused.error["param"]) == (400, "magnitude.prune")


async def test_without_the_store_nothing_more_is_dropped(tmp_path: Path, stub: OpenAIStub) -> None:
    async with store.server("valkey", tmp_path) as server:
        kept = StoreConfig(url=server.url, timeout_s=0.5)
        async with proxying(proxy_config(tmp_path, stub.url, store=kept)) as proxy:
            agent = Agent(proxy, "run-1", "dead-ends, thinking")
            for _ in range(4):
                await agent.step()
            before = stub.requests[-1].body["messages"]
            await server.kill()
            reply = await agent.step()
            assert reply.header("x-magnitude-degraded") == "store"
            # What was dropped stays dropped: the prompt only grows.
            assert stub.requests[-1].body["messages"] == [*before, *agent.messages[8:10]]
