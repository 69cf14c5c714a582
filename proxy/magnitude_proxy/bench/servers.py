"""What stands between the load and the stub in `magnitude bench proxy`, each in processes of its own.

| name      | what |
|-----------|------|
| direct    | nothing: the load generator's own limit |
| relay     | aiohttp with nothing in it, see `relay.py` |
| magnitude | `magnitude serve --no-worker`: sessions in the embedded store, traces of 1 % of the requests sent off |
| litellm   | LiteLLM's proxy with one worker, where it is installed |
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from magnitude_proxy.bench.running import StartFailed, distributions, free_port, log_end
from magnitude_proxy.process import die_with_parent

NAMES = ("direct", "relay", "magnitude", "litellm")
LITELLM_VARIABLE = "MAGNITUDE_BENCH_LITELLM"
TRACE_RATIO = "0.01"
START_S = 120.0
STOP_S = 10.0
_POLL_S = 0.1
_BASE_URL = re.compile(r"base_url +http://[^:]+:(\d+)/v1")
# Without keys, as the other servers: checking them would count against it.
_LITELLM_CONFIG = """\
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
model_list:
  - model_name: bench
    litellm_params: {{model: openai/bench, api_base: "{upstream}/v1", api_key: none}}
"""


class Server(NamedTuple):
    """A server on loopback that takes the load; `version` in words."""

    name: str
    port: int
    pid: int
    version: str = ""


@contextlib.contextmanager
def stub(folder: Path) -> Iterator[Server]:
    """Runs the upstream."""
    with _spawned([sys.executable, "-m", "magnitude_proxy.bench.stub"], folder / "stub") as process:
        yield Server("direct", _announced(folder / "stub.out", process, r"(\d+)\n"), process.pid)


@contextlib.contextmanager
def relay(upstream: Server, folder: Path) -> Iterator[Server]:
    """Runs the bare relay."""
    command = [sys.executable, "-m", "magnitude_proxy.bench.relay", _url(upstream)]
    with _spawned(command, folder / "relay") as process:
        yield Server("relay", _announced(folder / "relay.out", process, r"(\d+)\n"), process.pid)


@contextlib.contextmanager
def magnitude(upstream: Server, folder: Path) -> Iterator[Server]:
    """Runs this product without a worker; its log goes to a file, as in production it goes to a pipe."""
    command = [
        *(sys.executable, "-m", "magnitude_proxy.main", "serve", "--no-worker", "--port", "0", "--admin-port", "0"),
        *("--upstream", f"{_url(upstream)}/v1", "--data-dir", str(folder / "data")),
        *("--telemetry-otlp-endpoint", f"{_url(upstream)}/v1/traces", "--telemetry-trace-ratio", TRACE_RATIO),
    ]
    with _spawned(command, folder / "magnitude") as process:
        yield Server("magnitude", _announced(folder / "magnitude.out", process, _BASE_URL.pattern), process.pid)


def litellm(program: Path) -> Callable[[Server, Path], contextlib.AbstractContextManager[Server]]:
    """Returns what runs LiteLLM's proxy."""

    @contextlib.contextmanager
    def run(upstream: Server, folder: Path) -> Iterator[Server]:
        port = free_port()
        config = folder / "litellm.yaml"
        config.write_text(_LITELLM_CONFIG.format(upstream=_url(upstream)), "utf-8")
        command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        with _spawned(command, folder / "litellm") as process:
            _answering(f"http://127.0.0.1:{port}/health/liveliness", process, folder / "litellm.err")
            version = distributions(program).get("litellm", "")
            yield Server("litellm", port, process.pid, f"litellm {version}")

    return run


def find_litellm(place: Path | None) -> Path | None:
    """Returns the program `litellm` at `place`, in it, or on PATH where no place is named."""
    if place is None:
        found = shutil.which("litellm")
        return Path(found) if found else None
    if place.is_file():
        return place.absolute()
    return next((path.absolute() for path in sorted(place.rglob("bin/litellm")) if path.is_file()), None)


def processor_s(pid: int) -> float | None:
    """Returns the processor time of a process and its descendants so far; None where the system does not tell."""
    ticks = 0
    for member in family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") if ticks else None


def family(pid: int) -> set[int]:
    """Returns a process and its descendants; Linux only, elsewhere the process alone."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parents[int(path.parent.name)] = int(path.read_text("utf-8", "replace").rpartition(")")[2].split()[1])
    members = {pid}
    while grown := {child for child, parent in parents.items() if parent in members} - members:
        members |= grown
    return members


def _url(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


@contextlib.contextmanager
def _spawned(command: Sequence[str], place: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a command with its output in `place`.out and `place`.err, and ends it."""
    with place.with_suffix(".out").open("wb") as out, place.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        if process.stdin is not None:
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _announced(out: Path, process: subprocess.Popen[bytes], pattern: str) -> int:
    """Returns the port that a server writes once it listens; raises StartFailed."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and process.poll() is None:
        found = re.search(pattern, out.read_text("utf-8", "replace"))
        if found:
            return int(found[1])
        time.sleep(_POLL_S)
    raise StartFailed(f"{out.stem} did not come to listen:\n  {log_end(out.with_suffix('.err'))}")


def _answering(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when `url` answers 200; raises StartFailed."""
    end = time.monotonic() + START_S
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < end and process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                if client.get(url).status_code == 200:
                    return
            time.sleep(_POLL_S)
    raise StartFailed(f"{log.stem} did not come to serve:\n  {log_end(log)}")
