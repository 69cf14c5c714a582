"""Events of sessions over real sockets: they reach the worker while they come, and what is wrong is told."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_proxy import events as events_module
from testkit.agents import Agents, agents, until

NDJSON = {"content_type": "application/x-ndjson"}


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Agents]:
    async with agents(tmp_path, stored=False) as running:
        await running.step("run-1")
        yield running


def line(kind: str, **fields: Any) -> bytes:
    return json.dumps({"type": kind, "call_id": "c1", **fields}).encode() + b"\n"


class Upload:
    """An open stream of events: `send` bytes, read `answers` line by line."""

    def __init__(self, made: Agents, session: str = "run-1", key: str = "sk-one") -> None:
        self._made = made
        self._head = (
            f"POST /v1/sessions/{session}/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
        )

    async def __aenter__(self) -> Upload:
        port = self._made.proxy.running.bound.port
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        # Small, so that little is on its way when the proxy does not read.
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        self.writer.write(self._head.encode())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    def send(self, data: bytes) -> None:
        """Sends bytes; none end the stream."""
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def answer(self) -> dict[str, Any]:
        """Returns the next line of the answer."""
        async with asyncio.timeout(10):
            while True:
                found = await self.reader.readline()
                assert found, "the response has ended"
                if found.startswith(b"{"):
                    parsed: dict[str, Any] = json.loads(found)
                    return parsed


def told(made: Agents) -> list[tuple[str, str, str, str]]:
    return [(e.kind, e.call, e.tool, e.text) for e in made.worker.news if isinstance(e, api.ToolEvent)]


async def test_single_events(made: Agents) -> None:
    for body in (
        line("tool_started", tool="ls"),
        line("tool_output_delta", text="a"),
        line("tool_finished", output="b"),
    ):
        reply = await made.ask("POST", "/sessions/run-1/events", body)
        assert (reply.status, reply.json) == (200, {"type": "acknowledged", "events": 1, "delivered": 1, "rejected": 0})
    await until(lambda: len(made.worker.news) == 3)
    assert told(made) == [("started", "c1", "ls", ""), ("output", "c1", "", "a"), ("finished", "c1", "", "b")]
    (asked,) = made.worker.generated
    assert {(e.tenant, e.session) for e in made.worker.news} == {(asked.tenant, asked.session)}
    assert await made.metric("session_events") == {
        'type="tool_started"': 1,
        'type="tool_output_delta"': 1,
        'type="tool_finished"': 1,
    }


@pytest.mark.thorough
async def test_output_reaches_the_worker_while_the_stream_is_open(made: Agents) -> None:
    async with Upload(made) as upload:
        upload.send(line("tool_started", tool="ls", branch="b1"))
        await until(lambda: len(made.worker.news) == 1)
        for number in range(20):
            upload.send(line("tool_output_delta", text=f"{number} ", branch="b1"))
            await until(lambda: "".join(t for *_, t in told(made)).endswith(f"{number} "))  # noqa: B023
        upload.send(b"\n\n" + line("tool_finished", branch="b1").rstrip())
        upload.send(b"")
        assert await upload.answer() == {"type": "acknowledged", "events": 22, "delivered": 22, "rejected": 0}
    assert {e.branch for e in made.worker.news} == {"b1"}
    assert "".join(t for *_, t in told(made)) == "".join(f"{n} " for n in range(20))


@pytest.mark.thorough
async def test_output_that_is_there_goes_as_one_piece_in_order(made: Agents) -> None:
    pieces = [line("tool_output_delta", text=f"{n},", call_id="c1" if n % 100 else "c2") for n in range(1000)]
    reply = await made.ask("POST", "/sessions/run-1/events", b"".join(pieces), **NDJSON)
    assert reply.json == {"type": "acknowledged", "events": 1000, "delivered": 1000, "rejected": 0}
    await until(lambda: sum(len(t.split(",")) - 1 for *_, t in told(made)) == 1000)
    assert len(made.worker.news) < 100
    for call in ("c1", "c2"):
        text = "".join(t for _, c, _, t in told(made) if c == call)
        assert text == "".join(f"{n}," for n in range(1000) if (call == "c1") == bool(n % 100))


@pytest.mark.thorough
async def test_a_wrong_line_is_told_at_once_and_the_stream_goes_on(made: Agents) -> None:
    async with Upload(made) as upload:
        upload.send(line("tool_started") + line("tool_exploded"))
        fault = await upload.answer()
        assert (fault["type"], fault["line"], fault["error"]["param"]) == ("error", 2, "type")
        assert "'tool_exploded'" in fault["error"]["message"]
        assert "tool_output_delta" in fault["error"]["message"]
        for wrong, param in (
            (b"{\n", None),
            (line("tool_output_delta"), "text"),
            (line("tool_started", tool=5), "tool"),
        ):
            upload.send(wrong)
            assert (await upload.answer())["error"]["param"] == param
        upload.send(line("tool_finished"))
        upload.send(b"")
        assert await upload.answer() == {"type": "acknowledged", "events": 2, "delivered": 2, "rejected": 4}
    single = await made.ask("POST", "/sessions/run-1/events", line("tool_exploded"))
    assert (single.status, single.error["param"]) == (400, "type")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("limit", "value", "sent"),
    [("MAX_LINE", 50, b"x" * 100), ("MAX_FAULTS", 3, b"{}\n" * 9), ("SILENCE_S", 0.02, line("tool_started"))],
)
async def test_a_stream_that_passes_a_limit_ends(
    made: Agents, monkeypatch: pytest.MonkeyPatch, limit: str, value: float, sent: bytes
) -> None:
    monkeypatch.setattr(events_module, limit, value)
    async with Upload(made) as upload:
        upload.send(sent)
        answers = [await upload.answer()]
        while answers[-1]["type"] == "error":
            answers.append(await upload.answer())
        assert answers[-2]["error"]["code"] == "invalid_value"
        assert answers[-1]["rejected"] == (3 if limit == "MAX_FAULTS" else 0)


@pytest.mark.thorough
async def test_a_worker_that_does_not_read_holds_the_client_back(made: Agents) -> None:
    made.worker.reading.clear()
    sent = [line("tool_output_delta", text=f"{number:06}" + "x" * 16_000) for number in range(300)]

    async with Upload(made) as upload:

        async def push() -> None:
            for each in sent:
                upload.send(each)
                await upload.writer.drain()
            upload.send(b"")

        pushing = asyncio.create_task(push())
        await until(lambda: made.proxy.running.surface.turnstile.busy)
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert not pushing.done()
        assert made.worker.news == []
        made.worker.reading.set()
        await pushing
        assert (await upload.answer())["delivered"] == 300
    await until(lambda: sum(text.count("x") for *_, text in told(made)) == 4_800_000)
    assert [text[:6] for *_, text in told(made)] == sorted(text[:6] for *_, text in told(made))


async def test_lines_are_the_same_wherever_the_bytes_are_split() -> None:
    data = '{}\n\n{"text": "é"}\r\n  \n{"last": 1}'.encode()

    class Pieces:
        def __init__(self, cuts: tuple[int, ...]) -> None:
            ends = (*cuts, len(data))
            self.rest = [data[a:b] for a, b in zip((0, *cuts), ends, strict=True) if a < b]

        async def readany(self) -> bytes:
            return self.rest.pop(0) if self.rest else b""

    for first in range(len(data)):
        for second in range(first, len(data), 5):
            batches = [batch async for batch in events_module.lines(Pieces((first, second)))]
            assert [each for batch in batches for each in batch] == data.split(b"\n")


async def test_a_client_that_leaves_leaves_nothing_behind(made: Agents) -> None:
    surface = made.proxy.running.surface
    async with Upload(made) as upload:
        upload.send(line("tool_started"))
        await until(lambda: len(made.worker.news) == 1)
        assert surface.drain.running == 1
    await until(lambda: surface.drain.running == 0)
    assert not surface.turnstile.busy
    assert (await made.ask("GET", "/sessions/run-1")).status == 200


async def test_open_streams_are_bounded_per_tenant(made: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "STREAMS_AT_ONCE", 1)
    await made.step("run-2", "sk-two")
    async with Upload(made) as upload:
        upload.send(line("tool_started"))
        await until(lambda: len(made.worker.news) == 1)
        refused = await made.ask("POST", "/sessions/run-1/events", b"", **NDJSON)
        assert (refused.status, refused.header("retry-after")) == (429, "1")
        other = await made.ask("POST", "/sessions/run-2/events", b"", "sk-two", **NDJSON)
        assert other.json["type"] == "acknowledged"


@pytest.mark.thorough
@pytest.mark.parametrize("stored", [True, False])
async def test_a_failed_step_is_remembered(tmp_path: Path, stored: bool) -> None:
    async with agents(tmp_path, stored=stored) as made:
        for _ in range(2):
            await made.step("run-1", track_feedback=True)
        for body in ({"type": "step_failed", "reason": "wrong file"}, {"type": "step_failed", "step": 0}):
            assert (await made.ask("POST", "/sessions/run-1/events", body)).json["events"] == 1
        refused = await made.ask("POST", "/sessions/run-1/events", {"type": "step_failed", "step": 2})
        assert (refused.status, refused.error["param"]) == (400, "step")
        report = (await made.ask("GET", "/sessions/run-1")).json
        assert (report["state"], [step["dead"] for step in report["tracked_steps"]]) == ("failed", ["", "wrong file"])


@pytest.mark.thorough
async def test_tools_are_told_of_while_worker_or_store_are_away(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        await made.step("run-1")
        assert made.store is not None
        await made.store.kill()
        reply = await made.ask("POST", "/sessions/run-1/events", line("tool_started"))
        assert reply.json["delivered"] == 1
        failed = await made.ask("POST", "/sessions/run-1/events", {"type": "step_failed"})
        unknown = await made.ask("POST", "/sessions/run-9/events", line("tool_started"))
        assert (failed.status, unknown.status, unknown.error["code"]) == (503, 503, "store_unavailable")
        await made.worker.close()
        worker = made.proxy.running.surface.worker
        await until(lambda: worker is not None and not worker.available())
        reply = await made.ask("POST", "/sessions/run-1/events", line("tool_finished"))
        assert reply.json == {"type": "acknowledged", "events": 1, "delivered": 0, "rejected": 0}
