"""`magnitude cache`: the report as text, character by character, and what is said where there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from magnitude_engine import api
from magnitude_proxy import main as cli
from magnitude_proxy.cache.view import SHORT, Limits, duration, render, size
from magnitude_proxy.config import ListenConfig, WorkerConfig
from magnitude_proxy.keyfile import parse_key_file
from testkit.proxy import proxy_config, proxying
from testkit.scripted_worker import REPORT, ScriptedWorker
from testkit.server import Reply, scripted
from testkit.upstream import refusing_url

GIB = 1 << 30
ONE, TWO = "3fa91c02" * 8, "b0c1d2e3" * 8


def run(parent: int, tokens: int, tenant: str = ONE, **figures: float) -> api.CacheRun:
    return api.CacheRun(parent=parent, tenant=tenant, tokens=tokens, pages=-(-tokens // 16), **figures)  # type: ignore[arg-type]


def session(name: str, state: str, tokens: int, **more: object) -> api.SessionUse:
    return api.SessionUse(tenant=ONE, session=name * 4, branch="main", state=state, tokens=tokens, **more)  # type: ignore[arg-type]


FULL = api.CacheReport(
    page_tokens=16,
    pages_total=16_384,
    pages_free=7_072,
    pages_idle=9_000,
    learned_hit_rate=0.8125,
    lru_hit_rate=0.74,
    tiers=(
        api.TierUse(name="device", blocks=9_312, bytes=GIB, limit_bytes=2 * GIB, tokens_served=1_204_224, evicted=512),
        api.TierUse(name="host", blocks=0, bytes=0, limit_bytes=0),
        api.TierUse(name="disk", blocks=7, bytes=1, limit_bytes=4 * GIB, rejected=2, failed_writes=3),
    ),
    runs=(
        run(-1, 1024, in_use=64, idle_s=0.24, sessions=3),
        run(0, 96, idle_s=200, sessions=2),
        run(1, 16, idle_s=200, sessions=1),
        run(0, 512, idle_s=41, sessions=1),
        run(-1, 250, idle_s=4000),
        run(-1, 4096, TWO, idle_s=90_000, sessions=1),
    ),
    sessions=(
        session("9f3c0a12", "thinking", 1536),
        session("00ff00ff", "ended", 256),
        session("1f3c0a12", "waiting", 1120, tool="run_tests", due_s=2.14),
        session("2f3c0a12", "waiting", 1120, tool="grep\x1b[31m", due_s=-3.0),
    ),
)

SHOWN = """\
16,384 pages of 16 tokens: 312 in use, 9,000 kept, 7,072 free

TIER    BLOCKS                        SIZE                TOKENS SERVED  EVICTED  REJECTED
device   9,312  ██████████░░░░░░░░░░  1.0 GiB of 2.0 GiB      1,204,224      512         0
host         0                        off                             0        0         0
disk         7  █░░░░░░░░░░░░░░░░░░░  1 B of 4.0 GiB                  0        0         2
disk: 3 writes failed

RETENTION  HIT RATE
learned      81.2 %  in force
lru          74.0 %

