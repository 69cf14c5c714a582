"""Pruning on a real engine with a tiny model: the shorter prompt is computed while the session waits for its tool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine.client.session import PrunedMessages
from magnitude_proxy.config import StoreConfig
from testkit import store
from testkit.agents import until
from testkit.tiny_served import Tiny, tiny_served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "maxLength": 4}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
}
OPENING = [{"role": "system", "content": "Look before you act."}, {"role": "user", "content": "Which city is it?"}]
RESULT = "nothing to be seen there\n" * 5


@pytest.fixture
async def tiny(tmp_path: Path) -> AsyncIterator[Tiny]:
    async with store.server("valkey", tmp_path) as server:
        kept = StoreConfig(url=server.url, timeout_s=1.0)
        async with tiny_served(tmp_path, store=kept) as made:
            yield made


class Agent:
    """Takes steps of a session, each of which calls a tool."""

    def __init__(self, tiny: Tiny, session: str, prune: list[str]) -> None:
        self.tiny = tiny
        self.session = session
        self.messages: list[dict[str, Any]] = list(OPENING)
        self.calls: list[dict[str, Any]] = []
        self._product = {"session": session, "prune": prune}

    async def step(self) -> tuple[dict[str, Any], int]:
        """Takes a step; returns its usage and the tokens that the header tells."""
        forced = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 128}
        reply = await self.tiny.ask({"messages": self.messages, "magnitude": self._product, **forced})
        self.calls = reply.json["choices"][0]["message"]["tool_calls"]
        usage: dict[str, Any] = reply.json["usage"]
        return usage, int(reply.header("x-magnitude-pruned-tokens") or 0)

    def result(self, thought: str = "") -> None:
        """Adds the answer and the tool's result to the history."""
        answer = {"role": "assistant", "content": thought, "tool_calls": self.calls}
        self.messages += [answer, {"role": "tool", "tool_call_id": self.calls[0]["id"], "content": RESULT}]

    async def pruned(self) -> tuple[PrunedMessages, ...]:
        return (await self.tiny.client.session(self.session).report()).pruned


async def test_a_dead_step_is_gone_from_the_next_prompt_which_is_computed_meanwhile(tiny: Tiny) -> None:
    agent = Agent(tiny, "run-1", ["dead-ends"])
    for _ in range(3):
        await agent.step()
        agent.result()
    await agent.step()
    async with tiny.client.session("run-1").events() as events:
        await events.step_failed("wrong place", step=0)
        # The tool of step 3 runs on; its output is told while the prompt is already another.
        await events.tool_finished(agent.calls[0]["id"], RESULT)
    while not (found := await agent.pruned()):
        await asyncio.sleep(0.01)
    await tiny.idle()
    agent.result()
    usage, told = await agent.step()
    (drop,) = found
    assert (drop.kind, drop.messages, drop.step, drop.ahead, drop.counted) == ("dead-end", (2, 3), 0, True, True)
    assert drop.reason == "step 0 failed: wrong place"
    assert told == drop.tokens == usage["magnitude"]["pruned_tokens"] > 100
    # All of it was there, but for its last tokens.
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 24
    whole = Agent(tiny, "run-2", [])
    whole.messages = agent.messages
    assert (await whole.step())[0]["prompt_tokens"] == usage["prompt_tokens"] + told


async def test_finished_thinking_leaves_in_batches_and_the_prompt_stays_cached(tiny: Tiny) -> None:
    agent = Agent(tiny, "run-1", ["thinking"])
    computed, dropped = [], []
    for _ in range(6):
        usage, told = await agent.step()
        computed.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
        dropped.append(told)
        agent.result(f"<think>{'where to look next? ' * 6}</think>")
        await tiny.idle()
    assert dropped == sorted(dropped)
    assert dropped[-1] > 100
    found = await agent.pruned()
    assert {drop.kind for drop in found} == {"thinking"}
    assert sum(drop.tokens for drop in found) >= dropped[-1]
    # What is computed of a prompt is what was said since the last one, never the history.
    assert max(computed[1:]) < 2 * len(RESULT) + 400


async def test_forgotten_history_of_a_session_that_ends_meanwhile_harms_nobody(tiny: Tiny) -> None:
    agent = Agent(tiny, "run-1", ["dead-ends"])
    for _ in range(3):
        await agent.step()
        agent.result()
    await agent.step()
    async with tiny.client.session("run-1").events() as events:
        await events.step_failed(step=0)
    await tiny.client.session("run-1").end()
    await tiny.idle()
    agent.result()
    assert (await agent.step())[1] == 0
    await until(lambda: tiny.engine.status().waiting == 0)
