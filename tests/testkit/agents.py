"""A real proxy before a scripted worker and a real store, as agents of two tenants use it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magnitude_proxy.config import StoreConfig, WorkerConfig
from magnitude_proxy.keyfile import parse_key_file
from testkit import store
from testkit.proxy import Proxy, Reply, proxy_config, proxying
from testkit.scripted_worker import ScriptedWorker

KEYS = parse_key_file("sk-one alice\nsk-two bob\n", "keys")
MESSAGES = [{"role": "user", "content": "go"}]


@dataclass(frozen=True)
class Agents:
    """`store` is None where sessions are kept in memory only."""

    proxy: Proxy
    worker: ScriptedWorker
    store: store.Server | None

    async def step(self, session: str, key: str = "sk-one", **product: Any) -> str:
        """Takes one step of a session; returns the id that the proxy shows for it."""
        body = {"messages": MESSAGES, "magnitude": {"session": session, **product}}
        reply = await self.proxy.post("/chat/completions", body, authorization=f"Bearer {key}")
        assert reply.status == 200, reply.body
        return str(reply.header("x-magnitude-session"))

    async def ask(self, method: str, path: str, body: Any = None, key: str = "sk-one", **headers: str) -> Reply:
        """Sends one request; header names with underscores for dashes, `body` as JSON or bytes."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named = {"content-type": "application/json", **named, "authorization": f"Bearer {key}"}
        url = f"{self.proxy.url}{path}"
        async with self.proxy.http.request(method, url, data=data, headers=named) as response:
            return Reply(response.status, dict(response.headers), await response.read())

    async def metric(self, name: str) -> dict[str, float]:
        """Returns the values of a counter by their labels."""
        text = (await self.proxy.get(f"{self.proxy.admin}/metrics")).body.decode()
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(f"magnitude_{name}_total"))
        return {labels.partition("{")[2].rstrip("}"): float(value) for labels, value in lines}


@asynccontextmanager
async def agents(folder: Path, *, stored: bool = True, ttl_s: float = 86_400.0) -> AsyncIterator[Agents]:
    """Runs them, with keys of the tenants alice (`sk-one`) and bob (`sk-two`)."""
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(store.server("valkey", folder)) if stored else None
        worker = ScriptedWorker(folder / "w.sock")
        await worker.start()
        stack.push_async_callback(worker.close)
        kept = StoreConfig(url=server.url if server is not None else "none", timeout_s=1.0, session_ttl_s=ttl_s)
        attached = WorkerConfig(mode="attach", socket=str(worker.socket))
        proxy = await stack.enter_async_context(proxying(proxy_config(folder, worker=attached, store=kept, keys=KEYS)))
        await until(lambda: worker.connections > 0)
        found = proxy.running.surface.worker
        await until(lambda: found is not None and found.available())
        yield Agents(proxy, worker, server)


async def until(true: Callable[[], bool]) -> None:
    """Waits until something is true."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)
