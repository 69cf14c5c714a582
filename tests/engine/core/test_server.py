"""The worker's socket: several proxies, bad frames, lost connections."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnitude_engine import api
from magnitude_engine import server as server_module
from magnitude_engine.engine import Engine
from magnitude_engine.errors import ConfigError
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.server import Server, open_socket
from testkit.engine import alone, engine_config, generate
from testkit.worker_client import WorkerClient


@pytest.fixture
def engine(model: LoadedModel) -> Engine:
    return Engine(model, engine_config(), pages=256, incarnation="one")


@pytest.fixture
async def path(engine: Engine, tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "run" / "worker.sock"
    server = Server(engine, path)
    await server.start()
    engine.start()
    yield path
    await asyncio.to_thread(engine.close)
    await server.close()
    assert not path.exists()


async def idle(engine: Engine) -> None:
    """Waits until the engine runs nothing."""
    async with asyncio.timeout(30):
        while engine.status().running or engine.status().waiting:
            await asyncio.sleep(0.01)


@pytest.mark.thorough
async def test_answers_equal_those_of_the_engine_alone(path: Path, model: LoadedModel) -> None:
    requests = [generate(f"prompt {i}") for i in range(6)]
    async with WorkerClient(path) as one, WorkerClient(path) as two:
        assert one.welcome is not None
        assert (one.welcome.incarnation, one.welcome.pid, one.welcome.model) == ("one", os.getpid(), model.card)
        answers = await asyncio.gather(one.answer(*requests[:3]), two.answer(*requests[3:]))
    for request, answer in zip(requests, [*answers[0], *answers[1]], strict=True):
        assert answer.ids() == alone(model, request).ids()


async def test_the_socket_is_private(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.thorough
async def test_a_refused_request_is_answered_with_its_error(path: Path) -> None:
    async with WorkerClient(path) as client:
        wrong, right = await client.answer(generate("x", n=999), generate("x"))
    assert wrong.failed is not None
    assert (wrong.failed.code, wrong.failed.param, wrong.failed.retryable) == ("invalid_value", "n", False)
    assert right.usage.completion_tokens == 12


async def test_counts_a_prompt_without_generating(path: Path, model: LoadedModel, engine: Engine) -> None:
    chat = api.ChatInput(messages=(api.Message(role="user", content="How many tokens?"),))
    async with WorkerClient(path) as client:
        client.send(
            api.Count(request="a", epoch=1, input=chat),
            api.Count(request="b", epoch=1, input=api.ChatInput(messages=())),
            api.Count(request="c", epoch=1, input=api.TextInput(text="x" * 1_000_000)),
        )
        told = {event.request: event for event in [await client.event() for _ in range(3)]}
    assert told["a"] == api.Completed(
        request="a", epoch=1, usage=api.Usage(prompt_tokens=len(model.prompts.encode(chat)))
    )
    assert [told[name].code for name in "bc"] == ["invalid_value", "context_length_exceeded"]
    assert engine.status().counters["prompt_tokens"] == 0


@pytest.mark.thorough
async def test_status_is_pushed_and_answers_a_probe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with WorkerClient(path) as client:
        first = await client.status()
        client.send(api.Probe())
        second = await client.status()
    assert first.incarnation == second.incarnation == "one"
    assert first.pages_total == 256


@pytest.mark.thorough
async def test_a_cancelled_request_sends_nothing_more(path: Path, engine: Engine) -> None:
    async with WorkerClient(path) as client:
        long = generate("x", max_tokens=100_000 // 100)
        client.send(long)
        await client.until(api.Delta)
        client.send(api.Cancel(request=long.request, epoch=long.epoch))
        await idle(engine)
        client.send(api.Probe())
        await client.status()
        (other,) = await client.answer(generate("y"))
    assert other.usage.completion_tokens == 12
    assert engine.status().pages_free == 256


@pytest.mark.thorough
async def test_a_request_cancelled_at_once_ends(path: Path, engine: Engine) -> None:
    async with WorkerClient(path) as client:
        requests = [generate("x" * 200, max_tokens=1000) for _ in range(8)]
        for request in requests:
            client.send(request, api.Cancel(request=request.request, epoch=request.epoch))
        (other,) = await client.answer(generate("y"))
        assert other.usage.completion_tokens == 12
        await idle(engine)
    assert engine.status().pages_free == 256


@pytest.mark.thorough
async def test_a_lost_connection_cancels_its_requests_only(path: Path, engine: Engine, model: LoadedModel) -> None:
    kept = generate("kept", max_tokens=60)
    async with WorkerClient(path) as stays:
        async with WorkerClient(path) as leaves:
            leaves.send(generate("x", max_tokens=1000))
            await leaves.until(api.Delta)
            task = asyncio.create_task(stays.answer(kept))
            leaves.writer.transport.abort()
        (answer,) = await task
    assert answer.ids() == alone(model, kept).ids()
    await idle(engine)
    assert engine.status().counters["requests_cancelled"] == 1
    assert engine.status().pages_free == 256


@pytest.mark.thorough
@pytest.mark.parametrize(
    "frame",
    [
        b"\x00\x00\x00\x03abc",
        b"\x00\x00\x00\x01\x80",
        b"\xff\xff\xff\xff",
        b"\x00\x01\x00\x00" + b"\x91" * 65536,
        api.encode_frame(api.Hello()),
        api.encode_frame(api.Probe())[:-1] + b"\xc1",
    ],
    ids=["no msgpack", "no tag", "oversized", "deep", "second hello", "truncated value"],
)
async def test_a_frame_that_cannot_be_read_closes_its_connection_only(path: Path, frame: bytes) -> None:
    async with WorkerClient(path) as good, WorkerClient(path) as bad:
        bad.writer.write(frame)
        assert await bad.closed()
        (answer,) = await good.answer(generate("x"))
    assert answer.usage.completion_tokens == 12


async def test_one_request_twice_closes_the_connection(path: Path, engine: Engine) -> None:
    async with WorkerClient(path) as client:
        request = generate("x", max_tokens=1000)
        client.send(request, request)
        assert await client.closed()
    await idle(engine)


@pytest.mark.parametrize("first", [api.Hello(protocol=99), api.Probe()], ids=["version", "no hello"])
async def test_another_protocol_is_refused(path: Path, first: api.Command) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(api.encode_frame(first))
    event = await api.FrameReader(reader).event()
    assert isinstance(event, api.Failed)
    assert event.code == "protocol_mismatch"
    assert f"protocol {api.PROTOCOL_VERSION}" in event.message
    assert await reader.read() == b""
    writer.close()


@pytest.mark.thorough
async def test_a_proxy_that_does_not_read_is_dropped(
    path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "BACKLOG_BYTES", 20_000)
    async with WorkerClient(path) as good, WorkerClient(path) as deaf:
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        raw = deaf.writer.get_extra_info("socket")
        assert isinstance(raw.family, socket.AddressFamily)
        deaf.send(*(generate("x", max_tokens=1000, n=4, logprobs=20) for _ in range(4)))
        async with asyncio.timeout(60):
            while engine.status().counters["requests_cancelled"] < 4:
                await asyncio.sleep(0.02)
        (answer,) = await good.answer(generate("y"))
    assert answer.usage.completion_tokens == 12


async def test_a_socket_in_use_is_not_taken(path: Path) -> None:
    with pytest.raises(ConfigError, match="another worker listens"):
        open_socket(path)


def test_a_stale_socket_is_replaced_and_a_bad_place_refused(tmp_path: Path) -> None:
    stale = tmp_path / "worker.sock"
    open_socket(stale).close()
    open_socket(stale).close()
    with pytest.raises(ConfigError, match="cannot listen"):
        open_socket(tmp_path / ("x" * 200))


def test_where_nothing_is_kept_nothing_is_computed_ahead(model: LoadedModel) -> None:
    engine = Engine(model, engine_config(optimization_level="off"), pages=96)
    done: list[bool] = []
    told: list[api.Registered | api.Failed] = []
    engine.register(api.Register(tenant="t", system="Be brief."), lambda: done.append(True), told.append)
    engine.close()
    (event,) = told
    assert isinstance(event, api.Registered)
    assert (event.ahead, done) == (False, [True])


@pytest.mark.thorough
async def test_a_registration_is_told_what_is_compiled_and_what_cannot_be(path: Path) -> None:
    odd = {"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}
    good = (api.Tool(name="a", parameters={"type": "object"}), api.Tool(name="b", parameters=odd))
    bad = api.Tool(name="c", parameters={"$ref": "https://example.com/s"})
    async with WorkerClient(path) as client:
        client.send(api.Register(tenant="t", request="r1", epoch=3, tools=good))
        told = await client.until(api.Registered)
        assert isinstance(told, api.Registered)
        assert (told.request, told.epoch, told.tools[0]) == ("r1", 3, api.RegisteredTool(name="a"))
        assert "uniqueItems" in told.tools[1].checked[0]
        client.send(api.Register(tenant="t", request="r2", tools=(*good, bad)))
        refused = await client.until(api.Failed)
        assert isinstance(refused, api.Failed)
        assert (refused.request, refused.param) == ("r2", "tools[2].function.parameters")
        assert "$ref" in refused.message
