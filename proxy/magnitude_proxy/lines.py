"""Log lines written together: under load a write for each line costs more than making it."""

from __future__ import annotations

import asyncio
import logging
from typing import TextIO

LATE_S = 0.1
MOST = 256


class Lines(logging.Handler):
    """Writes to `stream` at most `LATE_S` after a line was made; warnings, and lines from outside a loop, at once."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: list[str] = []
        self._due = False

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            self._lines.append(self.format(record))
            if record.levelno >= logging.WARNING or len(self._lines) >= MOST or not self._later():
                self.flush()
        except Exception:  # noqa: BLE001 - logging's own rule: what fails in here is told by handleError
            self.handleError(record)

    def flush(self) -> None:
        """Writes what waits."""
        self.acquire()
        try:
            self._due = False
            if self._lines:
                text = "\n".join(self._lines) + "\n"
                self._lines.clear()
                self._stream.write(text)
                self._stream.flush()
        finally:
            self.release()

    def _later(self) -> bool:
        """Has `flush` called by the running loop; False where there is none."""
        if self._due:
            return True
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        self._due = True
        loop.call_later(LATE_S, self.flush)
        return True
