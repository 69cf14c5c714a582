"""API keys: made, hashed, refused by name, taken up while the proxy runs, and what each of them may do."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
import stat
from pathlib import Path

import aiohttp
import pytest

from magnitude_engine.errors import ConfigError
from magnitude_proxy import main as cli
from magnitude_proxy.app import Bound, serve
from magnitude_proxy.config import ListenConfig, UpstreamConfig
from magnitude_proxy.keyfile import configured_keys, parse_key_file, read_key_file
from magnitude_proxy.keywatch import KeyWatch
from magnitude_proxy.refusals import Refusals
from testkit.proxy import ASK, proxy_config, proxying
from testkit.upstream import OpenAIStub

HASH = "sha256:" + "a" * 64


@pytest.mark.thorough
def test_a_new_key_is_shown_once_and_kept_as_a_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    options = ("--tenant", "alice", "--name", "ci", "--set", "max_iterations=50", "--set", "admin=true")
    made = []
    for _ in range(2):
        assert cli.main(["keys", "new", *options[:2], "--append", str(file)]) == 0
        made.append(capsys.readouterr().out.strip())
    assert cli.main(["keys", "new", *options]) == 0
    shown = capsys.readouterr()
    assert len({*made, shown.out.strip()}) == 3
    assert all(len(key) > 50 and key not in file.read_text() for key in made)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [key.tenant for key in read_key_file(str(file))] == ["alice", "alice"]
    line = next(line for line in shown.err.splitlines() if line.startswith("sha256:"))
    (known,) = parse_key_file(line, "keys")
    assert (known.name, known.admin, known.limits.max_iterations) == ("ci", True, 50)


@pytest.mark.thorough
def test_a_key_that_exists_is_hashed_from_stdin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-old\n"))
    assert cli.main(["keys", "hash", "--tenant", "alice"]) == 0
    line = capsys.readouterr().out
    assert "sk-old" not in line
    assert parse_key_file(line, "keys") == parse_key_file("sk-old alice", "keys")
    assert cli.main(["keys", "new", "--tenant", "a b"]) == 2


@pytest.mark.parametrize(
    ("line", "param", "words"),
    [
        ("sk-secret", "keys", "a key and a tenant"),
        ("sha256:sk-secret t", "keys.sha256", "64 hex digits"),
        (f"{HASH} t max_iterations=0", "keys.max_iterations", "whole number of at least 1"),
        (f"{HASH} t tokens_per_day=sk-secret", "keys.tokens_per_day", "whole number of at least 1"),
        (f"{HASH} t max_seconds=-1", "keys.max_seconds", "above 0"),
        (f"{HASH} t admin=perhaps", "keys.admin", "true or false"),
        (f"{HASH} t name=a/b", "keys.name", "letters, digits"),
        (f"{HASH} t sk-secret", "keys", "may stand name, upstream, admin"),
        (f"{HASH} t name=a name=b", "keys.name", "stands twice"),
    ],
)
def test_a_wrong_line_names_the_field_and_the_fix_and_no_key(line: str, param: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_key_file(f"# keys\n{line}\n", "file")
    assert caught.value.param == param
    assert "file, line 2" in caught.value.message
    assert words in caught.value.message
    assert "sk-secret" not in caught.value.message


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "param"),
    [
        ("sk-a t\nsk-a u", "keys.sha256"),
        ("sk-a t name=x\nsk-b t name=x", "keys.name"),
        ("sk-a t upstream=v", "keys.upstream"),
    ],
)
def test_keys_that_contradict_each_other_or_the_settings_stop_the_start(
    tmp_path: Path, text: str, param: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        configured_keys((), str(file), (UpstreamConfig(name="u", url="http://u/v1"),))
    assert caught.value.param == param
    assert cli.main(["serve", "--no-worker", "--upstream", "u=http://127.0.0.1:9/v1", "--key-file", str(file)]) == 2
    assert caught.value.message in capsys.readouterr().err


async def test_a_key_with_an_upstream_gets_that_one_only(tmp_path: Path) -> None:
    keys = parse_key_file("sk-one alice\nsk-two bob upstream=u1", "keys")
    async with (
        OpenAIStub(text="first") as first,
        OpenAIStub(text="second") as second,
        proxying(proxy_config(tmp_path, first.url, second.url, keys=keys)) as proxy,
    ):
        for key, text in (("sk-one", "first"), ("sk-two", "second")):
            reply = await proxy.post("/chat/completions", ASK, authorization=f"Bearer {key}")
            assert reply.json["choices"][0]["message"]["content"] == text
            listed = (await proxy.get("/v1/models", x_api_key=key)).json["data"]
            assert {each["owned_by"] for each in listed} == {"u0" if key == "sk-one" else "u1"}
        assert "sk-two" not in str(second.requests[0].headers)


async def test_an_address_that_guesses_keys_is_heard_only_with_keys_it_had_used(tmp_path: Path) -> None:
    keys = parse_key_file("sk-one alice\nsk-two bob", "keys")
    listen = ListenConfig(port=0, admin_port=0, max_refused_per_minute=3)
    async with proxying(proxy_config(tmp_path, "http://127.0.0.1:9/v1", keys=keys, listen=listen)) as proxy:
        for key, status in (("sk-one", 200), *[("sk-bad", 401)] * 3, ("sk-bad", 429), ("sk-two", 429), ("sk-one", 200)):
            reply = await proxy.get("/v1/sessions", x_api_key=key)
            assert reply.status == status
            if status == 429:
                assert (reply.error["code"], reply.header("x-should-retry")) == ("rate_limit_exceeded", "false")
                assert 0 < int(str(reply.header("retry-after"))) <= 60
        assert (await proxy.get("/health/live")).status == 200


def test_refusals_are_forgotten_with_their_minute() -> None:
    refusals = Refusals(2)
    for _ in range(2):
        refusals.count("a", None, 100.0)
    assert refusals.wait_s("a", "k", 130.0) == 30.0
    assert refusals.wait_s("b", None, 130.0) == 0
    assert refusals.wait_s("a", None, 160.0) == 0
    refusals.count("a", None, 160.0)
    assert refusals.wait_s("a", "k", 161.0) == 0
    assert Refusals(0).wait_s("a", None, 0.0) == 0


async def test_a_tenants_key_does_not_open_the_second_listener_of_all(tmp_path: Path) -> None:
    keys = parse_key_file("sk-one alice\nsk-two bob\nsk-ops ops admin=true", "keys")
    listen = ListenConfig(port=0, admin_port=0, admin_host="0.0.0.0")
    async with proxying(proxy_config(tmp_path, "http://127.0.0.1:9/v1", keys=keys, listen=listen)) as proxy:
        for path in ("/metrics", "/cache"):
            refused = await proxy.get(f"{proxy.admin}{path}", x_api_key="sk-one")
            assert (refused.status, refused.error["code"]) == (403, "admin_key_required")
            assert (await proxy.get(f"{proxy.admin}{path}", x_api_key="sk-ops")).status in (200, 404)


async def test_a_changed_key_file_is_taken_up_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one alice\n")
    looks: asyncio.Queue[float] = asyncio.Queue()
    looked: asyncio.Queue[None] = asyncio.Queue()

    async def look(seconds: float) -> None:
        looked.put_nowait(None)
        await looks.get()

    async def after(text: str) -> list[int]:
        file.write_text(text)
        for _ in range(3):
            looks.put_nowait(0)
            await looked.get()
        return [(await proxy.get("/health", x_api_key=key)).status for key in ("sk-one", "sk-two")]

    config = proxy_config(tmp_path, "http://127.0.0.1:9/v1", key_file=str(file))
    with caplog.at_level(logging.INFO):
        async with proxying(config) as proxy:
            following = asyncio.create_task(KeyWatch(config, proxy.running.surface.keys).follow(look))
            await looked.get()
            assert await after("sk-one alice\nsk-two bob\n") == [200, 200]
            assert await after("sk-two bob\n") == [401, 200]
            assert await after("sk-one alice max_tokens=none\n") == [401, 200]
            file.unlink()
            assert await after("sk-one alice # \n") == [401, 200]
            following.cancel()
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "line 1: max_tokens must be a whole number" in logged
    assert "sk-one" not in logged


@pytest.mark.thorough
async def test_sighup_reads_the_key_file_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one alice\n")
    bounds: list[Bound] = []
    config = proxy_config(tmp_path, "http://127.0.0.1:9/v1", key_file=str(file), listen=ListenConfig(port=0))
    task = asyncio.create_task(serve(config, bounds.append))
    try:
        async with asyncio.timeout(10), aiohttp.ClientSession(headers={"x-api-key": "sk-two"}) as http:
            while not bounds:
                await asyncio.sleep(0.01)
            file.write_text("sk-two bob\n")
            os.kill(os.getpid(), signal.SIGHUP)
            status = 401
            while status == 401:
                async with http.get(f"{bounds[0].origin}/v1/sessions") as reply:
                    status = reply.status
        assert status == 200
    finally:
        task.cancel()
        await asyncio.wait({task})
