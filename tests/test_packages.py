"""The packages as users get them: exports, the cost of importing, the wheel's content, and the README's map."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "magnitude": ROOT / "engine" / "magnitude",
    "magnitude_engine": ROOT / "engine" / "magnitude_engine",
    "magnitude_kernels": ROOT / "kernels" / "magnitude_kernels",
    "magnitude_proxy": ROOT / "proxy" / "magnitude_proxy",
}
PUBLISHED = "from magnitude_engine import MagnitudeClient, AgentRuntimeConfig\nimport magnitude\n"
IMPORT_LIMIT_S = 1.0

MEASURE = """
import sys, time
began = time.perf_counter()
{imports}
seconds = time.perf_counter() - began
import json, magnitude, magnitude_engine
print(json.dumps({{
    "seconds": seconds,
    "heavy": sorted({{"torch", "triton", "numpy", "tokenizers"}} & set(sys.modules)),
    "files": [magnitude.__file__, magnitude_engine.__file__],
}}))
"""

# Third-party packages are loaded once; each module is then imported alone in a fork.
IMPORT_ALONE = """
import importlib, json, os, sys, warnings
for name in ("torch", "aiohttp", "httpx", "jinja2", "tokenizers", "opentelemetry.sdk.metrics", "redis.asyncio"):
    importlib.import_module(name)
failed = {}
for name in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        warnings.simplefilter("error")
        try:
            importlib.import_module(name)
        except BaseException as problem:
            os.write(writer, f"{type(problem).__name__}: {problem}".encode()[:4000])
            os._exit(1)
        os._exit(0)
    os.close(writer)
    status = os.waitpid(child, 0)[1]
    if status:
        failed[name] = os.read(reader, 4000).decode() or f"status {status}"
    os.close(reader)
print(json.dumps(failed))
"""


def python(code: str, *arguments: str, cwd: Path, path: Path | None = None) -> str:
    """Runs `code` in a fresh interpreter in `cwd` and returns what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    ended = subprocess.run(
        (sys.executable, "-c", code, *arguments), capture_output=True, text=True, cwd=cwd, env=environment, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def sources(folder: Path) -> Iterator[Path]:
    """Yields the Python files of a package."""
    yield from sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def modules(package: str) -> list[str]:
    """Returns the names of all modules of `package`."""
    folder = PACKAGES[package]
    names = []
    for path in sources(folder):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def declared_for_types(path: Path) -> set[str]:
    """Returns the names that a lazy `__init__.py` imports under TYPE_CHECKING."""
    names = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            names |= {alias.name for item in node.body if isinstance(item, ast.ImportFrom) for alias in item.names}
    return names


@pytest.mark.parametrize("package", ["magnitude", "magnitude_engine"])
def test_all_is_what_is_exported(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) == declared_for_types(PACKAGES[package] / "__init__.py")
    for name in module.__all__:
        assert getattr(module, name).__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018


def test_every_package_is_typed() -> None:
    assert [name for name, folder in PACKAGES.items() if not (folder / "py.typed").is_file()] == []


@pytest.mark.slow
def test_published_names_import_from_elsewhere_quickly_and_without_torch(tmp_path: Path) -> None:
    runs = [json.loads(python(MEASURE.format(imports=PUBLISHED), cwd=tmp_path)) for _ in range(3)]
    assert runs[0]["heavy"] == []
    assert min(run["seconds"] for run in runs) < IMPORT_LIMIT_S


@pytest.mark.slow
def test_the_whole_proxy_imports_without_torch(tmp_path: Path) -> None:
    imports = "\n".join(f"import {name}" for name in modules("magnitude_proxy"))
    run = json.loads(python(MEASURE.format(imports=imports), cwd=tmp_path))
    assert set(run["heavy"]) <= {"numpy"}


@pytest.mark.slow
def test_every_module_imports_alone_and_without_warnings(tmp_path: Path) -> None:
    names = [name for package in PACKAGES for name in modules(package)]
    assert json.loads(python(IMPORT_ALONE, json.dumps(names), cwd=tmp_path)) == {}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The product's own wheel, built as a user's pip would build it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(ROOT))
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("magnitude_runtime-*.whl"))


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    expected = {
        path.relative_to(folder.parent).as_posix()
        for folder in PACKAGES.values()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert b"magnitude = magnitude_proxy.main:main" in archive.read(metadata[0])
    assert expected - held == set()
    assert held - expected == set()


@pytest.mark.slow
def test_the_installed_wheel_imports_from_elsewhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = (sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--target", str(site), str(wheel))
    subprocess.run(command, check=True)
    imports = PUBLISHED + "import magnitude_proxy.main\n"
    runs = [json.loads(python(MEASURE.format(imports=imports), cwd=tmp_path, path=site)) for _ in range(3)]
    assert runs[0]["heavy"] == []
    assert all(Path(file).is_relative_to(site) for file in runs[0]["files"])
    assert min(run["seconds"] for run in runs) < IMPORT_LIMIT_S


def says_something(path: Path) -> bool:
    """False for an `__init__.py` that holds at most a docstring and the future import."""
    body = ast.parse(path.read_text("utf-8")).body
    silent = (isinstance(node, ast.Expr) or getattr(node, "module", None) == "__future__" for node in body)
    return path.name != "__init__.py" or not all(silent)


def mapped_paths() -> list[str]:
    """Returns the paths of the fenced block under the README's heading `## The map`."""
    _, heading, rest = (ROOT / "README.md").read_text("utf-8").partition("\n## The map\n")
    assert heading, "README.md has no section '## The map'"
    lines = rest.split("```")[1].splitlines()[1:]
    return [line.split()[0] for line in lines if line.strip()]


@pytest.mark.thorough
def test_the_readme_names_every_product_file_once() -> None:
    product = [path for folder in PACKAGES.values() for path in sources(folder) if says_something(path)]
    named = mapped_paths()
    assert [path for path, count in Counter(named).items() if count > 1] == []
    assert [path for path in named if not (ROOT / path).exists()] == []
    assert sorted({path.relative_to(ROOT).as_posix() for path in product} - set(named)) == []
