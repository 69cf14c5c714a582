"""Runs kernels where there is no GPU: interpreted, and compiled ahead of time.

Both happen in processes of their own, because Triton decides when it is imported whether it interprets, and what
it interprets it cannot compile.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

KERNEL_TESTS = Path(__file__).resolve().parents[1] / "kernels"


def run_interpreted(name: str) -> None:
    """Runs the pytest file `tests/kernels/NAME` under Triton's interpreter; raises AssertionError with its output."""
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", name], TRITON_INTERPRET="1")


def run(command: list[str], **environment: str) -> str:
    """Runs a command in `tests/kernels` and returns what it printed; raises AssertionError where it fails."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_DEFAULT_FP_FUSION": "1", **environment}
    done = subprocess.run(command, cwd=KERNEL_TESTS, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout


Target = tuple[str, int | str, int]
TARGETS = (("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32), ("hip", "gfx942", 64))


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel at one size.

    Attributes:
        kernel: the `triton.jit` function.
        types: Triton type of each argument by name, `constexpr` for constants; pointers count as aligned.
        constants: value of each constant; None for an argument that is left out.
        stages: how many loads the compiler keeps in flight in a loop; None for its default.
        aligned: numbers that count as multiples of 16, as Triton finds out at a launch.
        targets: what it is compiled for.
    """

    name: str
    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, int | bool | str | None]
    warps: int
    stages: int | None = None
    aligned: tuple[str, ...] = ()
    targets: tuple[Target, ...] = TARGETS


class Resources(NamedTuple):
    """What the compiler gave a kernel: registers per thread, shared memory and spills in bytes (for gfx942 spilled
    registers)."""

    kernel: str
    target: str
    registers: int
    shared: int
    spills: int


def compile_all(builds: Iterable[Build]) -> list[Resources]:
    """Compiles each build for each target."""
    return [_compile(build, *target) for build in builds for target in build.targets]


def table(rows: Iterable[Resources]) -> str:
    """Returns the resources as a Markdown table."""
    head = ["| kernel | target | registers | shared, bytes | spills |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(f"| {r.kernel} | {r.target} | {r.registers} | {r.shared} | {r.spills} |" for r in rows)])


def _compile(build: Build, backend: str, arch: int | str, warp_size: int) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = enumerate(build.types.items())
    divided = [i for i, (name, type_) in arguments if type_.startswith("*") or name in build.aligned]
    aligned = {(i,): [["tt.divisibility", 16]] for i in divided}
    options = {"num_warps": build.warps} | ({} if build.stages is None else {"num_stages": build.stages})
    source = ASTSource(build.kernel, dict(build.types), dict(build.constants), aligned)
    compiled = triton.compile(source, target=GPUTarget(backend, arch, warp_size), options=options)
    if backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spills = _number(r"\.vgpr_count:\s*(\d+)", text), _number(r"\.vgpr_spill_count:\s*(\d+)", text)
        return Resources(build.name, str(arch), registers, compiled.metadata.shared, spills)
    registers = _registers(compiled.asm["cubin"])
    return Resources(build.name, f"sm_{arch}", registers, compiled.metadata.shared, _spills(compiled.asm["ptx"], arch))


def _registers(cubin: bytes) -> int:
    """Returns registers per thread as `cuobjdump -res-usage` reads them from the cubin."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        return _number(r"REG:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _spills(ptx: str, arch: int | str) -> int:
    """Returns the bytes of spill stores and loads that `ptxas -v` reports."""
    from triton.backends.nvidia.compiler import get_ptxas

    found = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    if found is None:
        raise AssertionError("the PTX names no target")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={found[1]}", str(file), "-o", os.devnull]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return _number(r"(\d+) bytes spill stores", report) + _number(r"(\d+) bytes spill loads", report)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise AssertionError(f"no {pattern!r} in the compiler's report:\n{text[-2000:]}")
    return int(found[1])
