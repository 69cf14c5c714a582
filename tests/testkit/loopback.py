"""Runs a program in a network of its own, where one port leads to a port of this host and nothing else anywhere.

async with leading_to(port, folder) as command: ...   run [*command, PROGRAM, ARGUMENTS…]
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

SIOCSIFFLAGS = 0x8914
IFF_UP = 1
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@functools.cache
def unshare() -> tuple[str, ...] | None:
    """Returns the command that gives a program a network of its own; None where that is not allowed."""
    program = shutil.which("unshare")
    if program is None:
        return None
    command = (program, "--net") if os.geteuid() == 0 else (program, "--net", "--map-root-user")
    return command if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0 else None


@asynccontextmanager
async def leading_to(port: int, folder: Path) -> AsyncIterator[list[str]]:
    """Gives what to put before a program that shall reach `127.0.0.1:port` and nothing else."""
    command, path = unshare(), folder / "out.sock"
    if command is None:
        raise RuntimeError("programs cannot be given networks of their own here")

    async def out() -> Streams:
        return await asyncio.open_connection("127.0.0.1", port)

    server = await asyncio.start_unix_server(functools.partial(_relay, out), path)
    try:
        yield [*command, sys.executable, __file__, str(path), str(port)]
    finally:
        server.close()


async def _relay(
    connect: Callable[[], Awaitable[Streams]], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with suppress(OSError):
        far_reader, far_writer = await connect()
        await asyncio.gather(_pass(reader, far_writer), _pass(far_reader, writer))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def _inside(path: str, port: int, program: list[str]) -> int:
    """Runs the program in here; returns its exit status."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        fcntl.ioctl(device, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))

    async def out() -> Streams:
        return await asyncio.open_unix_connection(path)

    server = await asyncio.start_server(functools.partial(_relay, out), "127.0.0.1", port)
    process = await asyncio.create_subprocess_exec(*program)
    status = await process.wait()
    server.close()
    return status


if __name__ == "__main__":
    sys.exit(asyncio.run(_inside(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
