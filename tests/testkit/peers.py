"""Clients of other makers, in environments of their own, run as the programs that a user would write.

An environment is made once in the user's cache folder (`magnitude-tests`) from pinned versions, with the package
manager's own configuration, and made anew when a pin changes. Where it cannot be made, what needs it is skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "magnitude-tests"
LOOPS = Path(__file__).resolve().parents[1] / "peers" / "loops"
INSTALL_S = 500
RUN_S = 300


@dataclass(frozen=True)
class Environment:
    """Runs scripts by `interpreter`, in the folder in which their packages are found."""

    interpreter: str
    folder: Path

    def run(self, script: Path, home: Path, *arguments: str) -> Any:
        """Runs a script in the home `home` and returns the JSON of its last line; fails unless it exits 0."""
        home.mkdir(exist_ok=True)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "PYTHONWARNINGS": "ignore"}
        ended = subprocess.run(
            [self.interpreter, str(script), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        return json.loads(ended.stdout.splitlines()[-1])


def python_environment(name: str, *pins: str, interpreter: str = sys.executable) -> Environment:
    """Returns a virtual environment with `pins`; skips where it cannot be made."""
    folder = _folder(name, pins)
    python = folder / "bin" / "python"
    make = [interpreter, "-m", "venv", str(folder)]
    _installed(folder, make, [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *pins])
    return Environment(str(python), folder)


def python_of(minor: int) -> str:
    """Returns an interpreter of Python 3.`minor` or newer; skips where there is none."""
    if sys.version_info >= (3, minor):
        return sys.executable
    for newer in range(minor, minor + 4):
        program = shutil.which(f"python3.{newer}")
        # Version managers put programs on PATH that only say that they are not there.
        if program is not None and subprocess.run([program, "-V"], capture_output=True, check=False).returncode == 0:
            return program
    pytest.skip(f"there is no Python 3.{minor} or newer")


def node_environment(name: str, *pins: str) -> Environment:
    """Returns a folder with `node_modules` of `pins`; skips where it cannot be made."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    folder = _folder(name, pins)
    _installed(folder, [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *pins])
    return Environment(node, folder)


def _folder(name: str, pins: Sequence[str]) -> Path:
    interpreter = f"{sys.version_info.major}.{sys.version_info.minor}"
    return CACHE / f"{name}-{hashlib.sha256(' '.join([interpreter, *pins]).encode()).hexdigest()[:12]}"


def _installed(folder: Path, *commands: Sequence[str]) -> None:
    """Runs `commands` unless they all succeeded before; skips when one fails."""
    done = folder / "installed"
    if done.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for command in commands:
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False)
        if ran.returncode != 0:
            pytest.skip(f"{' '.join(command)} failed: {ran.stderr[-500:]}")
    done.touch()
