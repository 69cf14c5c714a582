"""Tools registered ahead, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import api
from testkit.agents import Agents, agents, until
from testkit.proxy import proxy_config, proxying


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Agents]:
    async with agents(tmp_path, stored=False) as running:
        yield running


def tool(name: str, **parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **parameters}}}


async def test_tools_are_registered_for_their_tenant(made: Agents) -> None:
    reply = await made.ask("POST", "/tools", {"tools": [tool("a", title="x"), tool("odd")], "system": "Be brief."})
    assert reply.json == {
        "object": "list",
        "data": [
            {"object": "tool", "name": "a", "status": "compiled", "grammar": "exact", "checked_keywords": []},
            {
                "object": "tool",
                "name": "odd",
                "status": "compiled",
                "grammar": "checked",
                "checked_keywords": ["not at #"],
            },
        ],
        "ignored_keywords": [],
        "prefix": "queued",
    }
    await made.ask("POST", "/tools", {"tools": [tool("a")]}, "sk-two")
    first, second = made.worker.registered
    assert (first.system, first.tools[0]) == (
        "Be brief.",
        api.Tool(name="a", parameters={"type": "object", "title": "x"}),
    )
    await made.step("run-1")
    assert first.tenant == made.worker.generated[0].tenant != second.tenant
    assert await made.metric("tools_registered") == {'status="compiled"': 2}


async def test_a_schema_that_cannot_be_used_is_a_400_that_names_tool_and_keyword(made: Agents) -> None:
    reply = await made.ask("POST", "/tools", {"tools": [tool("a"), tool("bad")]})
    assert (reply.status, reply.error["param"]) == (400, "tools[1].function.parameters")
    assert reply.error["message"].startswith("tool 'bad': tools[1].function.parameters cannot be used: not is unknown")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [tool("a"), tool("a")]}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [], "system": 5}, "system"),
    ],
)
async def test_what_is_no_registration_is_a_400(made: Agents, body: dict[str, Any], param: str) -> None:
    reply = await made.ask("POST", "/tools", body)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert made.worker.registered == []


async def test_registrations_at_once_are_bounded_per_tenant(made: Agents) -> None:
    slow = [asyncio.create_task(made.ask("POST", "/tools", {"tools": [tool("slow")]})) for _ in range(2)]
    await until(lambda: len(made.worker.registered) == 2)
    refused = await made.ask("POST", "/tools", {"tools": [tool("a")]})
    assert (refused.status, refused.header("retry-after")) == (429, "1")
    assert (await made.ask("POST", "/tools", {"tools": [tool("a")]}, "sk-two")).status == 200
    made.worker.go_on.set()
    assert [reply.status for reply in await asyncio.gather(*slow)] == [200, 200]


async def test_a_worker_that_is_lost_or_absent_is_told(made: Agents, tmp_path: Path) -> None:
    slow = asyncio.create_task(made.ask("POST", "/tools", {"tools": [tool("slow")]}))
    await until(lambda: len(made.worker.registered) == 1)
    await made.worker.close()
    lost = await slow
    assert (lost.status, lost.error["code"]) == (503, "worker_lost")
    async with proxying(proxy_config(tmp_path / "other", "http://127.0.0.1:9/v1")) as proxy:
        none = await proxy.post("/tools", {"tools": [tool("a")]})
        assert (none.status, none.error["code"]) == (404, "no_worker")
