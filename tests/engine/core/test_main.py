"""The worker's command line: wrong settings are one line and exit status 2."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest
import torch

from magnitude_engine import api
from magnitude_engine.engine import Engine
from magnitude_engine.errors import ConfigError
from magnitude_engine.kv.disk.folder import BlockFolder, SystemFiles
from magnitude_engine.main import Ready, main, read_config, serve
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import engine_config, generate, spoiled
from testkit.worker_client import WorkerClient


def test_settings_are_json_or_a_file(tmp_path: Path) -> None:
    text = '{"model_path": "m.gguf", "threads": 2}'
    file = tmp_path / "config.json"
    file.write_text(text, "utf-8")
    assert read_config(text) == read_config(str(file))
    assert read_config(text).threads == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_path": 5}', "model_path"),
        ('{"model_path": "m", "nonsense": 1}', "nonsense"),
        ('{"model_path": "m", "prefill_chunk": 0}', "prefill_chunk"),
        ("{", "--config"),
        ("no/such/file.json", "cannot read no/such/file.json"),
    ],
)
def test_wrong_settings_say_what_is_wrong(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=words):
        read_config(text)
    assert main(["--config", text, "--socket", "unused.sock"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("magnitude worker: --config: ")


def test_a_cache_folder_in_use_is_told_before_the_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnitude_engine.main.LOCK_WAIT_S", 0.0)
    config = engine_config(model_path="no such model", kv_disk_mb=1, kv_dir=str(tmp_path / "kv"))
    owner = BlockFolder(tmp_path / "kv", b"", SystemFiles())
    arguments = ["--config", msgspec.json.encode(config).decode(), "--socket", str(tmp_path / "w.sock")]
    assert main(arguments) == 2
    assert "uses the cache folder" in capsys.readouterr().err
    owner.close()
    assert main(arguments) == 2
    assert "no model at" in capsys.readouterr().err


async def listening(task: asyncio.Task[int], socket: Path) -> None:
    """Waits until the server of `task` listens."""
    async with asyncio.timeout(30):
        while not socket.exists():
            assert not task.done()
            await asyncio.sleep(0.01)


@pytest.mark.thorough
async def test_it_says_when_it_listens_and_stops_on_sigterm(
    model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket = tmp_path / "w.sock"
    task = asyncio.create_task(serve(Engine(model, engine_config(), pages=64), socket, grace_s=30.0))
    await listening(task, socket)
    async with WorkerClient(socket) as client:
        client.send(generate("x"))
        await client.until(api.Started)
        os.kill(os.getpid(), signal.SIGTERM)
        await client.until(api.Completed)
        assert await client.closed()
    assert await task == 0
    assert not socket.exists()
    ready = msgspec.json.decode(capsys.readouterr().out, type=Ready)
    assert (ready.event, ready.pid, ready.socket, ready.model) == ("ready", os.getpid(), str(socket), model.card)


@pytest.mark.thorough
async def test_it_gives_up_when_steps_keep_failing(model: LoadedModel, tmp_path: Path) -> None:
    def spoil(logits: torch.Tensor, call: int) -> torch.Tensor:
        raise RuntimeError("planted")

    socket = tmp_path / "w.sock"
    engine = Engine(spoiled(model, spoil), engine_config(max_batch_size=1), pages=64)
    task = asyncio.create_task(serve(engine, socket, grace_s=30.0))
    await listening(task, socket)
    async with WorkerClient(socket) as client:
        answers = await client.answer(*(generate("x") for _ in range(4)))
    assert [a.failed.code if a.failed else None for a in answers] == ["engine_error"] * 3 + ["worker_lost"]
    assert await task == 3
