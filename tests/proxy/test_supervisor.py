"""The supervisor over real worker processes: started, watched, killed, started again, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from magnitude_engine import api
from magnitude_engine.config import EngineConfig
from magnitude_proxy.config import TelemetryConfig, WorkerConfig
from magnitude_proxy.routing.route import Step
from magnitude_proxy.telemetry import Telemetry
from magnitude_proxy.worker.local import LocalRoute, Pulse
from magnitude_proxy.worker.supervisor import (
    EXIT_REFUSED,
    HEALTHY_S,
    RESTART_FIRST_S,
    RESTART_MOST_S,
    Limits,
    Supervisor,
    judge,
    next_pause,
    worker_command,
    worker_socket,
)
from testkit import supervised
from testkit.model import smollm2_path
from testkit.supervised import Supervised, running

LOADING_S = 180.0
LIMITS = Limits(start_s=30.0, hang_s=5.0)


def test_pauses_grow_to_a_limit_and_a_healthy_minute_forgives() -> None:
    pauses = [0.0]
    for _ in range(10):
        pauses.append(next_pause(pauses[-1], lived_s=1.0, status=1))
    assert pauses[1:4] == [RESTART_FIRST_S, 2 * RESTART_FIRST_S, 4 * RESTART_FIRST_S]
    assert pauses[-1] == RESTART_MOST_S
    assert next_pause(RESTART_MOST_S, HEALTHY_S, status=-9) == RESTART_FIRST_S
    assert next_pause(0.0, 1.0, EXIT_REFUSED) == RESTART_MOST_S


@pytest.mark.parametrize(
    ("pulse", "unreached_s", "was_ready", "verdict"),
    [
        (Pulse(1, 0.1, 0.1), 0.0, True, "fine"),
        (Pulse(1, 5.0, 0.1), 0.0, True, "hung"),
        (Pulse(1, 0.1, 5.0), 0.0, True, "hung"),
        (Pulse(2, 99.0, 99.0), 1.0, True, "fine"),
        (Pulse(None, 99.0, 99.0), 29.9, False, "fine"),
        (Pulse(None, 99.0, 99.0), 30.0, False, "not_ready"),
        (Pulse(None, 0.0, 0.0), 4.9, True, "fine"),
        (Pulse(None, 0.0, 0.0), 5.0, True, "hung"),
    ],
)
def test_verdicts(pulse: Pulse, unreached_s: float, was_ready: bool, verdict: str) -> None:
    assert judge(pulse, 1, unreached_s, was_ready, LIMITS) == verdict


async def until(check: Callable[[], object], limit_s: float = 40.0) -> None:
    async with asyncio.timeout(limit_s):
        while not check():
            await asyncio.sleep(0.01)


def gone(pid: int) -> bool:
    """True when there is no such process, not even a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
async def test_a_killed_worker_is_followed_by_another_and_stop_leaves_none(tmp_path: Path) -> None:
    async with running(Supervised(tmp_path)) as b:
        await until(b.route.available)
        first = b.supervisor.pid
        assert first is not None
        assert isinstance(await b.answer("2"), api.Completed)
        lost = await b.answer("2 die")
        assert isinstance(lost, api.Failed)
        assert lost.code == "worker_lost"
        await until(lambda: b.supervisor.failure)
        assert b.supervisor.failure == "the worker ended with status 3: listening"
        await until(lambda: b.supervisor.pid not in (None, first) and b.route.available())
        second = b.supervisor.pid
        assert second is not None
        assert isinstance(await b.answer("2"), api.Completed)
        assert (b.counted("worker_starts"), b.counted("worker_hangs"), b.supervisor.restarts) == (2, 0, 1)
    assert gone(first)
    assert gone(second)
    assert b.supervisor.pid is None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["hang", "stick"])
async def test_a_worker_without_progress_is_killed(tmp_path: Path, how: str) -> None:
    async with running(Supervised(tmp_path, hang_s=1.5)) as b:
        await until(b.route.available)
        first = b.supervisor.pid
        failed = await b.answer(how)
        assert isinstance(failed, api.Failed)
        assert failed.retryable
        await until(lambda: b.supervisor.pid not in (None, first) and b.route.available())
        assert b.counted("worker_hangs") == 1
        assert isinstance(await b.answer("1"), api.Completed)


@pytest.mark.slow
async def test_a_stopped_worker_is_killed(tmp_path: Path) -> None:
    async with running(Supervised(tmp_path, hang_s=1.5)) as b:
        await until(b.route.available)
        first = b.supervisor.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        await until(lambda: gone(first))
        await until(b.route.available)
        assert b.counted("worker_hangs") == 1


@pytest.mark.slow
async def test_a_worker_that_never_becomes_ready_is_killed(tmp_path: Path) -> None:
    async with running(Supervised(tmp_path, start="mute", hang_s=1.0, start_s=0.5)) as b:
        await until(lambda: b.supervisor.failure)
        assert b.supervisor.failure == "the worker was not ready after 0.5 s and was killed"
        assert b.counted("worker_hangs") == 0
        await until(lambda: b.supervisor.restarts >= 1)


