"""What this machine computes with: cores, memory, instructions, GPUs and the installed torch, without loading it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

MIB = 1024 * 1024
PROBE_S = 60.0
ENGINE_PACKAGES = ("torch", "tokenizers", "gguf", "safetensors", "jinja2", "numpy")

# Instruction sets that decide how fast the CPU path is, by their names in /proc/cpuinfo.
FLAGS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 bf16",
    "amx_bf16": "AMX bf16",
    "amx_int8": "AMX int8",
    "asimd": "NEON",
    "bf16": "bf16",
    "i8mm": "i8mm",
    "sve": "SVE",
}

_TORCH_PROBE = """
import json, torch
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(), "gpus": gpus}))
"""


class Machine(NamedTuple):
    """The computer as this process may use it; memory in MiB, `instructions` in the words of `FLAGS`."""

    cores: float
    cpu: str
    instructions: tuple[str, ...]
    memory_total: int
    memory_free: int
    gpus: tuple[str, ...]


class Torch(msgspec.Struct, frozen=True):
    """The installed torch, asked in a process of its own; `problem` says why it does not load."""

    version: str = ""
    threads: int = 0
    gpus: tuple[str, ...] = ()
    problem: str = ""


def look() -> Machine:
    """Returns what this machine has."""
    cpu, instructions = parse_cpuinfo(_read("/proc/cpuinfo"))
    total, free = parse_meminfo(_read("/proc/meminfo"))
    limit = parse_limit(_read("/sys/fs/cgroup/memory.max"))
    if limit is not None:
        used = parse_limit(_read("/sys/fs/cgroup/memory.current")) or 0
        total, free = min(total, limit // MIB), min(free, max(0, limit - used) // MIB)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(
        cores=usable_cores(cores, _read("/sys/fs/cgroup/cpu.max")),
        cpu=cpu or platform.processor() or platform.machine(),
        instructions=instructions,
        memory_total=total,
        memory_free=free,
        gpus=_gpus(),
    )


def missing_packages() -> tuple[str, ...]:
    """Returns the engine's packages that are not installed, without importing any."""
    return tuple(name for name in ENGINE_PACKAGES if importlib.util.find_spec(name) is None)


def ask_torch() -> Torch:
    """Returns what torch says about itself; takes seconds."""
    command = (sys.executable, "-c", _TORCH_PROBE)
    try:
        ended = subprocess.run(command, capture_output=True, timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return Torch(problem=f"it did not load within {PROBE_S:g} s")
    try:
        return msgspec.json.decode(ended.stdout, type=Torch)
    except msgspec.DecodeError:
        lines = ended.stderr.decode("utf-8", "replace").strip().splitlines()
        return Torch(problem=lines[-1] if lines else f"it ended with status {ended.returncode}")


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Returns the CPU's name and its notable instruction sets from the text of /proc/cpuinfo."""
    name, found = "", set[str]()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and not name:
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            found.update(value.split())
            break
    return name, tuple(word for flag, word in FLAGS.items() if flag in found)


def parse_meminfo(text: str) -> tuple[int, int]:
    """Returns total and available MiB from the text of /proc/meminfo; zeros where it says nothing."""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in text.splitlines() if len(line.split()) > 1}
    return kib.get("MemTotal", 0) // 1024, kib.get("MemAvailable", 0) // 1024


def parse_limit(text: str) -> int | None:
    """Returns the bytes of a cgroup limit file, None for `max` or no file."""
    return int(text) if text.strip().isdigit() else None


def usable_cores(affinity: int, cpu_max: str) -> float:
    """Returns the cores a process may use: its affinity, less where the cgroup's `QUOTA PERIOD` allows less."""
    words = cpu_max.split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
        return min(float(affinity), round(int(words[0]) / int(words[1]), 2))
    return float(affinity)


def _gpus() -> tuple[str, ...]:
    """Returns the GPUs that the drivers know, whatever torch can do with them."""
    if shutil.which("nvidia-smi"):
        query = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader")
        try:
            ended = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
        except (subprocess.TimeoutExpired, OSError):
            return ()
        if ended.returncode == 0:
            return tuple(line.strip() for line in ended.stdout.splitlines() if line.strip())
    return ("AMD GPU",) if Path("/dev/kfd").exists() else ()


def _read(path: str) -> str:
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
