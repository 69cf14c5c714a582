"""Checks the whole project, fastest stage first, and stops at the first failure.

python tests/check.py          format, lint, budgets, types, import rules, fast tests (under 30 s warm)
python tests/check.py --fix    rewrite format and fixable lint first
python tests/check.py --all    and the thorough tests, and those with real processes, models, clients and deployments
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("proxy", "engine", "kernels")
FILE_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 6
BIN = Path(sys.executable).parent
# Folders that hold slow tests only are left out, since importing their clients takes seconds.
BESIDE = ("-n2", "--dist=worksteal", "--ignore=tests/peers", "--ignore=tests/system")


def run(*command: str, threads: int | None = None) -> bool:
    """Runs a tool of this environment from the repository root, torch on `threads`; True when it succeeds."""
    tool = BIN / command[0]
    executable = str(tool) if tool.exists() else command[0]
    # Compiled tests and modules are kept: without them every process compiles everything anew.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / d) for d in PRODUCT), "PYTHONDONTWRITEBYTECODE": ""}
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    return subprocess.run([executable, *command[1:]], cwd=ROOT, env=env, check=False).returncode == 0


def over_budget(path: Path) -> Iterator[str]:
    """Yields one line per function or file of `path` that is over a size limit."""
    source = path.read_text("utf-8")
    lines = source.count("\n")
    name = path.relative_to(ROOT)
    if lines > FILE_LINES:
        yield f"{name}: {lines} lines, limit {FILE_LINES}"
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        size = (node.end_lineno or node.lineno) - node.lineno + 1
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        count = len([a for a in arguments if a.arg not in ("self", "cls")])
        # Published signatures and compiled code take what their callers pass; everything else keeps to the limit.
        compiled = path.name == "triton.py" or path.parent.name == "cpu"
        exempt = compiled or path.name == "client.py" or any("overload" in ast.dump(d) for d in node.decorator_list)
        if size > FUNCTION_LINES:
            yield f"{name}:{node.lineno} {node.name}: {size} lines, limit {FUNCTION_LINES}"
        if count > PARAMETERS and not exempt:
            yield f"{name}:{node.lineno} {node.name}: {count} parameters, limit {PARAMETERS}"


def budgets() -> bool:
    """True when every product file keeps to the size limits; prints those that do not."""
    problems = [p for top in PRODUCT for f in sorted((ROOT / top).rglob("*.py")) for p in over_budget(f)]
    print("\n".join(problems) or "sizes within limits")
    return not problems


def stages(everything: bool) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yields the checks in order."""
    yield "format", lambda: run("ruff", "format", "--check", "--quiet", ".")
    yield "lint", lambda: run("ruff", "check", "--quiet", ".")
    yield "budgets", budgets
    yield "types", lambda: run("mypy")
    yield "imports", lambda: run("lint-imports")
    yield "fast tests", lambda: run("pytest", "-q", "-m", "not thorough and not slow and not gpu", *BESIDE, threads=1)
    if everything:
        yield (
            "thorough tests",
            lambda: run("pytest", "-q", "-m", "thorough and not slow and not gpu", *BESIDE, threads=1),
        )
        yield "slow tests", lambda: run("pytest", "-q", "-m", "slow and not gpu", "--durations=15")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also run the thorough and the slow tests")
    parser.add_argument("--fix", action="store_true", help="rewrite format and fixable lint first")
    options = parser.parse_args()
    if options.fix:
        run("ruff", "check", "--fix", "--quiet", ".")
        run("ruff", "format", "--quiet", ".")
    for name, check in stages(options.all):
        print(f"── {name}", flush=True)
        began = time.monotonic()
        passed = check()
        print(f"   {name}: {'ok' if passed else 'FAILED'} in {time.monotonic() - began:.1f} s", flush=True)
        if not passed:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