SESSION       BRANCH  STATE     TOKENS  WAITS FOR  DUE
2f3c0a122f3c  main    waiting    1,120  grep?[31m  3.0 s ago
1f3c0a121f3c  main    waiting    1,120  run_tests  in 2.1 s
9f3c0a129f3c  main    thinking   1,536
00ff00ff00ff  main    ended        256

PREFIXES            PAGES  IN USE   IDLE  SESSIONS
tenant b0c1d2e3       256       0
└─ 4,096 tokens       256       0  1.0 d         1
tenant 3fa91c02       119      64
├─ 1,024 tokens        64      64  0.2 s         3
│  ├─ 512 tokens       32       0   41 s         1
│  └─ 96 tokens         6       0  3 min         2
│     └─ 16 tokens      1       0  3 min         1
└─ 250 tokens          16       0  1.1 h         0
"""

CUT = """\
16,384 pages of 16 tokens: 312 in use, …

TIER    BLOCKS  SIZE                TOK…
device   9,312  1.0 GiB of 2.0 GiB     …
host         0  off                    …
disk         7  1 B of 4.0 GiB         …
disk: 3 writes failed

RETENTION  HIT RATE
learned      81.2 %  in force
lru          74.0 %

SESSION       BRANCH  STATE    TOKENS  …
2f3c0a122f3c  main    waiting   1,120  …
… 3 more

PREFIXES  PAGES  IN USE   IDLE  SESSIONS
…0c1d2e3    256       0
… tokens    256       0  1.0 d         1
… 1 more    119
"""


def test_a_report_is_shown_whole() -> None:
    assert render(FULL, 100) == SHOWN


def test_the_bars_take_what_room_there_is() -> None:
    lines = render(FULL, 74).splitlines()
    assert lines[3] == "device   9,312  ██░░  1.0 GiB of 2.0 GiB      1,204,224      512         0"
    assert "█" not in render(FULL, 70)


def test_a_narrow_terminal_and_limits_cut_with_an_ellipsis() -> None:
    assert render(FULL, 40, Limits(depth=6, children=1, sessions=1)) == CUT
    assert render(FULL, 1, Limits(depth=6, children=1, sessions=1)) == CUT


def test_an_empty_cache_has_no_empty_tables() -> None:
    empty = api.CacheReport(page_tokens=16, pages_total=8, pages_free=8, pages_idle=0, policy="lru")
    assert render(empty, 80) == (
        "8 pages of 16 tokens: 0 in use, 0 kept, 8 free\n\n"
        "RETENTION  HIT RATE\nlearned       0.0 %\nlru           0.0 %  in force\n"
    )


def tree(runs: list[api.CacheRun], limits: Limits) -> list[str]:
    report = api.CacheReport(page_tokens=16, pages_total=8, pages_free=8, pages_idle=0, runs=tuple(runs))
    shown = render(report, 10_000, limits)
    return shown.partition("SESSIONS\n")[2].splitlines()[1:]


def test_what_is_too_deep_or_too_many_is_counted() -> None:
    runs = [run(-1, 160), *(run(0, 16 * n) for n in range(1, 5)), run(4, 16), run(5, 16)]
    assert tree(runs, Limits(depth=2, children=2)) == [
        "└─ 160 tokens         10       0  0.0 s         0",
        "   ├─ 64 tokens        4       0  0.0 s         0",
        "   │  └─ … 2 more      2",
        "   ├─ 48 tokens        3       0  0.0 s         0",
        "   └─ … 2 more         3",
    ]


@pytest.mark.thorough
def test_a_tree_as_deep_as_a_long_session_is_shown_whole() -> None:
    runs = [run(index - 1, 16) for index in range(1500)]
    shown = tree(runs, Limits())
    assert len(shown) == 1500
    assert shown[-1].startswith("   " * 1499 + "└─ 16 tokens")
    assert len(tree(runs, SHORT)) == 7


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (GIB, "1.0 GiB"), (5 << 50, "5120.0 TiB")]
)
def test_sizes_in_words(count: int, words: str) -> None:
    assert size(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0.0 s"), (9.9, "9.9 s"), (10, "10 s"), (61, "1 min"), (7200, "2.0 h"), (1e5, "1.2 d")]
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


async def command(*arguments: str) -> int:
    return await asyncio.to_thread(cli.main, ["cache", *arguments])


@pytest.mark.thorough
async def test_the_command_shows_a_running_servers_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    worker = ScriptedWorker(tmp_path / "w.sock")
    await worker.start()
    config = proxy_config(
        tmp_path,
        worker=WorkerConfig(mode="attach", socket=str(worker.socket)),
        keys=parse_key_file("sk-one alice", "keys"),
        listen=ListenConfig(port=0, admin_port=0, admin_host="0.0.0.0"),
    )
    async with proxying(config) as proxy:
        async with asyncio.timeout(5):
            while (await proxy.get("/health/ready", authorization="Bearer sk-one")).status != 200:
                await asyncio.sleep(0.01)
        assert await command("--admin-url", proxy.admin) == 2
        assert "MAGNITUDE_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("MAGNITUDE_API_KEY", "sk-one")
        assert await command("--admin-url", f"{proxy.admin}/") == 0
        assert capsys.readouterr().out == render(REPORT, 90)
        monkeypatch.setenv("MAGNITUDE_ADMIN_URL", proxy.admin)
        assert await command("--json") == 0
        assert msgspec.json.decode(capsys.readouterr().out, type=api.CacheReport) == REPORT
        worker.report = FULL
        assert await command("--depth", "1", "--all") == 0
        assert capsys.readouterr().out == render(FULL, 90, Limits(depth=1))
        await worker.close()
        assert await command() == 2
        assert "has nothing to show: " in capsys.readouterr().err


@pytest.mark.thorough
async def test_a_server_without_a_worker_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with proxying(proxy_config(tmp_path, "http://127.0.0.1:9/v1")) as proxy:
        assert await command("--admin-url", proxy.admin) == 2
        assert "has no local worker" in capsys.readouterr().err
        assert await command("--admin-url", proxy.origin) == 2
        assert "has no /cache: say with --admin-url" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply({"type": "other"}), "is not a Magnitude server of this release"),
        (Reply({"error": {"message": "boom", "type": "server_error"}}, 500), "answers 500: boom"),
        (Reply([1], 502), "answers 502: Bad Gateway"),
    ],
)
async def test_another_answer_is_told(reply: Reply, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with scripted() as server:
        server.play("GET /cache", reply)
        assert await command("--admin-url", server.origin) == 2
    output = capsys.readouterr()
    assert (output.out, output.err.count("\n")) == ("", 1)
    assert said in output.err


@pytest.mark.thorough
async def test_no_server_at_all_is_told_with_the_way_to_one(capsys: pytest.CaptureFixture[str]) -> None:
    async with refusing_url() as url:
        assert await command("--admin-url", url.removesuffix("/v1")) == 2
    assert "no server answers at http://127.0.0.1:" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (("--admin-url", "localhost:8001"), "", "is not http://HOST:PORT"),
        (("--admin-url", "http://[::1"), "", "is not http://HOST:PORT"),
        (("--depth", "0"), "", "--depth 0: must be at least 1"),
        ((), "sk-é", "MAGNITUDE_API_KEY holds more than printable ASCII"),
        ((), "sk-\n", "MAGNITUDE_API_KEY holds more than printable ASCII"),
    ],
)
def test_what_cannot_be_used_is_named(
    arguments: tuple[str, ...],
    key: str,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAGNITUDE_API_KEY", key)
    assert cli.main(["cache", *arguments]) == 2
    assert said in capsys.readouterr().err
