"""Compiles every kernel ahead of time for every target and prints the tables of `kernels/README.md`.

    python tests/kernels/compile_all.py [OPERATION ...]

What is compiled stands in `build_OPERATION.py`, one file per name in `dispatch.OPERATIONS`, as `BUILDS`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton

from magnitude_kernels import dispatch
from testkit.triton_runs import compile_all, table


def main() -> None:
    """Prints the version of Triton, then one headed table per operation."""
    print(f"triton {triton.__version__}")
    for name in sys.argv[1:] or dispatch.OPERATIONS:
        builds = importlib.import_module(f"build_{name}").BUILDS
        print(f"\n### {name}\n\n{table(compile_all(builds))}", flush=True)


if __name__ == "__main__":
    main()
