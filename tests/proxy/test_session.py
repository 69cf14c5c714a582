"""Leases and commits against real stores: who may write, what survives, and what happens while the store is away."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from magnitude_engine.errors import ConfigError
from magnitude_proxy.config import StoreConfig, TelemetryConfig
from magnitude_proxy.identity import Identity, IdentityHints, identify
from magnitude_proxy.session import Sessions, StepOutcome
from magnitude_proxy.store.functions import session_key
from magnitude_proxy.telemetry import Telemetry
from testkit import store

pytestmark = pytest.mark.thorough

KNOCK_S = 0.05
STORES = [
    pytest.param("valkey", id="valkey"),
    pytest.param("redis", id="redis", marks=pytest.mark.slow),
]
ANSWER = StepOutcome(
    route="local",
    finish_reason="stop",
    prompt_tokens=100,
    completion_tokens=7,
    cached_tokens=60,
    tool_call=False,
    ok=True,
)
TOOL = StepOutcome(
    route="upstream:a",
    finish_reason="tool_calls",
    prompt_tokens=120,
    completion_tokens=9,
    cached_tokens=100,
    tool_call=True,
    ok=True,
)
FAILED = StepOutcome(
    route="local", finish_reason="", prompt_tokens=0, completion_tokens=0, cached_tokens=0, tool_call=False, ok=False
)


def who(raw: str = "s1", branch: str = "main") -> Identity:
    return identify("acme", {"X-Magnitude-Session": raw, "X-Magnitude-Branch": branch}, IdentityHints())


@pytest.fixture
def telemetry() -> Telemetry:
    return Telemetry(TelemetryConfig())


def counted(telemetry: Telemetry, metric: str) -> float:
    """The sum of a counter over its labels."""
    lines = telemetry.exposition().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"magnitude_{metric}_total"))


@asynccontextmanager
async def sessions_on(
    url: str | None, folder: Path, telemetry: Telemetry | None = None, timeout_s: float = 0.5
) -> AsyncIterator[Sessions]:
    """Sessions with generous limits: the machine may be busy, and no test here is about the limit itself."""
    config = StoreConfig(url=url, timeout_s=timeout_s)
    made = Sessions(config, folder, telemetry or Telemetry(TelemetryConfig()), clock=lambda: 50.5, knock_s=KNOCK_S)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def until_healthy(sessions: Sessions) -> None:
    async with asyncio.timeout(20):
        while not sessions.healthy():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("kind", STORES)
async def test_steps_add_up(kind: str, tmp_path: Path, telemetry: Telemetry) -> None:
    async with store.server(kind, tmp_path) as server, sessions_on(server.url, tmp_path, telemetry) as sessions:
        first = await sessions.open(who())
        assert (first.epoch, first.step, first.degraded, first.record.state) == (1, 0, False, "thinking")
        assert await sessions.commit(first, TOOL)
        waiting = await sessions.get(who().session)
        assert waiting is not None
        assert waiting.state == "waiting_on_tool"
        second = await sessions.open(who())
        assert (second.epoch, second.step, second.record.state) == (2, 1, "thinking")
        assert await sessions.commit(second, ANSWER)
        third = await sessions.open(who())
        assert await sessions.commit(third, FAILED)
        record = await sessions.get(who().session)
        assert record is not None
        assert (record.steps, record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (3, 220, 16, 160)
        assert (record.failures, record.state, record.route, record.finish_reason) == (1, "failed", "local", "")
        assert (record.created_s, record.seen_s) == (50.5, 50.5)
        assert await sessions.get(who("other").session) is None
        left = await server.do("PTTL", session_key(who().session))
        assert isinstance(left, int)
        assert 172_000_000 < left <= 172_800_000
        assert counted(telemetry, "session_stale_commits") == 0


@pytest.mark.thorough
@pytest.mark.parametrize("kind", STORES)
async def test_of_two_writers_exactly_one_commits(kind: str, tmp_path: Path, telemetry: Telemetry) -> None:
    async with (
        store.server(kind, tmp_path) as server,
        sessions_on(server.url, tmp_path, telemetry) as one,
        sessions_on(server.url, tmp_path, telemetry) as two,
    ):
        for round_ in range(20):
            leases = await asyncio.gather(one.open(who()), two.open(who()))
            won = await asyncio.gather(one.commit(leases[0], ANSWER), two.commit(leases[1], ANSWER))
            assert won == [leases[0].epoch > leases[1].epoch, leases[1].epoch > leases[0].epoch], round_
        record = await one.get(who().session)
        assert record is not None
        assert record.steps == 20
        assert counted(telemetry, "session_stale_commits") == 20


async def test_a_lease_commits_once(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server, sessions_on(server.url, tmp_path) as sessions:
        lease = await sessions.open(who())
        assert sorted(await asyncio.gather(*(sessions.commit(lease, ANSWER) for _ in range(10)))) == [False] * 9 + [
            True
        ]


async def test_branches_do_not_fence_each_other(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server, sessions_on(server.url, tmp_path) as sessions:
        main, sub = await sessions.open(who()), await sessions.open(who(branch="sub"))
        assert await sessions.commit(main, ANSWER)
        assert await sessions.commit(sub, ANSWER)
        record = await sessions.get(who().session)
        assert record is not None
        assert record.steps == 2


@pytest.mark.thorough
async def test_leases_that_never_commit_do_not_pile_up(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server, sessions_on(server.url, tmp_path) as sessions:
        for start in range(0, 1100, 100):
            await asyncio.gather(*(sessions.open(who(branch=f"b{start + n}")) for n in range(100)))
        fields = await server.do("HLEN", session_key(who().session))
        assert isinstance(fields, int)
        assert fields < 1040
        assert await sessions.commit(await sessions.open(who(branch="b1")), ANSWER)


async def test_flushed_between_open_and_commit(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server, sessions_on(server.url, tmp_path) as sessions:
        old = await sessions.open(who())
        await server.do("FLUSHALL")
        assert not await sessions.commit(old, ANSWER)
        new = await sessions.open(who())
        assert new.epoch == old.epoch
        assert not await sessions.commit(old, ANSWER)
        assert await sessions.commit(new, ANSWER)


async def test_nobody_waits_for_a_commit_and_all_find_it(tmp_path: Path, telemetry: Telemetry) -> None:
    async with store.server("valkey", tmp_path) as server:
        async with sessions_on(server.url, tmp_path, telemetry) as sessions:
            sessions.commit(await sessions.open(who()), TOOL)
            second = await sessions.open(who())
            assert (second.step, second.record.finish_reason) == (1, TOOL.finish_reason)
            sessions.commit(second, ANSWER)
        # Closing sends what was held back for company.
        async with sessions_on(server.url, tmp_path) as sessions:
            assert (await sessions.open(who())).step == 2
    assert (counted(telemetry, "session_stale_commits"), counted(telemetry, "store_errors")) == (0, 0)


@pytest.mark.slow
async def test_a_promoted_replica_that_lost_writes_refuses_the_old_writer(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    async with store.server("redis", tmp_path / "a") as a, store.server("redis", tmp_path / "b") as b:
        port = a.url.removesuffix("/0").rpartition(":")[2]
        async with sessions_on(a.url, tmp_path) as at_a:
            await at_a.commit(await at_a.open(who()), ANSWER)
            await b.do("REPLICAOF", "127.0.0.1", port)
            async with asyncio.timeout(20):
                while await b.do("EXISTS", session_key(who().session)) != 1:
                    await asyncio.sleep(0.02)
            await b.do("REPLICAOF", "NO", "ONE")
            lost = await at_a.open(who())
        async with sessions_on(b.url, tmp_path) as at_b:
            new = await at_b.open(who())
            assert (new.epoch, new.step) == (lost.epoch, 1)
            assert not await at_b.commit(lost, ANSWER)
            assert await at_b.commit(new, ANSWER)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", STORES)
async def test_lost_functions_are_loaded_again(kind: str, tmp_path: Path) -> None:
    async with store.server(kind, tmp_path) as server, sessions_on(server.url, tmp_path) as sessions:
        lease = await sessions.open(who())
        await server.do("FUNCTION", "FLUSH")
        assert await sessions.commit(lease, ANSWER)
        await server.do("FUNCTION", "FLUSH")
        leases = await asyncio.gather(*(sessions.open(who(str(n))) for n in range(20)))
        assert not any(lease.degraded for lease in leases)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", STORES)
async def test_killed_in_mid_session_and_back(kind: str, tmp_path: Path, telemetry: Telemetry) -> None:
    async with store.server(kind, tmp_path) as server, sessions_on(server.url, tmp_path, telemetry) as sessions:
        await sessions.commit(await sessions.open(who()), ANSWER)
        running = await sessions.open(who())
        await server.kill()
        assert not await sessions.commit(running, ANSWER)
        away = await sessions.open(who())
        assert (away.degraded, away.step, sessions.healthy()) == (True, 2, False)
        assert away.token.startswith("memory.")
        assert await sessions.commit(away, ANSWER)
        assert (await sessions.open(who("new"))).step == 0
        assert sessions.problem is not None
        await server.start()
        await until_healthy(sessions)
        back = await sessions.open(who())
        assert (back.degraded, back.step, back.epoch) == (False, 1, 3)
        assert await sessions.commit(back, ANSWER)
        assert not await sessions.commit(running, ANSWER)
        assert counted(telemetry, "store_errors") >= 3


@pytest.mark.thorough
async def test_absent_at_start_then_there(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server:
        await server.kill()
        async with sessions_on(server.url, tmp_path) as sessions:
            lease = await sessions.open(who())
            assert lease.degraded
            assert await sessions.commit(lease, ANSWER)
            assert (await sessions.open(who())).step == 1
            await server.start()
            await until_healthy(sessions)
            assert not (await sessions.open(who())).degraded
            assert sessions.problem is None


@pytest.mark.thorough
async def test_a_store_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    async with (
        store.server("valkey", tmp_path) as server,
        sessions_on(server.url, tmp_path, timeout_s=0.05) as sessions,
    ):
        await sessions.open(who())
        server.signal(signal.SIGSTOP)
        began = time.monotonic()
        first = await asyncio.gather(*(sessions.open(who(str(n))) for n in range(50)))
        later = [await sessions.open(who(str(n))) for n in range(200)]
        # One limit for those under way, none for those after: 250 waits would take 12 s.
        assert time.monotonic() - began < 2
        assert all(lease.degraded for lease in first + later)
        server.signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while (await sessions.open(who())).degraded:
                await asyncio.sleep(0.02)


@pytest.mark.thorough
async def test_a_full_store_is_a_store_that_is_away(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server, sessions_on(server.url, tmp_path) as sessions:
        await server.do("CONFIG", "SET", "maxmemory", "1")
        assert (await sessions.open(who())).degraded
        assert "memory" in (sessions.problem or "")
        await server.do("CONFIG", "SET", "maxmemory", "0")
        await until_healthy(sessions)
        assert not (await sessions.open(who())).degraded


async def test_a_wrong_password_degrades_and_is_told_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    async with store.server("redis", tmp_path) as server:
        await server.do("CONFIG", "SET", "requirepass", "right-one")
        secret = server.url.replace("redis://", "redis://:wr0ng-secret@")
        async with sessions_on(secret, tmp_path) as sessions:
            assert (await sessions.open(who())).degraded
            assert "127.0.0.1" in (sessions.problem or "")
            assert "wr0ng-secret" not in (sessions.problem or "") + caplog.text
        async with sessions_on(server.url.replace("redis://", "redis://:right-one@"), tmp_path) as sessions:
            assert not (await sessions.open(who())).degraded


async def test_sessions_in_memory_by_choice_are_not_degraded(tmp_path: Path) -> None:
    async with sessions_on("none", tmp_path) as sessions:
        old, new = await sessions.open(who()), await sessions.open(who())
        assert (old.degraded, sessions.healthy(), sessions.problem) == (False, True, None)
        assert not await sessions.commit(old, ANSWER)
        assert await sessions.commit(new, TOOL)
        record = await sessions.get(who().session)
        assert record is not None
        assert (record.steps, record.state) == (1, "waiting_on_tool")
    assert not (tmp_path / "store").exists()


def test_a_bad_url_stops_the_start_without_its_secret(tmp_path: Path, telemetry: Telemetry) -> None:
    for url in ("http://u:secret@h", "redis://h:port", "redis://h/0?socket_timout=3"):
        with pytest.raises(ConfigError, match=r"redis://.*host:port") as caught:
            Sessions(StoreConfig(url=url), tmp_path, telemetry)
        assert "secret" not in caught.value.message
        assert caught.value.param == "store.url"


@pytest.mark.thorough
async def test_the_embedded_store_keeps_sessions_over_restarts(tmp_path: Path) -> None:
    async with sessions_on(None, tmp_path) as sessions:
        assert sessions.healthy(), sessions.problem
        await sessions.commit(await sessions.open(who()), ANSWER)
    async with sessions_on(None, tmp_path) as sessions:
        assert (await sessions.open(who())).step == 1
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
