"""A time in the system prompt, on a real worker with SmolLM2: what it costs is told to the token."""

from __future__ import annotations

from pathlib import Path

import pytest

from magnitude_engine import api
from testkit.engine import generate
from testkit.model import smollm2_path
from testkit.worker_client import WorkerClient
from testkit.worker_process import config, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RULES = "You are a careful assistant. Look before you change anything, and say what you found. " * 12
NAMES = ("list_files", "read_file", "run_tests", "write_file")
TOOLS = tuple(
    api.Tool(
        name=name,
        description=f"Does what {name} says in a folder, and returns what came of it as text.",
        parameters={"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    )
    for name in NAMES
)


def step(number: int, time: str, *texts: str, tenant: str = "t") -> api.Generate:
    said = (
        api.Message(role=role, content=text)
        for role, text in zip(("user", "assistant") * 9, ("Which files are there?", *texts), strict=False)
    )
    system = api.Message(role="system", content=f"The time is 2026-12-01 {time}.\n{RULES}")
    chat = api.ChatInput(messages=(system, *said), tools=TOOLS, tool_choice=api.ToolChoice(mode="none"))
    return generate(chat, session="agent", step=number, max_tokens=2, tenant=tenant)


async def test_a_time_wastes_all_that_follows_it(tmp_path: Path) -> None:
    with worker(tmp_path, config(smollm2_path())) as running:
        running.wait_ready()
        async with WorkerClient(running.socket) as client:
            (first,) = await client.answer(step(0, "03:37:15"))
            (second,) = await client.answer(step(1, "03:37:16", "Twelve.", "And tests?"))
            (third,) = await client.answer(step(2, "03:37:16", "Twelve.", "And tests?", "Three.", "Thanks."))
            client.send(api.AskMisses(request="why", epoch=0, tenant="t", session="agent"))
            told = await client.until(api.SessionMisses)
            client.send(api.AskMisses(request="whose", epoch=0, tenant="u", session="agent"))
            other = await client.until(api.SessionMisses)
    assert first.started.miss is not None
    assert (first.started.miss.cause, first.started.miss.wasted) == ("unseen", 0)
    miss = second.started.miss
    assert miss is not None
    assert miss == second.usage.miss
    assert (miss.cause, miss.at) == ("timestamp", second.usage.cached_tokens)
    # Its last digit is a token of its own: the rest of the first prompt, its last line included, stands in the second.
    assert miss.wasted == first.usage.prompt_tokens - miss.at - 1 > 500
    assert third.started.miss is None
    assert third.usage.cached_tokens >= second.usage.prompt_tokens
    assert isinstance(told, api.SessionMisses)
    assert [m.miss.cause for m in told.misses] == ["unseen", "timestamp"]
    text = told.misses[1].text
    assert text is not None
    assert (text.token_before, text.token_now, text.lead[-30:]) == ("5", "6", "The time is 2026-12-01 03:37:1"[-30:])
    assert text.now.startswith("6.\nYou are a careful assistant.")
    assert [(s.step, s.cause, s.cached_tokens) for s in told.steps][1:] == [
        (1, "timestamp", miss.at),
        (2, None, third.usage.cached_tokens),
    ]
    assert isinstance(other, api.SessionMisses)
    assert (other.step_count, other.steps, other.misses) == (0, (), ())
