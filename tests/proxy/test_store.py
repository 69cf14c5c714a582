"""The connection under cancellation, slowness and nonsense; the embedded server over kills and take-overs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from magnitude_engine.errors import ConfigError
from magnitude_proxy.process import SOCKET_PATH_BYTES, private_folder, socket_path
from magnitude_proxy.store import embedded as embedded_module
from magnitude_proxy.store.connection import STEADY_S, StoreConnection, StoreDown, next_pause
from magnitude_proxy.store.embedded import EmbeddedStore, StoreUnavailable, find_binary
from magnitude_proxy.store.memory import MemoryStore
from magnitude_proxy.store.record import Owner, StepOutcome, state_after
from testkit import store

OWNER = Path(store.__file__).with_name("store_owner.py")


@asynccontextmanager
async def connected(url: str, timeout_s: float = 5.0) -> AsyncIterator[StoreConnection]:
    connection = StoreConnection(url, timeout_s, knock_s=0.02)
    await connection.start()
    try:
        yield connection
    finally:
        await connection.close()


async def eventually(check: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await check():
            await asyncio.sleep(0.02)


async def set_up_tenants(server: store.Server, count: int) -> None:
    for tenant in range(count):
        await server.do("SET", f"tenant:{tenant}", f"value of {tenant}")


async def storm(connection: StoreConnection, seed: int, operations: int) -> tuple[int, int]:
    """Runs reads of 50 tenants, cancels a third of them at random moments; returns (answered, foreign)."""
    dice = random.Random(seed)
    answered = foreign = 0

    async def one(tenant: int) -> None:
        nonlocal answered, foreign
        try:
            value = await connection.call("GET", f"tenant:{tenant}")
        except StoreDown:
            await asyncio.sleep(0.01)
            return
        answered += 1
        foreign += value != f"value of {tenant}".encode()

    waiting: set[asyncio.Task[None]] = set()
    for _ in range(operations):
        task = asyncio.create_task(one(dice.randrange(50)))
        waiting.add(task)
        task.add_done_callback(waiting.discard)
        if dice.random() < 0.35:
            asyncio.get_running_loop().call_later(dice.random() * 0.004, task.cancel)
        if len(waiting) > 60:
            await asyncio.sleep(dice.random() * 0.002)
    await asyncio.gather(*waiting, return_exceptions=True)
    return answered, foreign


@pytest.mark.slow
@pytest.mark.parametrize("timeout_s", [5.0, 0.003], ids=["calm", "with timeouts"])
async def test_cancelled_requests_never_shift_replies(tmp_path: Path, timeout_s: float) -> None:
    async with store.server("valkey", tmp_path) as server:
        await set_up_tenants(server, 50)
        proxy = store.DelayProxy(server.url, random.Random(1), 0.002)
        async with proxy.running(), connected(proxy.url, timeout_s) as connection:
            answered, foreign = await storm(connection, seed=2, operations=6000)
            assert foreign == 0
            assert answered > (2000 if timeout_s > 1 else 0)
            await eventually(lambda: _reads_own(connection))


@pytest.mark.thorough
async def test_a_few_cancelled_requests_never_shift_replies(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server:
        await set_up_tenants(server, 50)
        async with connected(server.url) as connection:
            answered, foreign = await storm(connection, seed=3, operations=1500)
            assert foreign == 0
            assert answered > 400


async def _reads_own(connection: StoreConnection) -> bool:
    try:
        return await connection.call("GET", "tenant:7") == b"value of 7"
    except StoreDown:
        return False


@pytest.mark.thorough
async def test_a_late_reply_is_dropped_with_its_connection(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server:
        await set_up_tenants(server, 8)
        async with connected(server.url, timeout_s=0.05) as connection:
            await eventually(lambda: _reads_own(connection))
            server.signal(signal.SIGSTOP)
            with pytest.raises(StoreDown, match="did not answer within"):
                await connection.call("GET", "tenant:1")
            with pytest.raises(StoreDown):
                await connection.call("GET", "tenant:2")
            server.signal(signal.SIGCONT)
            await eventually(lambda: _reads_own(connection))


@pytest.mark.thorough
async def test_a_loop_that_stood_still_does_not_blame_the_store(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server, connected(server.url, timeout_s=0.2) as connection:
        call = asyncio.create_task(connection.call("PING"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        time.sleep(0.3)
        assert await call == b"PONG"
        assert connection.up


@pytest.mark.thorough
async def test_an_error_reply_takes_the_store_down_for_a_moment(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server, connected(server.url) as connection:
        with pytest.raises(StoreDown, match="unknown command"):
            await connection.call("NONSENSE")
        assert not connection.up
        await eventually(lambda: _answers(connection))


async def _answers(connection: StoreConnection) -> bool:
    try:
        return await connection.call("PING") == b"PONG"
    except StoreDown:
        return False


@pytest.mark.thorough
@pytest.mark.parametrize(
    "script",
    [
        b"",
        b"\x00\xff garbage\r\n",
        b"+OK\r\n+OK\r\n-LOADING Valkey is loading the dataset in memory\r\n",
        b"+OK\r\n+OK\r\n-READONLY You can't write against a read only replica.\r\n",
        b"+OK\r\n+OK\r\n-MOVED 3999 127.0.0.1:6381\r\n",
        b"+OK\r\n+OK\r\n$10\r\nshort",
    ],
    ids=["closes", "garbage", "loading", "readonly", "moved", "cut"],
)
async def test_whatever_the_server_says_the_caller_gets_store_down(script: bytes) -> None:
    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        await reader.read(1)
        writer.write(script)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(0.05):
                while await reader.read(4096):
                    pass
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        async with connected(f"redis://127.0.0.1:{port}", timeout_s=0.2) as connection:
            for _ in range(3):
                with pytest.raises(StoreDown):
                    await connection.call("PING")
                await asyncio.sleep(0.03)
        await asyncio.gather(*(task for task in serving if task is not None))
        # Its sockets are closed one turn of the loop later.
        await asyncio.sleep(0.01)


@pytest.mark.thorough
async def test_a_slow_store_is_left_alone(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server:
        proxy = store.DelayProxy(server.url, random.Random(4), 0.0)
        async with proxy.running(), connected(proxy.url, timeout_s=0.1) as connection:
            await eventually(lambda: _answers(connection))
            proxy.delay_s = 1.0
            outcomes = [await _answers(connection) for _ in range(200)]
            assert outcomes.count(True) < 20
            assert not connection.up
            proxy.delay_s = 0.0
            await eventually(lambda: _answers(connection))


def test_pauses_between_knocks() -> None:
    pauses = [0.0]
    for _ in range(6):
        pauses.append(next_pause(pauses[-1], 0.3, 1.0))
    assert pauses[1:] == [0.125, 0.25, 0.5, 1.0, 1.0, 1.0]
    assert next_pause(1.0, STEADY_S, 1.0) == 0.125


@pytest.mark.thorough
async def test_calls_under_way_end_when_the_owner_closes(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server, connected(server.url) as connection:
        server.signal(signal.SIGSTOP)
        calls = [asyncio.create_task(connection.call("PING")) for _ in range(3)]
        await asyncio.sleep(0.01)
        await connection.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [StoreDown] * 3


@pytest.mark.thorough
async def test_a_killed_embedded_server_comes_back_with_its_data(tmp_path: Path) -> None:
    embedded = EmbeddedStore(tmp_path / "store")
    await embedded.start()
    try:
        assert embedded.problem is None
        async with connected(embedded.url) as connection:
            await connection.call("CONFIG", "SET", "appendfsync", "always")
            await connection.call("SET", "k", "v")
            first = embedded.pid
            assert first is not None
            os.kill(first, signal.SIGKILL)
            await eventually(lambda: _holds(connection, "v"))
            assert embedded.pid not in (None, first)
    finally:
        await embedded.close()
    assert embedded.pid is None


async def _holds(connection: StoreConnection, value: str) -> bool:
    try:
        return await connection.call("GET", "k") == value.encode()
    except StoreDown:
        return False


@asynccontextmanager
async def owner_process(folder: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Runs another process on `folder`; yields it and its server's id (0 when it only attached)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(OWNER), str(folder), stdout=asyncio.subprocess.PIPE
    )
    try:
        line = await process.stdout.readline() if process.stdout else b""
        yield process, 0 if line.strip() == b"None" else int(line)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
async def test_another_process_takes_over_when_the_owner_dies(tmp_path: Path, end: signal.Signals) -> None:
    folder = tmp_path / "store"
    async with owner_process(folder) as (owner, server):
        assert server > 0
        second = EmbeddedStore(folder)
        await second.start()
        try:
            assert second.pid is None
            async with connected(second.url) as connection:
                await connection.call("CONFIG", "SET", "appendfsync", "always")
                await connection.call("SET", "k", "kept")
                owner.send_signal(end)
                await owner.wait()
                await eventually(lambda: _holds(connection, "kept"))
                await eventually(lambda: _owns(second))
                assert not _alive(server)
                assert second.pid != server
        finally:
            await second.close()


async def _owns(embedded: EmbeddedStore) -> bool:
    return embedded.pid is not None


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() != b""


@pytest.mark.slow
async def test_two_processes_share_one_server(tmp_path: Path) -> None:
    embedded = EmbeddedStore(tmp_path / "store")
    await embedded.start()
    try:
        assert embedded.pid is not None
        async with owner_process(tmp_path / "store") as (_, server):
            assert server == 0
    finally:
        await embedded.close()


async def test_no_server_program_is_said_clearly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho Redis server v=6.2.7 sha=0\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(embedded_module, "get_binary_path", lambda: tmp_path / "absent")
    with pytest.raises(StoreUnavailable, match=r"version 7 or newer.*redis-server.* will not do.*--store redis://"):
        await find_binary()
    embedded = EmbeddedStore(tmp_path / "store")
    await embedded.start()
    assert "no Valkey or Redis server" in (embedded.problem or "")
    assert "no Valkey or Redis server" in caplog.text
    await embedded.close()


async def test_a_program_on_path_goes_before_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "valkey-server"
    own.write_text("#!/bin/sh\necho Valkey server v=9.4.1 sha=0\n")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert await find_binary() == (str(own), "valkey-9.4")
    own.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (await find_binary()).name == "valkey-9.1"


@pytest.mark.thorough
async def test_a_server_that_cannot_start_is_a_problem_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "valkey-server"
    broken.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Valkey server v=9.4.1 || { echo no room; exit 3; }\n')
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    embedded = EmbeddedStore(tmp_path / "store")
    await embedded.start()

    async def said() -> bool:
        return embedded.problem == "the embedded session store ended with status 3: no room"

    await eventually(said)
    await embedded.close()


def test_long_socket_paths_are_replaced_by_the_same_short_one(tmp_path: Path) -> None:
    short = socket_path(tmp_path, "w.sock")
    assert short == tmp_path / "w.sock"
    deep = tmp_path / ("x" * 120)
    assert socket_path(deep, "w.sock") == socket_path(deep, "w.sock") != socket_path(deep, "v.sock")
    assert len(os.fsencode(socket_path(deep, "w.sock"))) <= SOCKET_PATH_BYTES
    assert socket_path(deep, "w.sock").parent.stat().st_mode & 0o777 == 0o700


def test_a_private_folder_is_no_link_and_closed_to_others(tmp_path: Path) -> None:
    loose = tmp_path / "loose"
    loose.mkdir(mode=0o755)
    assert private_folder(loose).stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(loose)
    with pytest.raises(ConfigError, match="must be a folder of user"):
        private_folder(tmp_path / "link")


def test_memory_forgets_the_least_recently_used() -> None:
    memory = MemoryStore(limit=2)
    for session in ("a", "b", "a", "c"):
        memory.open(session, "main", Owner("t"), "n", 1.0)
    assert memory.get("b") is None
    record = memory.get("a")
    assert record is not None
    assert record.epoch == 2


@pytest.mark.parametrize(
    ("ok", "tool_call", "state"), [(True, False, "idle"), (True, True, "waiting_on_tool"), (False, True, "failed")]
)
def test_the_state_after_a_step(ok: bool, tool_call: bool, state: str) -> None:
    outcome = StepOutcome(
        route="local",
        finish_reason="stop",
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        tool_call=tool_call,
        ok=ok,
    )
    assert state_after(outcome) == state
