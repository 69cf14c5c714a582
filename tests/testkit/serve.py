"""Starts the real product (`magnitude serve`) as a process and stops it again."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

READY_S = 180.0


def free_port() -> int:
    """Returns a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lend_model(data: Path, model: Path) -> None:
    """Makes `model` the pulled SmolLM2 of the data folder `data`, so that no test downloads it again."""
    target = data / "models" / "smollm2" / model.name
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not target.exists():
        target.symlink_to(model)


def children(pid: int) -> list[int]:
    """Returns the direct children of `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(p) for p in (task / "children").read_text().split()]
    return found


def command_line(pid: int) -> str:
    """Returns the command line of `pid`, empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@dataclass
class Server:
    """A running `magnitude serve`."""

    process: subprocess.Popen[bytes]
    port: int
    admin_port: int
    log: Path

    @property
    def origin(self) -> str:
        """`http://127.0.0.1:PORT`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def base_url(self) -> str:
        """What an agent sets as `base_url`."""
        return f"{self.origin}/v1"

    def child(self, *words: str) -> int:
        """Returns the pid of the one child whose command line holds every word."""
        matches = [p for p in children(self.process.pid) if all(w in command_line(p) for w in words)]
        if len(matches) != 1:
            raise LookupError(f"{len(matches)} children match {words}: {[command_line(p) for p in matches]}")
        return matches[0]

    def metrics(self) -> str:
        """Returns the text of /metrics."""
        return httpx.get(f"http://127.0.0.1:{self.admin_port}/metrics").text

    def health(self) -> dict[str, Any]:
        """Returns /health's body."""
        body: dict[str, Any] = httpx.get(f"{self.origin}/health").json()
        return body

    def sessions(self) -> dict[str, dict[str, Any]]:
        """Returns the 100 sessions seen last, by id."""
        data: list[dict[str, Any]] = httpx.get(f"{self.base_url}/sessions", params={"limit": 100}).json()["data"]
        return {session["id"]: session for session in data}

    def wait_ready(self, seconds: float = READY_S) -> None:
        """Returns once /health/ready says 200; raises with the log's end otherwise."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise RuntimeError(f"server ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.origin}/health/ready", timeout=5).status_code == 200:
                    return
            time.sleep(0.1)
        raise TimeoutError(f"server not ready after {seconds} s:\n{self.log.read_text()[-4000:]}")


@contextlib.contextmanager
def serving(folder: Path, *arguments: str, env: dict[str, str] | None = None, wait: bool = True) -> Iterator[Server]:
    """Runs `magnitude serve ARGUMENTS` with its data under `folder`; stops it with SIGTERM, then SIGKILL."""
    port, admin_port = free_port(), free_port()
    log = folder / "serve.log"
    command: Sequence[str] = [
        sys.executable, "-m", "magnitude_proxy.main", "serve", "--port", str(port), "--admin-port", str(admin_port),
        "--data-dir", str(folder / "data"), *arguments,
    ]  # fmt: skip
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
        )
    server = Server(process, port, admin_port, log)
    try:
        if wait:
            server.wait_ready()
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
