"""An upstream that costs next to nothing: answers every chat request alike, so that a proxy before it can be timed.

`python -m magnitude_proxy.bench.stub` listens on a free port of loopback, prints it on one line and serves until it is
ended or its standard input closes. Answers and streams are OpenAI's. A streamed event carries the time at which it was
written, in nanoseconds of the monotonic clock that all processes of a machine share, so that its reader sees how long
it was under way; events after the first come `EVENT_GAP_S` apart.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import cast

EVENTS = 8
EVENT_GAP_S = 0.002
MODEL = "bench"
# A plain answer of about 1 kB.
_TEXT = "The quick brown fox jumps over the lazy dog near the river bank. " * 10
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAMED = (b'"stream":true', b'"stream": true')
_HEAD_END = b"\r\n\r\n"
_USAGE = b'{"prompt_tokens":200,"completion_tokens":%d,"total_tokens":%d}'


def whole() -> bytes:
    """Returns the response to a request that is not streamed."""
    body = (
        b'{"id":"chatcmpl-stub","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"%s","refusal":null},"logprobs":null,"finish_reason":"stop"}],'
        b'"usage":%s}' % (_TEXT.encode(), _USAGE % (EVENTS, 200 + EVENTS))
    )
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def piece(choices: bytes, usage: bytes = b"null") -> bytes:
    """Returns one event as a chunk of HTTP."""
    event = (
        b'data: {"id":"chatcmpl-stub","object":"chat.completion.chunk","created":1,"model":"bench","choices":[%s],'
        b'"usage":%s}\n\n' % (choices, usage)
    )
    return b"%x\r\n%s\r\n" % (len(event), event)


def content(stamp: int) -> bytes:
    """Returns the event whose text is `stamp`."""
    return piece(b'{"index":0,"delta":{"content":"%d"},"logprobs":null,"finish_reason":null}' % stamp)


_WHOLE = whole()
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n" + piece(
    b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
)
_STREAM_END = b"".join(
    (
        piece(b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}'),
        piece(b"", _USAGE % (EVENTS, 200 + EVENTS)),
        b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n",
    )
)
_MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","created":1,"owned_by":"stub"}]}'
_LIST = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(_MODELS), _MODELS)
# What a collector of traces answers.
_TAKEN = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n"


class Stub(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """Answers every request that is whole."""
        self._held += data
        while self._transport is not None:
            end = self._held.find(_HEAD_END)
            if end < 0:
                return
            length = _LENGTH.search(self._held, 0, end)
            size = end + len(_HEAD_END) + (int(length[1]) if length else 0)
            if len(self._held) < size:
                return
            request = bytes(self._held[:size])
            del self._held[:size]
            self._answer(request, self._transport)

    def _answer(self, request: bytes, transport: asyncio.Transport) -> None:
        if request.startswith(b"GET"):
            transport.write(_LIST)
        elif b"/traces" in request[:64]:
            transport.write(_TAKEN)
        elif any(mark in request for mark in _STREAMED):
            transport.write(_STREAM_HEAD + content(time.monotonic_ns()))
            self._later(EVENTS - 1)
        else:
            transport.write(_WHOLE)

    def _later(self, left: int) -> None:
        asyncio.get_running_loop().call_later(EVENT_GAP_S, self._next, left)

    def _next(self, left: int) -> None:
        if self._transport is None:
            return
        if not left:
            self._transport.write(_STREAM_END)
            return
        self._transport.write(content(time.monotonic_ns()))
        self._later(left - 1)


async def serve() -> None:
    """Serves until standard input ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stub, "127.0.0.1", 0, backlog=1024)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    server.close()


def main() -> None:
    """Runs the stub on the fastest loop there is."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve())
    else:
        uvloop.run(serve())


if __name__ == "__main__":
    main()
