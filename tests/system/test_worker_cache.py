"""A real worker with SmolLM2 and a folder for its cache: killed, restarted, refused, and on disks that take nothing."""

from __future__ import annotations

import asyncio
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS
from testkit.engine import Recorder, generate
from testkit.model import smollm2_path
from testkit.worker_client import WorkerClient
from testkit.worker_process import WorkerProcess, config, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

# Ids and not text, so that what was said is the same tokens when it comes back in the next prompt.
TURNS = tuple(
    tuple(random.Random(turn).choices(range(100, 40_000), k=size)) for turn, size in enumerate((150, 60, 60, 9))
)
TOKENS = 12
PATIENCE_S = 60.0


class Session:
    """A session whose every prompt is its last one, its answer, and a new turn."""

    def __init__(self) -> None:
        self.history: tuple[int, ...] = ()
        self.answers: list[Recorder] = []

    async def step(self, running: WorkerProcess) -> Recorder:
        """Sends the next turn."""
        self.history += TURNS[len(self.answers)]
        async with WorkerClient(running.socket) as client:
            (answer,) = await client.answer(generate(self.history, session="s", max_tokens=TOKENS))
        assert answer.failed is None
        self.answers.append(answer)
        self.history += tuple(answer.ids())
        return answer

    def ids(self) -> list[list[int]]:
        """Returns the ids of all answers."""
        return [answer.ids() for answer in self.answers]


async def disk(running: WorkerProcess) -> api.TierUse:
    """Asks what is on disk."""
    async with WorkerClient(running.socket) as client:
        client.send(api.Inspect())
        while True:
            event = await client.event()
            if isinstance(event, api.CacheReport):
                (use,) = [tier for tier in event.tiers if tier.name == "disk"]
                return use


async def until(running: WorkerProcess, true: Callable[[api.TierUse], bool]) -> api.TierUse:
    """Waits until the disk tier's figures are so."""
    async with asyncio.timeout(PATIENCE_S):
        while not true(use := await disk(running)):
            await asyncio.sleep(0.1)
    return use


def settings(model: Path, folder: Path, **more: Any) -> dict[str, Any]:
    return config(model, **{"kv_disk_mb": 256, "kv_dir": str(folder), **more})


@pytest.fixture(scope="module")
def model_path() -> Path:
    return smollm2_path()


@pytest.fixture(scope="module")
def expected(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The session's answers where every prompt is computed anew."""
    session = Session()

    async def steps(running: WorkerProcess) -> None:
        for _ in TURNS:
            await session.step(running)

    with worker(tmp_path_factory.mktemp("cold"), config(model_path, optimization_level="off")) as running:
        running.wait_ready()
        asyncio.run(steps(running))
    assert [answer.usage.cached_tokens for answer in session.answers] == [0] * len(TURNS)
    return session.ids()


async def test_a_session_goes_on_after_kill_9(model_path: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    folder, session = tmp_path / "kv", Session()
    with worker(tmp_path / "1", settings(model_path, folder)) as running:
        running.wait_ready()
        for _ in TURNS[:-1]:
            answer = await session.step(running)
        computed = answer.usage.prompt_tokens + TOKENS - 1
        await until(running, lambda use: use.blocks >= computed // PAGE_TOKENS)
        running.signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
    with worker(tmp_path / "2", settings(model_path, folder)) as again:
        again.wait_ready()
        answer = await session.step(again)
        use = await disk(again)
    assert session.ids() == expected
    full = computed // PAGE_TOKENS * PAGE_TOKENS
    print(f"{answer.usage.cached_disk_tokens} of {full} tokens came from disk after kill -9")
    assert answer.usage.cached_disk_tokens >= 0.99 * full
    assert use.rejected == 0


async def test_a_session_goes_on_after_sigterm(model_path: Path, tmp_path: Path, expected: list[list[int]]) -> None:
    """A worker that is told to stop at once after an answer writes what is not on disk yet."""
    folder, session = tmp_path / "kv", Session()
    with worker(tmp_path / "1", settings(model_path, folder)) as running:
        running.wait_ready()
        for _ in TURNS[:-1]:
            answer = await session.step(running)
        running.signal(signal.SIGTERM)
        # The next one comes up while the first still writes.
        with worker(tmp_path / "2", settings(model_path, folder)) as again:
            again.wait_ready()
            computed = answer.usage.prompt_tokens + TOKENS - 1
            answer = await session.step(again)
        assert running.wait() == 0
    assert session.ids() == expected
    assert answer.usage.cached_disk_tokens >= 0.99 * (computed // PAGE_TOKENS * PAGE_TOKENS)


async def test_a_second_worker_on_the_folder_is_told_what_to_do(
    model_path: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    folder, session = tmp_path / "kv", Session()
    with worker(tmp_path / "1", settings(model_path, folder)) as running:
        running.wait_ready()
        with worker(tmp_path / "2", settings(model_path, folder)) as second:
            assert await asyncio.to_thread(second.wait) == 2
        line = second.lines[-1]
        assert line.startswith("magnitude worker: ")
        assert f"pid {running.process.pid}" in line
        assert str(folder) in line
        assert "give this one another folder" in line
        assert "Traceback" not in "".join(second.lines)
        await session.step(running)
    assert session.ids() == expected[:1]


def files_stay_small(running: WorkerProcess, folder: Path) -> None:
    """No file may grow past 64 KiB from now on."""
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (65_536, 65_536))


def folder_is_gone(running: WorkerProcess, folder: Path) -> None:
    """There is a file now where the folder was."""
    shutil.rmtree(folder)
    folder.write_text("in the way")


@pytest.mark.parametrize("trouble", [files_stay_small, folder_is_gone])
async def test_a_disk_that_takes_nothing_fails_no_request(
    model_path: Path, tmp_path: Path, expected: list[list[int]], trouble: Callable[[WorkerProcess, Path], None]
) -> None:
    folder, session = tmp_path / "kv", Session()
    with worker(tmp_path / "1", settings(model_path, folder)) as running:
        running.wait_ready()
        trouble(running, folder)
        for _ in TURNS:
            await session.step(running)
        use = await until(running, lambda use: use.failed_writes > 0)
        running.signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.wait) == 0
    assert use.blocks == 0
    assert session.ids() == expected
    assert [answer.usage.cached_tokens > 0 for answer in session.answers] == [False, True, True, True]


async def test_a_disk_with_room_for_one_block_fails_no_request(
    model_path: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    session = Session()
    with worker(tmp_path / "1", settings(model_path, tmp_path / "kv", kv_disk_mb=1)) as running:
        running.wait_ready()
        for _ in TURNS:
            await session.step(running)
        use = await until(running, lambda use: use.blocks == 1)
    assert use.bytes <= use.limit_bytes
    assert session.ids() == expected
