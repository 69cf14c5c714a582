"""Upstream servers for tests: one that plays exact bytes on a raw socket, one that behaves like OpenAI's API.

async with ScriptedServer([[HEAD, b"data: {}", RESET]]) as server: ...   server.url, server.requests
async with OpenAIStub(text="Hello world") as stub: ...                   stub.url, stub.requests
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from types import TracebackType
from typing import Any, Self

from aiohttp import web


@dataclass(frozen=True)
class Pause:
    """Send nothing for `seconds`."""

    seconds: float


class Act(Enum):
    """What a script may do besides sending bytes and pausing."""

    RESET = "reset"
    HANG = "hang"
    KEEP = "keep"


RESET = Act.RESET
HANG = Act.HANG
KEEP = Act.KEEP
Script = Sequence[bytes | Pause | Act]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def head(status: int, *headers: str, length: int | None = None) -> bytes:
    """Returns a response head; `length` may be a lie."""
    lines = [f"HTTP/1.1 {status} Scripted", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def json_answer(body: Any, status: int = 200, *headers: str) -> bytes:
    """Returns a whole response with a JSON body; the connection may be kept."""
    data = json.dumps(body).encode()
    return head(status, "Content-Type: application/json", *headers, length=len(data)) + data


def sse(*events: Any) -> bytes:
    """Returns the frames of `events`: text as it stands, everything else as JSON."""
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return "".join(f"data: {text}\n\n" for text in texts).encode()


def chunk(content: str | None = None, *, finish: str | None = None, index: int = 0, **delta: Any) -> dict[str, Any]:
    """Returns a chat chunk."""
    fields = {"content": content, **delta} if content is not None else delta
    return {"choices": [{"index": index, "delta": fields, "finish_reason": finish}]}


def chunked(data: bytes) -> bytes:
    """Returns one HTTP chunk."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def split(data: bytes, size: int = 1) -> list[bytes | Pause]:
    """Returns `data` in pieces of `size` bytes, each sent on its own."""
    pieces: list[bytes | Pause] = []
    for start in range(0, len(data), size):
        pieces += [data[start : start + size], Pause(0)]
    return pieces


class ScriptedServer:
    """Plays one script per POST, the last one again when they run out, then closes (unless KEEP); GETs get 404.

    Attributes:
        requests: each request's bytes, head and body.
        connections: how many were accepted; `aborted` how many the client closed while HANG lasted.
    """

    def __init__(self, scripts: Sequence[Script]) -> None:
        self._scripts = scripts
        self.requests: list[bytes] = []
        self.connections = 0
        self.aborted = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.connections += 1
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._exchange(reader, writer):
                pass
        writer.close()
        with suppress(ConnectionError, asyncio.CancelledError):
            await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        request = await reader.readuntil(b"\r\n\r\n")
        for line in request.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                request += await reader.readexactly(int(line.partition(b":")[2]))
        if request.startswith(b"GET "):
            # What the proxy asks in order to recognise a server; this one is none that it knows.
            writer.write(head(404, length=0))
            return True
        script = self._scripts[min(len(self.requests), len(self._scripts) - 1)]
        self.requests.append(request)
        for act in script:
            if isinstance(act, bytes):
                writer.write(act)
                await writer.drain()
            elif isinstance(act, Pause):
                await asyncio.sleep(act.seconds)
            elif act is RESET:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
                return False
            elif act is HANG:
                await reader.read()
                self.aborted += 1
                return False
            else:
                return True
        return False


