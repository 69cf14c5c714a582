"""A scripted HTTP server for clients: it plays prepared replies in order and keeps what it was asked."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Reply:
    """One prepared answer: a JSON body or raw bytes; `cut` drops the connection after the body instead of ending it."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Sequence[bytes] | None = None
    cut: bool = False


def sse(*events: Any, done: bool = True) -> tuple[bytes, ...]:
    """Returns the bytes of one event per item, and of `[DONE]`."""
    texts = [json.dumps(event, ensure_ascii=False) for event in events] + (["[DONE]"] if done else [])
    return tuple(f"data: {text}\n\n".encode() for text in texts)


class ScriptedServer:
    """Replies to `METHOD /path` from its script; a path's last reply repeats."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.origin = ""
        self._script: defaultdict[str, deque[Reply]] = defaultdict(deque)
        self.play("GET /v1/models", Reply({"object": "list", "data": [{"id": "served", "object": "model"}]}))

    @property
    def base_url(self) -> str:
        """What a client takes as its endpoint."""
        return f"{self.origin}/v1"

    def play(self, route: str, *replies: Reply) -> None:
        """Replaces the script of `route`."""
        self._script[route] = deque(replies)

    def bodies(self, path: str) -> list[Any]:
        """Returns the bodies that came to `path`."""
        return [asked.body for asked in self.asked if asked.path == path]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Records the request and plays the next reply."""
        raw = await request.read()
        self.asked.append(Asked(request.method, request.path, dict(request.headers), json.loads(raw) if raw else None))
        script = self._script[f"{request.method} {request.path}"]
        if not script:
            return web.Response(status=404, text="no such route")
        reply = script.popleft() if len(script) > 1 else script[0]
        if reply.pieces is None:
            return web.json_response(reply.body, status=reply.status, headers=reply.headers)
        response = web.StreamResponse(
            status=reply.status, headers={"Content-Type": "text/event-stream", **reply.headers}
        )
        await response.prepare(request)
        for piece in reply.pieces:
            await response.write(piece)
        if reply.cut and request.transport is not None:
            request.transport.close()
        return response


@asynccontextmanager
async def scripted() -> AsyncIterator[ScriptedServer]:
    """Runs a `ScriptedServer` on a free port of this host."""
    server = ScriptedServer()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.origin = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()
