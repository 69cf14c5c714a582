"""Why prompts missed the cache, as agents of two tenants are told: a real engine, sockets and Valkey."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from magnitude_engine import MagnitudeClient
from magnitude_engine.engine import Engine
from magnitude_engine.errors import StatusError
from magnitude_engine.server import Server
from magnitude_proxy.config import StoreConfig, WorkerConfig
from magnitude_proxy.keyfile import parse_key_file
from testkit import store
from testkit.agents import until
from testkit.engine import engine_config
from testkit.proxy import Proxy, Reply, proxy_config, proxying
from testkit.tiny import tiny_model

pytestmark = pytest.mark.thorough

KEYS = parse_key_file("sk-one alice\nsk-two bob\n", "keys")
RULES = "You look before you change anything, and say what you found. "
SYSTEM = {"role": "system", "content": RULES}
TASK = {"role": "user", "content": "Find out why the parser's tests fail."}
FILES = {
    "role": "user",
    "content": "-rw-r--r-- 1 dev dev 37 src/module_1.py\n-rw-r--r-- 1 dev dev 74 src/parser.py\n" * 3,
}
SAID = {"role": "assistant", "content": "I look at the files."}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": {}}}


TOOLS = [function("list_files"), function("run_tests")]
HISTORY = [SYSTEM, TASK, SAID, FILES, SAID, {"role": "user", "content": "Go on."}]


@dataclass(frozen=True)
class Bench:
    proxy: Proxy
    engine: Engine

    async def step(self, session: str, messages: list[dict[str, Any]], key: str = "sk-one", **body: Any) -> Reply:
        asked = {"messages": messages, "max_tokens": 1, "temperature": 0, "magnitude": {"session": session}, **body}
        reply = await self.proxy.post("/chat/completions", asked, authorization=f"Bearer {key}")
        assert reply.status == 200, reply.body
        return reply

    async def miss(self, session: str, messages: list[dict[str, Any]], **body: Any) -> tuple[str, int, int] | None:
        """Takes a step; returns cause, place and wasted tokens as the header and the usage have them."""
        reply = await self.step(session, messages, **body)
        told, header = reply.json["usage"]["magnitude"].get("cache_miss"), reply.header("x-magnitude-cache-miss")
        if told is None:
            assert header is None
            return None
        assert header == f"{told['cause']}; at={told['at']}; wasted={told['wasted']}"
        return told["cause"], told["at"], told["wasted"]

    async def report(self, session: str, key: str = "sk-one") -> Reply:
        url = f"{self.proxy.url}/sessions/{session}/cache"
        return await self.proxy.get(url, authorization=f"Bearer {key}")


@asynccontextmanager
async def bench(folder: Path, pages: int = 1024) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        kept = await stack.enter_async_context(store.server("valkey", folder))
        engine = Engine(tiny_model(), engine_config(), pages=pages)
        worker = Server(engine, folder / "w.sock")
        await worker.start()
        stack.push_async_callback(worker.close)
        engine.start()
        stack.push_async_callback(asyncio.to_thread, engine.close)
        config = proxy_config(
            folder,
            worker=WorkerConfig(mode="attach", socket=str(folder / "w.sock")),
            store=StoreConfig(url=kept.url, timeout_s=1.0),
            keys=KEYS,
        )
        proxy = await stack.enter_async_context(proxying(config))
        found = proxy.running.surface.worker
        await until(lambda: found is not None and found.available())
        yield Bench(proxy, engine)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


async def test_each_cause_is_told_in_a_header_in_the_usage_and_to_the_session(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    def system(text: str) -> dict[str, Any]:
        return {"role": "system", "content": f"{text} {RULES}"}

    rest = HISTORY[1:]
    uuids = ("0d6f1c1e-7a4f-4a0e-9b43-1f1f0a7f4c11", "9d6f1c1e-1a4f-4a0e-9b43-1f1f0a7f4c11")
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "timestamp": (
            {"messages": [system("It is 2026-12-01T03:37:15Z."), *rest]},
            {"messages": [system("It is 2026-12-01T03:38:02Z."), *rest]},
        ),
        "nonce": ({"messages": [system(uuids[0]), *rest]}, {"messages": [system(uuids[1]), *rest]}),
        "tool_order": ({"messages": HISTORY, "tools": TOOLS}, {"messages": HISTORY, "tools": TOOLS[::-1]}),
        "tool_change": (
            {"messages": HISTORY, "tools": TOOLS},
            {"messages": HISTORY, "tools": [*TOOLS[:1], function("read_file"), *TOOLS[1:]]},
        ),
        "system_change": ({"messages": HISTORY}, {"messages": [system("Be brief."), *rest]}),
        "compaction": ({"messages": HISTORY}, {"messages": [*HISTORY[:2], *HISTORY[4:]]}),
        "edited_history": (
            {"messages": HISTORY},
            {"messages": [*HISTORY[:2], {"role": "assistant", "content": "What do I see?"}, *HISTORY[3:]]},
        ),
        "reserialised": (
            {"messages": HISTORY},
            {"messages": [*HISTORY[:2], {"role": "assistant", "content": "I look  at the files."}, *HISTORY[3:]]},
        ),
    }
    async with bench(tmp_path) as made:
        for cause, (before, now) in changes.items():
            await made.miss(cause, **before)
            found = await made.miss(cause, **now)
            assert found is not None
            assert found[0] == cause
            assert found[2] >= 16, found
            # Whoever goes on is told nothing.
            again = {**now, "messages": [*now["messages"], SAID, TASK]}
            assert await made.miss(cause, **again) is None
            told = (await made.report(cause)).json
            assert told["totals"]["causes"][-1] == {"cause": cause, "misses": 1, "wasted_tokens": found[2]}
            assert [step["cause"] for step in told["steps"]][1:] == [cause, None]
            (miss,) = (m for m in told["misses"] if m["cause"] == cause)
            assert (miss["position"], miss["wasted_tokens"], miss["step"]) == (found[1], found[2], 1)
            assert miss["cached_tokens"] in range(miss["position"], miss["position"] + 16)
        told = (await made.report("timestamp")).json
        text = told["misses"][-1]["text"]
        assert text["lead"].endswith("It is 2026-12-01T03:3")
        assert (text["before"][:5], text["now"][:5]) == ("7:15Z", "8:02Z")
        assert (text["token_before"], text["token_now"]) == ("7", "8")
        assert "time" in told["misses"][-1]["advice"]
        metrics = (await made.proxy.get(f"{made.proxy.admin}/metrics")).body.decode()
    for cause in changes:
        for name in ("misses", "wasted_tokens"):
            found = re.search(rf'^magnitude_cache_{name}_total{{cause="{cause}"}} (\S+)$', metrics, re.MULTILINE)
            assert found is not None
            assert float(found[1]) >= 1
    for secret in ("03:37:15", uuids[0], "parser's tests"):
        assert secret not in metrics + caplog.text


async def test_a_new_session_is_unseen_and_lost_pages_are_an_eviction(tmp_path: Path) -> None:
    async with bench(tmp_path, pages=80) as made:
        assert (await made.miss("one", HISTORY) or "")[0] == "unseen"
        assert await made.miss("one", [*HISTORY, SAID, TASK]) is None
        longer = [{**message, "content": message["content"] * 3} for message in HISTORY]
        for other in range(3):
            await made.step(f"other-{other}", [{"role": "user", "content": f"{other} "}, *longer])
        found = await made.miss("one", [*HISTORY, SAID, TASK, SAID, TASK])
        assert found is not None
        assert found[0] == "eviction"
        (miss,) = (m for m in (await made.report("one")).json["misses"] if m["cause"] == "eviction")
        assert miss["evicted_tokens"] == miss["wasted_tokens"] == found[2] > 16
        assert (miss["text"], miss["position"]) == (None, miss["cached_tokens"])


async def test_what_a_session_missed_is_nobody_elses_business(tmp_path: Path) -> None:
    async with bench(tmp_path) as made, MagnitudeClient(made.proxy.url, api_key="sk-one") as client:
        shown = (await made.step("mine", HISTORY)).header("x-magnitude-session")
        await made.step("mine", [*HISTORY[:2], *HISTORY[4:]])
        report = await client.session("mine").cache_report()
        assert (report.id, report.totals.steps) == (shown, 2)
        assert [(m.cause, m.message) for m in report.misses] == [("unseen", None), ("compaction", 3)]
        # Another tenant that says the same has never been here: it learns neither from texts nor from causes.
        for name in ("mine", shown):
            assert (await made.report(str(name), key="sk-two")).status == 404
        assert (await made.miss("mine", HISTORY, key="sk-two") or "")[0] == "unseen"
        theirs = await made.report("mine", key="sk-two")
        assert [m["cause"] for m in theirs.json["misses"]] == ["unseen"]
        assert "Find out" not in json.dumps(theirs.json)
        # A session that is ended is forgotten with its texts.
        await client.session("mine").end()
        with pytest.raises(StatusError, match="no such session"):
            await client.session("mine").cache_report()
        await made.step("mine", HISTORY)
        report = await client.session("mine").cache_report()
        assert (report.totals.steps, report.misses) == (1, ())
