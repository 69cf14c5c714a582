"""The watchdog over real worker processes: kills, hangs, crash loops, signals, orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from testkit import scripted_worker
from testkit.engine import generate
from testkit.model import smollm2_path
from testkit.worker_client import WorkerClient
from testkit.worker_process import WorkerProcess, config, started, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WATCH = """
import logging, sys
from magnitude_engine.watchdog import WatchLimits, watch
logging.basicConfig(level="INFO")
socket, *command = sys.argv[1:]
sys.exit(watch(command, socket, WatchLimits(hang_s=2.0, start_s=60.0, grace_s=2.0)))
"""


@pytest.fixture(scope="module")
def model_path() -> Path:
    return smollm2_path()


class Watched(WorkerProcess):
    """A watchdog over scripted workers."""

    async def connected(self) -> WorkerClient:
        """Returns a connection to the present worker, once it listens."""
        async with asyncio.timeout(60):
            while True:
                try:
                    return await WorkerClient(self.socket).__aenter__()
                except (ConnectionError, FileNotFoundError):
                    await asyncio.sleep(0.05)

    async def log(self, words: str) -> None:
        """Waits for a line of the watchdog's log."""
        async with asyncio.timeout(60):
            while not any(words in line for line in self.lines):
                await asyncio.sleep(0.05)


def scripted(folder: Path, start: str = "normal") -> Watched:
    socket = folder / "w.sock"
    command = [sys.executable, scripted_worker.__file__, "--socket", str(socket), "--start", start]
    return Watched(started([sys.executable, "-c", WATCH, str(socket), *command]), socket)


async def test_a_worker_whose_steps_stand_still_is_killed(tmp_path: Path) -> None:
    watched = scripted(tmp_path)
    try:
        client = await watched.connected()
        assert client.welcome is not None
        client.send(generate("stick"))
        await watched.log("has not finished a step")
        assert await client.closed()
        client.writer.close()
        again = await watched.connected()
        assert again.welcome is not None
        assert again.welcome.pid != client.welcome.pid
        again.writer.close()
        watched.signal(signal.SIGTERM)
        assert watched.wait() == 0
    finally:
        watched.close()


async def test_a_worker_that_crashes_at_start_is_tried_again_and_again(tmp_path: Path) -> None:
    watched = scripted(tmp_path, start="crash")
    try:
        async with asyncio.timeout(60):
            while sum("starts anew" in line for line in watched.lines) < 3:
                await asyncio.sleep(0.05)
        watched.signal(signal.SIGTERM)
        assert watched.wait() == 0
    finally:
        watched.close()


def test_it_ends_with_its_parent(model_path: Path, tmp_path: Path) -> None:
    """The watchdog is the parent; killed without a chance to clean up, it takes the worker along."""
    with worker(tmp_path, config(model_path), "watch") as watchdog:
        child = watchdog.wait_ready()["pid"]
        watchdog.signal(signal.SIGKILL)
        watchdog.wait()
        for _ in range(200):
            if not alive(child):
                break
            signal.sigtimedwait([], 0.05)
        assert not alive(child)


def alive(pid: int) -> bool:
    """True while the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii").rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_the_watchdog_restarts_a_killed_worker_and_stops_on_request(model_path: Path, tmp_path: Path) -> None:
    with worker(tmp_path, config(model_path), "watch") as watchdog:
        first = watchdog.wait_ready()["pid"]
        os.kill(first, signal.SIGKILL)
        second = watchdog.wait_ready()["pid"]
        assert second != first
        watchdog.signal(signal.SIGTERM)
        assert watchdog.wait() == 0
        assert not alive(second)


async def test_the_watchdog_kills_a_worker_that_hangs(model_path: Path, tmp_path: Path) -> None:
    with worker(tmp_path, config(model_path), "watch", "--hang-s", "3") as watchdog:
        first = await asyncio.to_thread(watchdog.wait_ready)
        async with WorkerClient(watchdog.socket) as client:
            await client.status()
            await asyncio.sleep(1)
            os.kill(first["pid"], signal.SIGSTOP)
            second = await asyncio.to_thread(watchdog.wait_ready)
        assert second["pid"] != first["pid"]
        async with WorkerClient(watchdog.socket) as client:
            (answer,) = await client.answer(generate("Hi", max_tokens=3))
    assert len(answer.ids()) == 3
    assert any("no status" in line for line in watchdog.lines)
