"""Starts real worker processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class WorkerProcess:
    """A started worker (or watchdog); `lines` is its standard error."""

    def __init__(self, process: subprocess.Popen[str], socket: Path) -> None:
        self.process = process
        self.socket = socket
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> dict[str, Any]:
        """Returns the ready line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the worker ended: {''.join(self.lines)}"
        ready: dict[str, Any] = json.loads(line)
        return ready

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 60) -> int:
        """Returns the exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(5)
        return status

    def close(self) -> None:
        """Kills what is left of it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)


def config(model: Path, **settings: Any) -> dict[str, Any]:
    """Returns the settings of a small exact worker."""
    return {"model_path": str(model), "profile": "reference", "threads": 2, "kv_memory_mb": 512, **settings}


@contextmanager
def worker(folder: Path, settings: dict[str, Any] | str, *arguments: str) -> Iterator[WorkerProcess]:
    """Starts `python -m magnitude_engine.main ARGUMENTS` with `settings`; kills what is left of it at the end."""
    socket = folder / "run" / "w.sock"
    text = settings if isinstance(settings, str) else json.dumps(settings)
    command = [sys.executable, "-m", "magnitude_engine.main", *arguments, "--config", text, "--socket", str(socket)]
    running = WorkerProcess(started(command), socket)
    try:
        yield running
    finally:
        running.close()


def started(command: list[str]) -> subprocess.Popen[str]:
    """Starts a command in a process group of its own."""
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
