"""`magnitude bench proxy`: the load and the stub against each other, what the table says, and one short real run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from magnitude_proxy.bench import latency, stub
from magnitude_proxy.bench.command import main
from magnitude_proxy.bench.latency import Cell, ProxyReceipt, Sample, SessionMemory
from magnitude_proxy.bench.load import LoadResult, LoadSpec, Spread, run, spread
from magnitude_proxy.bench.proxy import chosen, loads
from magnitude_proxy.bench.receipt import MachineEntry, SoftwareEntry

CELL = Cell(body_bytes=1024, stream=False, connections=1)


class Watched(stub.Stub):
    """A connection of the stub whose end can be waited for."""

    def __init__(self, ends: list[asyncio.Event]) -> None:
        super().__init__()
        self._end = asyncio.Event()
        ends.append(self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._end.set()


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[int]:
    """Gives the port of a stub in this process; when left, every connection has ended."""
    ends: list[asyncio.Event] = []
    server = await asyncio.get_running_loop().create_server(lambda: Watched(ends), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for end in ends:
            await end.wait()


def spec(port: int, **changes: object) -> LoadSpec:
    return msgspec.structs.replace(LoadSpec(host="127.0.0.1", port=port, requests=12, warm_s=0.0), **changes)


@pytest.mark.parametrize("size", [1024, 102_400])
async def test_every_request_is_answered_and_timed(size: int) -> None:
    async with serving() as port:
        result = await run(spec(port, connections=3, body_bytes=size, sessions=5))
    assert (result.answered >= 12, result.failed) == (True, 0)
    assert result.whole is not None
    assert 0 < result.whole.p50 <= result.whole.p99 <= result.whole.p999
    assert result.passed_on is None


async def test_a_stream_tells_how_long_its_events_were_under_way() -> None:
    async with serving() as port:
        result = await run(spec(port, connections=2, requests=4, stream=True))
    assert result.failed == 0
    assert result.whole is not None
    assert result.first is not None
    assert result.first_passed_on is not None
    # The events after the first come apart, so that a stream takes as long as the gaps between them.
    assert result.whole.p50 >= (stub.EVENTS - 1) * stub.EVENT_GAP_S * 1000
    assert 0 <= result.first_passed_on.p50 <= result.first.p50 < result.whole.p50


async def test_answers_that_are_none_count_as_failed() -> None:
    left = asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while await reader.readuntil(b'"stream":false}'):
                writer.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        left.set()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        result = await run(spec(server.sockets[0].getsockname()[1]))
        await left.wait()
    assert (result.answered, result.failed >= 12, result.whole) == (0, True, None)


def test_percentiles_are_of_the_nearest_rank() -> None:
    found = spread([n * 1_000_000 for n in range(1000, 0, -1)])
    assert found == Spread(p50=501.0, p99=991.0, p999=1000.0, mean=500.5)
    assert spread([]) is None


def sample(server: str, turn: int, p50: float, *, failed: int = 0, processor_us: float | None = None) -> Sample:
    whole = Spread(p50=p50, p99=2 * p50, p999=3 * p50, mean=p50)
    result = LoadResult(
        answered=300,
        failed=failed,
        seconds=3.0,
        whole=whole,
        first=None,
        passed_on=None,
        first_passed_on=None,
        cpu_s=1.0,
    )
    return Sample(round=turn, server=server, cell=CELL, result=result, processor_us=processor_us)


def test_what_a_server_adds_is_the_difference_of_medians_to_the_bare_upstream() -> None:
    direct = [sample("direct", turn, p50) for turn, p50 in enumerate((0.1, 9.0, 0.2))]
    proxied = [sample("magnitude", n, p50, failed=n, processor_us=250.0) for n, p50 in enumerate((0.7, 0.5, 7.0))]
    first, second = latency.rows([*direct, *proxied])
    assert (first.server, first.added, first.per_core) == ("direct", None, None)
    assert second.added is not None
    assert (second.added.p50, second.added.p99) == pytest.approx((0.5, 1.0))
    assert (second.failed, second.per_s, second.per_core) == (3, 100.0, 4000.0)


def test_the_table_says_what_was_measured_and_what_was_not() -> None:
    machine = MachineEntry(cpu="c", cores=2, instructions=(), memory_mb=1, gpus=(), system="s", load=(1.0, 2.5))
    shown = latency.table(
        ProxyReceipt(
            made="now",
            arguments=(),
            machine=machine,
            software=SoftwareEntry(commit="", changed=False, python="3", packages={}),
            seconds=3.0,
            rounds=1,
            skipped={"litellm": "no litellm here"},
            samples=(sample("direct", 0, 0.1), sample("magnitude", 0, 0.6, failed=2, processor_us=200.0)),
            memory=SessionMemory(server="magnitude", sessions=2000, bytes_each=1536.0),
        )
    )
    assert "| 1024 | no | 1 | magnitude (2 failed) | 100 | 5,000 | 0.60 | 0.50 / 1.00 / 1.50 |  |" in shown
    assert "An idle session takes 1.5 KiB (of 2,000 sessions)." in shown
    assert "litellm was not measured: no litellm here" in shown
    assert "Load average 1 at the start, 2.5 at the end." in shown


def test_bodies_are_sent_plain_and_the_first_of_them_streamed() -> None:
    cells = [(cell.body_bytes, cell.stream, cell.connections) for cell in loads((1, 2), (4, 8))]
    plain = [(1, False, 4), (1, False, 8), (2, False, 4), (2, False, 8)]
    assert cells == [*plain, (1, True, 4), (1, True, 8)]


def test_a_server_that_is_not_installed_is_skipped_by_name(tmp_path: Path) -> None:
    starts, skipped = chosen((), tmp_path, None)
    assert (list(starts), list(skipped)) == (["relay", "magnitude"], ["litellm"])
    assert "--litellm" in skipped["litellm"]
    assert chosen(("relay",), tmp_path, None)[1] == {}


@pytest.mark.slow
def test_a_short_run_writes_a_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["proxy", "--seconds", "0.5", "--rounds", "1", "--connections", "2", "--body-bytes", "1024"]
    out = tmp_path / "out"
    assert main([*words, "--server", "relay", "--server", "magnitude", "--sessions", "64", "--out", str(out)]) == 0
    told = msgspec.json.decode((out / "proxy.json").read_bytes(), type=ProxyReceipt)
    assert {(one.server, one.cell.stream) for one in told.samples} == {
        (server, stream) for server in ("direct", "relay", "magnitude") for stream in (False, True)
    }
    assert all(one.result.answered and not one.result.failed for one in told.samples)
    assert told.memory is not None
    assert "| 1024 | no | 2 | magnitude |" in capsys.readouterr().out