@pytest.mark.slow
async def test_a_refused_model_is_said_and_not_tried_in_a_loop(tmp_path: Path) -> None:
    async with running(Supervised(tmp_path, start="refuse")) as b:
        await until(lambda: b.supervisor.failure)
        assert b.supervisor.failure == "the worker ended with status 2: model x.gguf has no tokenizer"
        await asyncio.sleep(0.5)
        assert b.counted("worker_starts") == 1


@pytest.mark.slow
async def test_a_crashing_worker_is_tried_ever_more_slowly(tmp_path: Path) -> None:
    async with running(Supervised(tmp_path, start="crash")) as b:
        await until(lambda: b.supervisor.restarts >= 3)
        assert b.supervisor.failure == "the worker ended with status 1"
        assert b.supervisor.restarts <= b.counted("worker_starts") <= b.supervisor.restarts + 1


@pytest.mark.slow
async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    route = LocalRoute(tmp_path / "s", Telemetry(TelemetryConfig()), hang_s=1.0)
    command = (str(tmp_path / "absent"),)
    supervisor = Supervisor(WorkerConfig(), command, route.pulse, Telemetry(TelemetryConfig()))
    await supervisor.start()
    await until(lambda: supervisor.failure)
    assert "cannot be started" in (supervisor.failure or "")
    await supervisor.stop()


@pytest.mark.slow
async def test_no_worker_outlives_a_killed_proxy(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, supervised.__file__, str(tmp_path)),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(supervised.__file__).parents[1])},
    )
    try:
        worker = int(await parent.stdout.readline()) if parent.stdout else 0
        assert not gone(worker)
        parent.kill()
        await parent.wait()
        await until(lambda: gone(worker) or _zombie(worker))
    finally:
        with contextlib.suppress(ProcessLookupError):
            parent.kill()


def _zombie(pid: int) -> bool:
    """True when it has ended but whoever inherited it (a container's first process) has not reaped it."""
    with contextlib.suppress(FileNotFoundError):
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    return True


def test_the_workers_command_carries_its_settings(tmp_path: Path) -> None:
    engine = EngineConfig(model_path="m.gguf", threads=2)
    command = worker_command(engine, tmp_path / "w.sock")
    assert command[:3] == (sys.executable, "-m", "magnitude_engine.main")
    given = dict(zip(command[3:-1:2], command[4:-1:2], strict=True))
    assert msgspec.json.decode(given["--config"], type=EngineConfig) == engine
    assert given["--socket"] == str(tmp_path / "w.sock")
    assert command[-1] == "--parent-death"


def test_worker_sockets_are_private_and_dead_ones_are_removed(tmp_path: Path) -> None:
    first = worker_socket(tmp_path)
    assert first.parent.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(first))
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(first.with_name("alive.sock")))
        alive.listen()
        assert worker_socket(tmp_path) != first
        assert [path.name for path in first.parent.iterdir()] == ["alive.sock"]


@asynccontextmanager
async def real_worker(folder: Path, model: Path) -> AsyncIterator[tuple[Supervisor, LocalRoute]]:
    """The product's own worker, spawned as the proxy spawns it."""
    telemetry = Telemetry(TelemetryConfig())
    path = worker_socket(folder)
    route = LocalRoute(path, telemetry, hang_s=60.0)
    engine = EngineConfig(model_path=str(model), model_name="real", threads=2, kv_memory_mb=64)
    supervisor = Supervisor(WorkerConfig(hang_s=60.0), worker_command(engine, path), route.pulse, telemetry)
    await supervisor.start()
    await route.start()
    try:
        yield supervisor, route
    finally:
        await route.close()
        await supervisor.stop()


def chat(request: str, max_tokens: int) -> Step:
    asked = api.Generate(
        request=request,
        epoch=1,
        tenant="00",
        session="s",
        input=api.ChatInput(messages=(api.Message(role="user", content="Count to fifty in words."),)),
        sampling=api.Sampling(temperature=0.0),
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    return Step(kind="chat", request=asked, body={}, stream=True)


@pytest.mark.slow
@pytest.mark.timeout(420)
async def test_the_real_worker_answers_dies_and_answers_again(tmp_path: Path) -> None:
    async with real_worker(tmp_path, smollm2_path()) as (supervisor, route):
        await until(route.available, LOADING_S)
        assert route.card is not None
        assert route.card.name == "real"
        first = [event async for event in route.answer(chat("r1", 12), 0)]
        assert isinstance(first[-1], api.Completed)
        assert first[-1].usage.completion_tokens == 12
        pid = supervisor.pid
        assert pid is not None
        broken = []
        async for event in route.answer(chat("r2", 400), 0):
            broken.append(event)
            if isinstance(event, api.Delta) and event.ids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert isinstance(broken[-1], api.Failed)
        assert broken[-1].code == "worker_lost"
        await until(lambda: supervisor.pid != pid and route.available(), LOADING_S)
        again = [event async for event in route.answer(chat("r3", 12), 1)]
        assert words_of(again) == words_of(first)
        last = supervisor.pid
    assert last is not None
    assert gone(last)


def words_of(events: list[api.AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, api.Delta))


@pytest.mark.slow
async def test_the_real_worker_refuses_a_bad_model_in_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model at all")
    async with real_worker(tmp_path, bad) as (supervisor, _):
        await until(lambda: supervisor.failure)
        assert (supervisor.failure or "").startswith("the worker ended with status 2: magnitude worker: ")
        assert "bad.gguf" in (supervisor.failure or "")
