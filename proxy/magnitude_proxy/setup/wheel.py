"""Takes one pinned wheel from the package index that this machine is configured for.

The work is left to an installer, which knows index, mirror, proxy and certificates: pip, else the pip that lies
in Python's own ensurepip, else uv. Each enforces the wheel's SHA-256. None of them continues a file that broke off
in an earlier run; a pip that can (25.1 and newer) continues within a run.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from magnitude_engine.errors import ModelNotFound
from magnitude_proxy import process
from magnitude_proxy.setup.progress import Progress

POLL_S = 0.1


class Wheel(NamedTuple):
    """One file of the package index; `size` in bytes."""

    requirement: str
    file_name: str
    sha256: str
    size: int


class Installer(NamedTuple):
    """A program that can take a wheel; `unpacks` says that it leaves the content and not the wheel."""

    name: str
    command: tuple[str, ...]
    unpacks: bool = False


def installers() -> Iterator[Installer]:
    """Yields what this machine has, the best first; the command still lacks the files."""
    options = ("--no-deps", "--only-binary=:all:", "--require-hashes")
    download = ("download", *options, "--no-input", "--quiet")
    if importlib.util.find_spec("pip") is not None:
        yield Installer("pip", (sys.executable, "-m", "pip", *download))
    bundled = _bundled_pip()
    if bundled is not None:
        yield Installer("ensurepip's pip", (sys.executable, str(bundled / "pip"), *download))
    uv = shutil.which("uv")
    if uv is not None:
        yield Installer("uv", (uv, "pip", "install", *options, "--quiet", "--python", sys.executable), unpacks=True)


def take(wheel: Wheel, folder: Path, progress: Progress) -> Path:
    """Returns the wheel in `folder`, or a folder with its content.

    Raises:
        ModelNotFound: there is no installer, or it failed; says which and how. Its message ends without advice.
    """
    installer = next(installers(), None)
    if installer is None:
        raise ModelNotFound("neither pip, ensurepip nor uv is installed")
    work = Path(tempfile.mkdtemp(prefix="work-", dir=folder))
    try:
        target = work / "content" if installer.unpacks else folder
        _run(installer, wheel, work, target, progress)
        if installer.unpacks:
            return target.replace(folder / "content")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder / wheel.file_name


def _bundled_pip() -> Path | None:
    """Returns the wheel of pip that `ensurepip` would install; Debian's Python has none."""
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("_bundled/pip-*.whl"))), None)


def _run(installer: Installer, wheel: Wheel, work: Path, target: Path, progress: Progress) -> None:
    """Runs the installer until it ends; the growing files are the progress."""
    listed = work / "requirements.txt"
    listed.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", "utf-8")
    log = work / "log"
    where = ("--target" if installer.unpacks else "--dest", str(target))
    environment = {
        "PIP_RETRIES": "2",
        "PIP_RESUME_RETRIES": "5",
        **os.environ,
        "TMPDIR": str(work),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_CACHE_DIR": str(work / "uv"),
    }
    with log.open("wb") as output:
        child = subprocess.Popen(
            (*installer.command, "-r", str(listed), *where),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=process.die_with_parent(),
        )
    done = 0
    try:
        while child.poll() is None:
            # pip moves the finished file away: what was seen stays.
            done = max(done, min(_largest(work), wheel.size))
            progress("downloading", done, wheel.size)
            time.sleep(POLL_S)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
    if child.returncode != 0:
        raise ModelNotFound(f"{installer.name} could not download {wheel.requirement}: {_reason(log)}")
    progress("downloading", wheel.size, wheel.size)


def _largest(folder: Path) -> int:
    """Returns the size of the largest file under `folder`; files may vanish meanwhile."""
    largest = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(parent, name)).st_size)
            except OSError:
                continue
    return largest


def _reason(log: Path) -> str:
    """Returns the last lines that the installer wrote, on one line."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")] or lines
    return " / ".join(errors[-2:])[:500] or "it said nothing"
