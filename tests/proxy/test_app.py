"""The process: start, ports, the orderly stop, and what a person sees."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from magnitude_engine.errors import ConfigError
from magnitude_proxy import app
from magnitude_proxy.app import Bound, banner, example, serve, tell_loading
from magnitude_proxy.config import ListenConfig, StoreConfig, UpstreamConfig
from magnitude_proxy.keyfile import parse_key_file
from testkit import wire
from testkit.proxy import ASK, Proxy, proxy_config, proxying
from testkit.serve import free_port, serving
from testkit.upstream import HANG, STREAM_HEAD, OpenAIStub, ScriptedServer, chunk, sse


async def until_running(proxy: Proxy, count: int) -> None:
    async with asyncio.timeout(5):
        while proxy.running.surface.drain.running != count:
            await asyncio.sleep(0.005)


@pytest.mark.thorough
async def test_running_requests_finish_and_new_ones_get_503(tmp_path: Path) -> None:
    async with (
        OpenAIStub(piece_delay_s=0.1, delay_s=0.2) as stub,
        aiohttp.ClientSession() as idle,
        proxying(proxy_config(tmp_path, stub.url), grace_s=5) as proxy,
    ):
        async with idle.get(f"{proxy.origin}/health/live") as kept:
            assert kept.status == 200
        streamed = asyncio.create_task(proxy.post("/chat/completions", {**ASK, "stream": True}))
        whole = asyncio.create_task(proxy.post("/chat/completions", ASK))
        await until_running(proxy, 2)
        proxy.running.surface.drain.close()
        async with idle.post(f"{proxy.url}/chat/completions", json=ASK) as refused:
            assert refused.status == 503
            assert refused.headers["Connection"] == "close"
            assert wire.check_error(await refused.json())["code"] == "stopping"
        assert (await proxy.get("/health/ready")).status == 503
        assert (await proxy.get("/health/live")).status == 200
        assert (await whole).json["choices"][0]["message"]["content"] == stub.text
        assert (await streamed).events[-1] == "[DONE]"


@pytest.mark.thorough
async def test_what_outlasts_the_grace_is_ended_with_an_error(tmp_path: Path) -> None:
    head = STREAM_HEAD + sse(chunk("Hel"))
    async with ScriptedServer([[head, HANG]]) as upstream:
        async with proxying(proxy_config(tmp_path, upstream.url), grace_s=0.05) as proxy:
            streams = [asyncio.create_task(proxy.post("/chat/completions", {**ASK, "stream": True})) for _ in range(2)]
            whole = asyncio.create_task(proxy.post("/chat/completions", ASK))
            await until_running(proxy, 3)
            async with asyncio.timeout(5):
                while upstream.connections < 3:
                    await asyncio.sleep(0.005)
            await asyncio.sleep(0.05)
            stopping = asyncio.create_task(_stop(proxy))
            for stream in streams:
                reply = await stream
                assert reply.status == 200
                assert wire.check_error(reply.events[-1])["code"] == "stopping"
            assert (await whole).error["code"] == "stopping"
            await stopping
        assert upstream.aborted == 3


async def _stop(proxy: Proxy) -> None:
    await app._drain(proxy.running.surface, 0.05)


async def test_a_taken_port_is_a_clear_error(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        port = proxy.running.bound.port
        listen = ListenConfig(port=port, admin_port=0)
        with pytest.raises(ConfigError) as caught:
            await serve(proxy_config(tmp_path, stub.url, listen=listen))
        assert str(port) in caught.value.message
        assert "--port" in caught.value.message
        with pytest.raises(ConfigError, match="--admin-port"):
            await serve(proxy_config(tmp_path, stub.url, listen=ListenConfig(port=0, admin_port=port)))


@pytest.mark.thorough
async def test_serve_announces_itself_and_stops_when_cancelled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds: list[Bound] = []
    async with OpenAIStub() as stub, aiohttp.ClientSession() as client:
        listen = ListenConfig(port=0)
        task = asyncio.create_task(serve(proxy_config(tmp_path, stub.url, listen=listen), bounds.append))
        async with asyncio.timeout(10):
            while not bounds:
                await asyncio.sleep(0.01)
        async with client.get(f"{bounds[0].origin}/health") as response:
            assert response.status == 200
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(f"{bounds[0].origin}/health")
    assert f"base_url   {bounds[0].url}" in capsys.readouterr().out


def test_the_banner_has_no_secrets(tmp_path: Path) -> None:
    config = proxy_config(
        tmp_path,
        store=StoreConfig(url="redis://user:hunter2@store:6379/0"),
        keys=parse_key_file("sk-one alice", "keys"),
        upstreams=(UpstreamConfig(name="u0", url="https://api.example.com/v1"),),
    )
    bound = Bound(8000, 8001, "http://127.0.0.1:8000")
    text = banner(config, bound) + example(config, bound)
    assert "hunter2" not in text
    assert "store:6379/0" in text
    assert "Bearer YOUR_KEY" in text
    assert "sk-one" not in text


class Loading:
    """A worker that becomes ready at its third look."""

    def __init__(self) -> None:
        self.looks = 0
        self.card = None
        self.status = None

    def available(self) -> bool:
        self.looks += 1
        return self.looks > 3


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
async def test_loading_is_told_once_the_model_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO
) -> None:
    monkeypatch.setattr(app, "LOOK_S", 0.001)
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        surface: Any = proxy.running.surface
        changed = {name: getattr(surface, name) for name in surface.__dataclass_fields__}
        failures = iter(["out of memory", "out of memory", None, None, None])
        loading = type(surface)(**{**changed, "worker": Loading(), "failure": lambda: next(failures)})
        await tell_loading(loading, stream)
    told = stream.getvalue()
    assert told.count("out of memory") == 1
    assert "the model is ready after" in told
    assert ("\r" in told) is stream.isatty()


@pytest.mark.slow
def test_python_with_asserts_off_is_refused(tmp_path: Path) -> None:
    code = (
        "from magnitude_proxy import app, config\n"
        "try: app.run(config.ProxyConfig(data_dir='x'))\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.startswith("ConfigError do not run with python -O")


@pytest.mark.slow
def test_the_real_process_serves_and_ends_clean_on_sigterm(tmp_path: Path) -> None:
    upstream = f"http://127.0.0.1:{free_port()}/v1"
    with serving(tmp_path, "--no-worker", "--upstream", upstream) as server:
        assert server.health()["store"] == "ok"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(15) == 0
    log = server.log.read_text()
    assert "Traceback" not in log
    assert os.listdir(tmp_path / "data")


@pytest.mark.slow
def test_a_bad_setting_is_one_line_and_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "magnitude_proxy.main", "serve", "--port", "70000", "--data-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
