"""A real proxy on real sockets for tests: no worker, upstreams of the test's choice, the store in memory or real."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from magnitude_proxy.access import KeyRing, server_secret
from magnitude_proxy.app import Bound, Running, running
from magnitude_proxy.catalogue import Catalogue
from magnitude_proxy.config import (
    ListenConfig,
    ProxyConfig,
    StoreConfig,
    UpstreamConfig,
    WorkerConfig,
)
from magnitude_proxy.listener import admin_application, api_application, bind, listen
from magnitude_proxy.routing.fallback import Dispatcher
from magnitude_proxy.routing.route import Route
from magnitude_proxy.session import Sessions
from magnitude_proxy.surface import Surface
from magnitude_proxy.telemetry import Telemetry
from testkit import wire

ASK: dict[str, Any] = {"model": "stub-model", "messages": [{"role": "user", "content": "Hi"}]}


def proxy_config(folder: Path, *upstreams: str, **changes: Any) -> ProxyConfig:
    """Returns settings with free ports, sessions in memory, no worker, and `upstreams` (URLs) named u0, u1, …"""
    config = ProxyConfig(
        data_dir=str(folder / "data"),
        listen=ListenConfig(port=0, admin_port=0),
        worker=WorkerConfig(mode="none"),
        store=StoreConfig(url="none"),
        upstreams=tuple(UpstreamConfig(name=f"u{i}", url=url) for i, url in enumerate(upstreams)),
    )
    return msgspec.structs.replace(config, **changes)


@dataclass(frozen=True)
class Proxy:
    """A running proxy and a client for it."""

    running: Running
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        """The `base_url`."""
        return self.running.bound.url

    @property
    def origin(self) -> str:
        """The URL without a path."""
        return self.running.bound.origin

    @property
    def admin(self) -> str:
        """The URL of the second listener."""
        return f"http://127.0.0.1:{self.running.bound.admin_port}"

    async def post(self, path: str, body: Any, **headers: str) -> Reply:
        """Posts `body` as JSON (bytes as they stand); header names with underscores for dashes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        named.setdefault("content-type", "application/json")
        async with self.http.post(f"{self.url}{path}", data=data, headers=named) as response:
            return Reply(response.status, dict(response.headers), await response.read())

    async def get(self, url: str, **headers: str) -> Reply:
        """Gets `url`, a path of the public listener or a whole one."""
        whole = url if url.startswith("http") else f"{self.origin}{url}"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.get(whole, headers=named) as response:
            return Reply(response.status, dict(response.headers), await response.read())

    async def raw(self, data: bytes, *, end: bool = False) -> Reply:
        """Sends bytes on a connection of its own and returns the response; `end` closes the sending half."""
        return (await self.raw_all(data, end=end))[0]

    async def raw_all(self, data: bytes, *, end: bool = False) -> list[Reply]:
        """Sends bytes on a connection of its own, reads until the server closes it, returns the responses."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.running.bound.port)
        try:
            writer.write(data)
            if end:
                writer.write_eof()
            answered = await asyncio.wait_for(_responses(reader), 10)
        finally:
            writer.close()
        return answered


@dataclass(frozen=True)
class Reply:
    """One HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The parsed body."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """What stands under `error`, checked."""
        return wire.check_error(self.json)

    @property
    def events(self) -> list[Any]:
        """The events of a stream: parsed data, `[DONE]` as that text; comments are left out."""
        found: list[Any] = []
        for block in self.body.decode().split("\n\n"):
            if block.startswith("data: "):
                data = block.removeprefix("data: ")
                found.append(data if data == "[DONE]" else json.loads(data))
        return found

    def header(self, name: str) -> str | None:
        """Returns a header in any case."""
        return next((value for key, value in self.headers.items() if key.lower() == name.lower()), None)


async def _responses(reader: asyncio.StreamReader) -> list[Reply]:
    """Reads one response with a length; more are not expected on a connection that is closed."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").rstrip().split("\r\n")
    headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
    length = int(next(v for k, v in headers.items() if k.lower() == "content-length"))
    return [Reply(int(first.split()[1]), headers, await reader.readexactly(length))]


@asynccontextmanager
async def proxying(config: ProxyConfig, *, grace_s: float = 0.5) -> AsyncIterator[Proxy]:
    """Runs a proxy."""
    async with running(config, grace_s=grace_s) as proxy, aiohttp.ClientSession(auto_decompress=False) as http:
        yield Proxy(proxy, http)


@asynccontextmanager
async def routing(config: ProxyConfig, *routes: Route) -> AsyncIterator[Proxy]:
    """Runs the HTTP surface over `routes` instead of those of the settings; no worker process, real sockets."""
    telemetry = Telemetry(config.telemetry)
    folder = Path(config.data_dir)
    sessions = Sessions(config.store, folder, telemetry)
    surface = Surface(
        config=config,
        keys=KeyRing(config.keys, server_secret(folder), config.limits),
        sessions=sessions,
        dispatcher=Dispatcher(routes, config.deadlines, config.retry, telemetry, time.monotonic),
        catalogue=Catalogue(config.worker, config.upstreams, lambda: None, 1),
        telemetry=telemetry,
    )
    public = await listen(api_application(surface), bind("127.0.0.1", 0, "--port"))
    admin = await listen(admin_application(surface), bind("127.0.0.1", 0, "--admin-port"))
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as http:
            bound = Bound(public.port, admin.port, f"http://127.0.0.1:{public.port}")
            yield Proxy(Running(bound, surface), http)
    finally:
        await public.cleanup()
        await admin.cleanup()
        telemetry.close()
