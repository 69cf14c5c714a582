"""Settings: precedence, one table for everything, refusals that name the fix; keys and the server's secret."""

from __future__ import annotations

import argparse
import hashlib
import stat
from pathlib import Path

import msgspec
import pytest

from magnitude_engine.errors import ConfigError
from magnitude_proxy import settings
from magnitude_proxy.access import KeyRing, host_is_local, is_loopback, origin_is_local, server_secret
from magnitude_proxy.config import ProxyConfig
from magnitude_proxy.keyfile import configured_keys, parse_key_file
from magnitude_proxy.toml_places import place


def load(*flags: str, **environ: str) -> ProxyConfig:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.load(parser.parse_args(list(flags)), environ)


def refused(*flags: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*flags, **environ)
    return caught.value


@pytest.mark.thorough
def test_defaults_spawn_a_worker_on_loopback() -> None:
    config = load(MAGNITUDE_DATA_DIR="/d")
    assert config.data_dir == "/d"
    assert (config.listen.host, config.listen.port) == ("127.0.0.1", 8000)
    assert config.worker.engine is not None
    assert config.worker.engine.model_path == config.worker.model == "smollm2"


@pytest.mark.thorough
def test_a_spawned_worker_keeps_pages_on_disk_in_the_data_folder_unless_told(tmp_path: Path) -> None:
    plain = load(MAGNITUDE_DATA_DIR="/d").worker.engine
    assert plain is not None
    assert (plain.kv_host_mb, plain.kv_disk_mb, plain.kv_dir) == (0, 4096, "/d/kv/default")
    file = tmp_path / "m.toml"
    file.write_text("[worker.engine]\nkv_disk_mb = 9\nkv_dir = '~/kept'\n")
    told = load("--config", str(file), "--kv-disk-mb", "0", MAGNITUDE_KV_HOST_MB="64").worker.engine
    assert told is not None
    assert (told.kv_host_mb, told.kv_disk_mb, told.kv_dir) == (64, 0, str(Path.home() / "kept"))
    near = load("--kv-dir", "near").worker.engine
    assert near is not None
    assert near.kv_dir == str(Path("near").absolute())


@pytest.mark.thorough
def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text(
        """
        [listen]
        port = 1
        [store]
        timeout_s = 0.5
        [worker.engine]
        profile = "reference"
        threads = 3
        [retry]
        budget_min = 9
        """
    )
    config = load("--config", str(file), "--port", "3", MAGNITUDE_PORT="2", MAGNITUDE_THREADS="4", MAGNITUDE_N="x")
    assert config.listen.port == 3
    assert config.store.timeout_s == 0.5
    assert config.retry.budget_min == 9
    assert config.worker.engine is not None
    assert (config.worker.engine.threads, config.worker.engine.profile) == (4, "reference")
    assert load(MAGNITUDE_CONFIG=str(file), MAGNITUDE_PORT="2").listen.port == 2


@pytest.mark.thorough
def test_upstreams_keep_their_order_and_names(tmp_path: Path) -> None:
    config = load(
        "--no-worker", "--upstream", "big=https://api.example.com/v1/", "--upstream", "http://127.0.0.1:8001/v1?a=b",
        "--upstream-key-file", "big=/k1", "--upstream-key-file", "/k2",
        "--upstream-model", "big=org/big",
    )  # fmt: skip
    assert config.worker.mode == "none"
    assert config.worker.engine is None
    assert [(u.name, u.url, u.key_file) for u in config.upstreams] == [
        ("big", "https://api.example.com/v1", "/k1"),
        ("127.0.0.1-8001", "http://127.0.0.1:8001/v1?a=b", "/k2"),
    ]
    assert [u.models for u in config.upstreams] == [{"*": "org/big"}, {}]
    listed = load(MAGNITUDE_UPSTREAM="a=http://x/v1, b=http://y/v1")
    assert [u.name for u in listed.upstreams] == ["a", "b"]


@pytest.mark.thorough
def test_the_store_has_two_variables() -> None:
    assert load(MAGNITUDE_REDIS_URL="redis://r/0").store.url == "redis://r/0"
    assert load(MAGNITUDE_REDIS_URL="redis://r/0", MAGNITUDE_STORE="none").store.url == "none"


