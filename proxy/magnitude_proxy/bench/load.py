"""A load generator for chat requests: each connection sends its next request when its answer is complete.

`python -m magnitude_proxy.bench.load SPEC` takes a `LoadSpec` as JSON and prints a `LoadResult`. It runs as a process
of its own and does as little as a Python client can: requests are prepared bytes, of an answer only its status, its
length or end mark and the stamps of `stub.py` are read. What it can do at most is its result against the bare stub.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from itertools import count
from typing import Any, cast

import msgspec

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STAMP = re.compile(rb'"content": ?"(\d{6,})"')
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
LIMIT_S = 60.0


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to ask.

    Attributes:
        body_bytes: size of each request's body, about.
        seconds: how long to measure, after `warm_s` of the same that is not counted.
        requests: measure so many instead of `seconds`, when set.
        sessions: requests take turns on so many session names; 0 gives each connection one.
        key: sent as bearer token.
    """

    host: str
    port: int
    path: str = "/v1/chat/completions"
    connections: int = 1
    body_bytes: int = 1024
    stream: bool = False
    seconds: float = 3.0
    warm_s: float = 0.5
    requests: int | None = None
    sessions: int = 0
    key: str = "none"


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in milliseconds."""

    p50: float
    p99: float
    p999: float
    mean: float


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        answered, failed: requests that got status 200 and a complete answer, and all others.
        whole: from a request's first byte out to its answer's last byte in.
        first: from a request's first byte out to the first event with text in; streams only.
        passed_on: from the stub's writing of an event to its arrival here; streams only.
        first_passed_on: the same of each stream's first event.
        cpu_s: processor time of this process.
    """

    answered: int
    failed: int
    seconds: float
    whole: Spread | None
    first: Spread | None
    passed_on: Spread | None
    first_passed_on: Spread | None
    cpu_s: float


def spread(nanoseconds: Sequence[int]) -> Spread | None:
    """Returns the distribution of `nanoseconds`, None without any; percentiles by nearest rank."""
    if not nanoseconds:
        return None
    ordered = sorted(nanoseconds)

    def rank(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e6

    return Spread(p50=rank(0.5), p99=rank(0.99), p999=rank(0.999), mean=sum(ordered) / len(ordered) / 1e6)


class Load:
    """The requests of one run and what was measured of them."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._body = _body(spec)
        self._turns = count()
        self._sent = 0
        self.whole: list[int] = []
        self.first: list[int] = []
        self.passed: list[int] = []
        self.first_passed: list[int] = []
        self.failed = 0
        self.counting = False
        self.stopped = False
        self.done = asyncio.Event()

    def request(self, connection: int) -> bytes | None:
        """Returns the next request of a connection, None when nothing is to be sent any more."""
        spec = self._spec
        if self.stopped or (self.counting and spec.requests is not None and self._sent >= spec.requests):
            return None
        self._sent += self.counting
        turn = next(self._turns) % spec.sessions if spec.sessions else connection
        head = (
            f"POST {spec.path} HTTP/1.1\r\nHost: {spec.host}:{spec.port}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {spec.key}\r\nX-Magnitude-Session: bench-{turn}\r\n"
            f"Content-Length: {len(self._body)}\r\n\r\n"
        )
        return head.encode() + self._body

    def answered(self, began: int, stamps: Sequence[tuple[int, int]], ok: bool) -> None:
        """Notes a complete answer; `stamps` are the events' times of writing and arrival."""
        if not self.counting:
            return
        if not ok:
            self.failed += 1
        else:
            self.whole.append(time.monotonic_ns() - began)
            self.passed += [arrived - written for written, arrived in stamps]
            if stamps:
                self.first.append(stamps[0][1] - began)
                self.first_passed.append(stamps[0][1] - stamps[0][0])
        if self._spec.requests is not None and len(self.whole) + self.failed >= self._spec.requests:
            self.done.set()

    def broken(self) -> None:
        """Notes a connection that was closed."""
        self.failed += self.counting
        self.done.set()


class Client(asyncio.Protocol):
    """One connection that asks again and again."""

    def __init__(self, load: Load, number: int) -> None:
        self._load = load
        self._number = number
        self._held = b""
        self._stamps: list[tuple[int, int]] = []
        self._scanned = 0
        self._began = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports are no subclass of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        if not self._load.stopped:
            self._load.broken()

    def close(self) -> None:
        """Leaves."""
        if self._transport is not None:
            self._transport.abort()

    def _ask(self) -> None:
        request = self._load.request(self._number)
        if request is None or self._transport is None:
            return
        self._held, self._scanned = b"", 0
        self._stamps = []
        self._began = time.monotonic_ns()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Looks for stamps and for the answer's end."""
        arrived = time.monotonic_ns()
        self._held += data
        end = self._held.find(_HEAD_END)
        if end < 0:
            return
        length = _LENGTH.search(self._held, 0, end)
        if length:
            complete = len(self._held) >= end + len(_HEAD_END) + int(length[1])
        else:
            complete = self._held.endswith(_LAST_CHUNK)
            for found in _STAMP.finditer(self._held, max(end, self._scanned)):
                self._stamps.append((int(found[1]), arrived))
                self._scanned = found.end()
        if complete:
            self._load.answered(self._began, self._stamps, self._held.startswith(b"HTTP/1.1 200"))
            self._ask()


def _body(spec: LoadSpec) -> bytes:
    """Returns a conversation of about `body_bytes`: a system message, and turns until it is long enough."""
    messages = [{"role": "system", "content": "You are a careful assistant that answers in one short sentence."}]
    words = "Please read the following part of the report and tell what it says about the river, the bank and the fox. "
    while len(msgspec.json.encode(messages)) < spec.body_bytes - 100:
        left = spec.body_bytes - 100 - len(msgspec.json.encode(messages))
        role = "assistant" if len(messages) % 2 == 0 else "user"
        messages.append({"role": role, "content": (words * 20)[: max(1, min(left, 1500))]})
    if messages[-1]["role"] != "user":
        messages.append({"role": "user", "content": "Go on."})
    return msgspec.json.encode({"model": "bench", "messages": messages, "max_tokens": 64, "stream": spec.stream})


async def run(spec: LoadSpec) -> LoadResult:
    """Asks as `spec` says.

    Raises:
        OSError: nobody listens there.
    """
    loop = asyncio.get_running_loop()
    load = Load(spec)
    clients = []
    for number in range(spec.connections):
        _, client = await loop.create_connection(partial(Client, load, number), spec.host, spec.port)
        clients.append(client)
    await asyncio.sleep(spec.warm_s)
    load.counting = True
    began, cpu = time.perf_counter(), time.process_time()
    try:
        async with asyncio.timeout(LIMIT_S if spec.requests is not None else spec.seconds):
            await load.done.wait()
    except TimeoutError:
        pass
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    load.counting = False
    load.stopped = True
    for client in clients:
        client.close()
    return LoadResult(
        answered=len(load.whole),
        failed=load.failed,
        seconds=seconds,
        whole=spread(load.whole),
        first=spread(load.first),
        passed_on=spread(load.passed),
        first_passed_on=spread(load.first_passed),
        cpu_s=used,
    )


def main(arguments: Sequence[str]) -> None:
    """Runs one load and prints its result."""
    work: Coroutine[Any, Any, LoadResult] = run(msgspec.json.decode(arguments[0], type=LoadSpec))
    try:
        import uvloop
    except ImportError:
        result = asyncio.run(work)
    else:
        result = uvloop.run(work)
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
