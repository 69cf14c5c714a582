"""A real proxy before a real engine with a tiny model, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magnitude_engine import MagnitudeClient
from magnitude_engine.engine import Engine
from magnitude_engine.server import Server
from magnitude_proxy.config import WorkerConfig
from testkit.engine import engine_config
from testkit.proxy import Proxy, Reply, proxy_config, proxying
from testkit.tiny import tiny_model


@dataclass(frozen=True)
class Tiny:
    """A proxy, a client for it, and the engine behind its worker's socket."""

    proxy: Proxy
    client: MagnitudeClient
    engine: Engine

    async def ask(self, body: dict[str, Any], **headers: str) -> Reply:
        """Asks a chat, greedily."""
        reply = await self.proxy.post("/chat/completions", {"temperature": 0, **body}, **headers)
        assert reply.status == 200, reply.body
        return reply

    async def idle(self) -> None:
        """Waits until nothing has been computed ahead for half a second."""
        before, still = -1.0, 0
        while still < 5:
            now = self.engine.status().counters["warm_rows"]
            still = still + 1 if now == before else 0
            before = now
            await asyncio.sleep(0.1)


@asynccontextmanager
async def tiny_served(folder: Path, **changes: Any) -> AsyncIterator[Tiny]:
    """Runs them; `changes` are the proxy's settings."""
    engine = Engine(tiny_model(), engine_config(), pages=512)
    socket = folder / "worker.sock"
    worker = Server(engine, socket)
    await worker.start()
    engine.start()
    try:
        config = proxy_config(folder, worker=WorkerConfig(mode="attach", socket=str(socket)), **changes)
        async with proxying(config) as proxy, MagnitudeClient(proxy.url) as client:
            while (await proxy.get("/health/ready")).status != 200:
                await asyncio.sleep(0.01)
            yield Tiny(proxy, client, engine)
    finally:
        await asyncio.to_thread(engine.close)
        await worker.close()