@asynccontextmanager
async def refusing_url() -> AsyncIterator[str]:
    """Gives the URL of a port on which nothing listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}/v1"


@dataclass(frozen=True)
class RecordedRequest:
    """One request as the stub got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class OpenAIStub:
    """A well-behaved OpenAI-like server on 127.0.0.1: chat, completions (streamed or not) and models.

    It answers `text` word by word for every choice, or calls the first tool of a request that has `tools` with
    `arguments`. Log-probabilities and usage come as asked.

    Attributes:
        delay_s: silence before the first byte; `piece_delay_s` between the pieces of a stream.
        failures: statuses to answer first, one per request.
        owner: who owns its model, which tells servers apart; `pages` what further paths answer to GET.
        timings: llama.cpp's figures, in place of the details of usage.
        requests: what was asked; `disconnects` counts clients that left in the middle.
    """

    text: str = "Hello from upstream"
    model: str = "stub-model"
    arguments: str = '{"city": "Paris"}'
    delay_s: float = 0.0
    piece_delay_s: float = 0.0
    failures: list[int] = field(default_factory=list)
    owner: str = "stub"
    pages: dict[str, Any] = field(default_factory=dict)
    timings: dict[str, Any] | None = None
    port: int = 0
    requests: list[RecordedRequest] = field(default_factory=list)
    disconnects: int = 0

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/{page}", self._page)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        entry = {"id": self.model, "object": "model", "created": 1, "owned_by": self.owner}
        return web.json_response({"object": "list", "data": [entry]})

    async def _page(self, request: web.Request) -> web.Response:
        page = self.pages.get(request.path)
        return web.json_response({"detail": "Not Found"}, status=404) if page is None else web.json_response(page)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(RecordedRequest(request.path, dict(request.headers), body))
        if self.failures:
            status = self.failures.pop(0)
            error = {"message": f"scripted {status}", "type": "server_error", "param": None, "code": None}
            return web.json_response({"error": error}, status=status)
        try:
            await asyncio.sleep(self.delay_s)
            chat = request.path.endswith("/chat/completions")
            if body.get("stream"):
                return await self._stream(request, body, chat)
        except (asyncio.CancelledError, ConnectionError):
            self.disconnects += 1
            raise
        return web.json_response(self._whole(body, chat))

    def _pieces(self) -> list[str]:
        words = self.text.split(" ")
        return [word if place == 0 else f" {word}" for place, word in enumerate(words)]

    def _usage(self, body: dict[str, Any]) -> dict[str, Any]:
        completion = len(self._pieces()) * int(body.get("n") or 1)
        details = {"cached_tokens": 2, "audio_tokens": 0}
        told = {"prompt_tokens": 5, "completion_tokens": completion, "total_tokens": 5 + completion}
        return told if self.timings is not None else {**told, "prompt_tokens_details": details}

    def _whole(self, body: dict[str, Any], chat: bool) -> dict[str, Any]:
        choices = []
        for index in range(int(body.get("n") or 1)):
            choice: dict[str, Any] = {"index": index, "finish_reason": "stop", "logprobs": None}
            if not chat:
                choice["text"] = self.text
                if body.get("logprobs") is not None:
                    choice["logprobs"] = _text_logprobs(self._pieces())
            elif body.get("tools"):
                call = {"id": "call_1", "type": "function", "function": self._function(body)}
                choice["message"] = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
                choice["finish_reason"] = "tool_calls"
            else:
                choice["message"] = {"role": "assistant", "content": self.text, "refusal": None}
                if body.get("logprobs"):
                    choice["logprobs"] = {"content": [_logprob(p) for p in self._pieces()], "refusal": None}
            choices.append(choice)
        return {**self._envelope(chat, False), "choices": choices, "usage": self._usage(body), **self._measured()}

    def _measured(self) -> dict[str, Any]:
        return {} if self.timings is None else {"timings": self.timings}

    def _function(self, body: dict[str, Any]) -> dict[str, str]:
        return {"name": body["tools"][0]["function"]["name"], "arguments": self.arguments}

    def _envelope(self, chat: bool, stream: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if stream else "chat.completion") if chat else "text_completion"
        return {"id": "stub-1", "object": kind, "created": 1, "model": self.model}

    def _chunks(self, body: dict[str, Any], chat: bool) -> list[dict[str, Any]]:
        """Returns the choices of a stream in order, one per chunk."""
        chunks: list[dict[str, Any]] = []
        for index in range(int(body.get("n") or 1)):
            base = {"index": index, "logprobs": None, "finish_reason": None}
            if not chat:
                for piece in self._pieces():
                    logprobs = _text_logprobs([piece]) if body.get("logprobs") is not None else None
                    chunks.append({**base, "text": piece, "logprobs": logprobs})
                chunks.append({**base, "text": "", "finish_reason": "stop"})
                continue
            chunks.append({**base, "delta": {"role": "assistant", "content": "", "refusal": None}})
            if body.get("tools"):
                name = self._function(body)["name"]
                opening = {"index": 0, "id": "call_1", "type": "function", "function": {"name": name, "arguments": ""}}
                chunks.append({**base, "delta": {"tool_calls": [opening]}})
                for piece in (self.arguments[:4], self.arguments[4:]):
                    call = {"index": 0, "function": {"arguments": piece}}
                    chunks.append({**base, "delta": {"tool_calls": [call]}})
                chunks.append({**base, "delta": {}, "finish_reason": "tool_calls"})
                continue
            for piece in self._pieces():
                logprobs = {"content": [_logprob(piece)], "refusal": None} if body.get("logprobs") else None
                chunks.append({**base, "delta": {"content": piece}, "logprobs": logprobs})
            chunks.append({**base, "delta": {}, "finish_reason": "stop"})
        return chunks

    async def _stream(self, request: web.Request, body: dict[str, Any], chat: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        envelope = self._envelope(chat, True)
        for choice in self._chunks(body, chat):
            await response.write(sse({**envelope, "choices": [choice], "usage": None}))
            await asyncio.sleep(self.piece_delay_s)
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(sse({**envelope, "choices": [], "usage": self._usage(body), **self._measured()}))
        await response.write(sse("[DONE]"))
        await response.write_eof()
        return response


def _logprob(piece: str) -> dict[str, Any]:
    alternative = {"token": piece, "logprob": -0.25, "bytes": list(piece.encode())}
    return {**alternative, "top_logprobs": [alternative, {"token": "x", "logprob": -2.0, "bytes": [120]}]}


def _text_logprobs(pieces: list[str]) -> dict[str, Any]:
    return {
        "tokens": pieces,
        "token_logprobs": [-0.25] * len(pieces),
        "top_logprobs": [{piece: -0.25, "x": -2.0} for piece in pieces],
        "text_offset": [0] * len(pieces),
    }