@pytest.mark.thorough
def test_aliases_and_booleans() -> None:
    config = load("--model-alias", "gpt-4o", "--model-alias", "*", "--insecure", "--host", "0.0.0.0")
    assert config.worker.aliases == ("gpt-4o", "*")
    assert config.insecure
    assert load(MAGNITUDE_INSECURE="true", MAGNITUDE_MODEL_ALIAS="a,b").worker.aliases == ("a", "b")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "x"], ["--port", "whole number"]),
        (["--port", "70000"], ["--port", "65535"]),
        (["--profile", "fast"], ["--profile", "reference", "packed", "native"]),
        (["--store-timeout-s", "nan"], ["--store-timeout-s"]),
        (["--insecure", "--no-worker"], ["--upstream"]),
        (["--worker", "attach"], ["--worker-socket"]),
        (["--host", "0.0.0.0"], ["--key-file", "--insecure"]),
        (["--admin-host", "0.0.0.0"], ["admin_host", "--key-file"]),
        (["--upstream", "example.com"], ["--upstream", "http://"]),
        (["--upstream", "http://a/v1", "--upstream", "http://a/v1"], ["NAME=URL"]),
        (["--upstream-key-file", "x=/k"], ["--upstream-key-file"]),
        (["--upstream", "a b=http://a/v1"], ["upstreams[0].name"]),
        (["--config", "/nowhere.toml"], ["/nowhere.toml"]),
        (["--key-file", "/nowhere.keys"], ["/nowhere.keys"]),
    ],
)
def test_what_cannot_be_used_is_named_with_the_fix(flags: list[str], words: list[str]) -> None:
    message = refused(*flags).message
    for word in words:
        assert word in message


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[listen]\nprt = 1", ["listen", "prt"]),
        ("[nonsense]\na = 1", ["nonsense"]),
        ("[listen]\nport = 'x'", ["listen.port"]),
        ("[worker]\nmode = 'fly'", ["worker.mode", "spawn"]),
        ("[worker.engine]\nkv_dir = 5", ["worker.engine.kv_dir"]),
        ("[worker.engine]\nkv_dir = ''", ["worker.engine.kv_dir"]),
        ("[worker.engine]\nkv_disk_mb = -1", ["worker.engine.kv_disk_mb"]),
        ("listen = 5", ["listen"]),
        ("worker = 5", ["worker"]),
        ("[[keys]]\nsha256 = 'x'\ntenant = 't'", ["keys[0].sha256"]),
        ("= broken", ["TOML"]),
    ],
)
def test_a_wrong_file_names_the_field(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "m.toml"
    file.write_text(text)
    message = refused("--config", str(file)).message
    for word in words:
        assert word in message


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kv_memory_mb = 1", "kv_memory_mb at the top level: did you mean [worker.engine] kv_memory_mb?"),
        ("[server]\nport = 1", "port in section [server]: did you mean [listen] port?"),
        ("[listen]\nprt = 1", "prt in section [listen]: did you mean [listen] port?"),
        ("[worker.engin]\nthreads = 1", "threads in section [worker.engin]: did you mean [worker.engine] threads?"),
        ("[listen]\ninsecure = true", "insecure in section [listen]: did you mean insecure at the top level?"),
        ("[deadlines]\nidle = 1", "idle in section [deadlines]: did you mean [deadlines] idle_s?"),
        (
            "[[upstreams]]\nname = 'a'\nurl = 'http://a/v1'\nkeyfile = '/k'",
            "keyfile in section [[upstreams]]: did you mean [[upstreams]] key_file?",
        ),
        ("[nonsense]\nq = 1", "q in section [nonsense]:"),
        ("[nonsense]", "nonsense at the top level:"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_one(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "m.toml"
    file.write_text(text)
    assert refused("--config", str(file)).message == (
        f"the file {file} has the unknown key {problem} `magnitude serve --help` names the place of every setting"
    )


def leaves(kind: type[msgspec.Struct], prefix: str = "") -> list[str]:
    found = []
    for field in msgspec.structs.fields(kind):
        inner = next((t for t in (field.type, *getattr(field.type, "__args__", ())) if _is_struct(t)), None)
        path = prefix + field.name
        found += [path] if inner is None or field.name in ("keys", "upstreams") else leaves(inner, path + ".")
    return found


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


@pytest.mark.thorough
def test_every_setting_is_in_the_table_and_in_the_help() -> None:
    paths = {setting.path for setting in (*settings.TABLE, *settings.SPECIAL)} | {"keys"}
    assert {path for path in leaves(ProxyConfig) if path != "worker.engine.model_path"} <= paths
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    shown = " ".join(parser.format_help().split())
    flags = [setting.flag for setting in (*settings.TABLE, *settings.SPECIAL)]
    assert len(set(flags)) == len(flags)
    assert "MiB (MAGNITUDE_KV_MEMORY_MB; [worker.engine] kv_memory_mb; default 2048)" in shown
    assert "[worker.engine] kv_disk_mb; default 4096)" in shown
    assert "[worker.engine] kv_dir; default kv/default in the data folder)" in shown
    assert "[[upstreams]] key_file" in shown
    for setting in settings.TABLE:
        assert setting.flag in shown
        assert place(setting.path) in shown
        for variable in setting.variables:
            assert variable in shown


@pytest.mark.thorough
def test_keys_from_a_file_open_the_door_to_their_tenant(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sk-two").hexdigest()
    file = tmp_path / "keys"
    file.write_text(f"# comment\nsk-one alice\n\nsha256:{digest} bob\n")
    config = load("--key-file", str(file), "--host", "0.0.0.0")
    keys = configured_keys(config.keys, config.key_file, ())
    assert "sk-one" not in f"{config}{keys}"
    ring = KeyRing(keys, b"s" * 32)
    assert ring.required
    found = [ring.find(key) for key in ("sk-one", "sk-two", "sk-three", "", None)]
    assert [key and key.tenant.name for key in found] == ["alice", "bob", None, None, None]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].tenant.salt != found[1].tenant.salt
    assert len(found[0].tenant.salt) == 64


@pytest.mark.parametrize(
    "text", ["", "# only a comment", "sk-one", "sk-one a b", "sha256:xyz t", "sk-one " + "t" * 129]
)
def test_a_wrong_key_file_is_refused_without_showing_keys(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_key_file(text, "keys")
    assert "sk-one" not in caught.value.message


def test_without_keys_every_key_is_one_tenant() -> None:
    ring = KeyRing((), b"s" * 32)
    assert not ring.required
    found = ring.find(None)
    assert found is not None
    assert found == ring.find("anything")


def test_the_secret_is_made_once_and_private(tmp_path: Path) -> None:
    first = server_secret(tmp_path / "data")
    assert server_secret(tmp_path / "data") == first
    assert len(first) == 32
    assert stat.S_IMODE((tmp_path / "data" / "secret").stat().st_mode) == 0o600
    assert [p.name for p in (tmp_path / "data").iterdir()] == ["secret"]
    assert server_secret(tmp_path / "other") != first


@pytest.mark.parametrize("content", ["", "xyz", "ab" * 31])
def test_a_damaged_secret_stops_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "secret").write_text(content)
    with pytest.raises(ConfigError, match="secret"):
        server_secret(tmp_path)


@pytest.mark.parametrize(
    ("name", "loopback"),
    [
        ("localhost", True), ("LOCALHOST.", True), ("a.localhost", True), ("127.0.0.1", True), ("127.9.9.9", True),
        ("::1", True), ("[::1]", True), ("0.0.0.0", False), ("10.0.0.1", False), ("example.com", False),
        ("localhost.example.com", False), ("", False),
    ],
)  # fmt: skip
def test_loopback_names(name: str, loopback: bool) -> None:
    assert is_loopback(name) is loopback


@pytest.mark.parametrize(
    ("header", "local"),
    [
        (None, True), ("localhost:8000", True), ("127.0.0.1", True), ("[::1]:8000", True), ("evil.example", False),
        ("evil.example:8000", False), ("", False), ("[::1", False), ("localhost@evil.example", False),
    ],
)  # fmt: skip
def test_host_headers(header: str | None, local: bool) -> None:
    assert host_is_local(header) is local


@pytest.mark.parametrize(
    ("header", "local"),
    [
        (None, True), ("http://localhost:3000", True), ("https://127.0.0.1", True), ("null", False),
        ("https://evil.example", False), ("file://", False), ("http://[::1", False), ("", False),
        ("http://localhost.evil.example", False),
    ],
)  # fmt: skip
def test_origin_headers(header: str | None, local: bool) -> None:
    assert origin_is_local(header) is local


@pytest.mark.thorough
@pytest.mark.parametrize("flags", [["--no-worker"], ["--worker-socket", "/run/w.sock", "--worker", "attach"]])
def test_engine_settings_without_a_worker_of_ones_own_stop_the_start(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"worker\.engine \(profile\)") as caught:
        load(*flags, "--profile", "reference")
    assert caught.value.param == "worker.engine"
