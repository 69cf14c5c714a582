"""A progress bar for a terminal, a line now and then for everything else."""

from __future__ import annotations

from typing import Protocol, TextIO

WIDTH = 30
STEP_PERCENT = 25


class Progress(Protocol):
    """Told how far a piece of work is, in bytes."""

    def __call__(self, label: str, done: int, total: int) -> None:
        """`label` names the work; `done` grows up to `total`."""


class Bar:
    """Draws `Progress` on a stream; `close` ends the line.

    Args:
        subject: what is worked on and where it goes; lines, which a log may hold far from the command, start with it.
    """

    def __init__(self, stream: TextIO, subject: str = "") -> None:
        self._stream = stream
        self._lead = f"{subject}: " if subject else ""
        self._terminal = stream.isatty()
        self._drawn: tuple[str, int] | None = None

    def __call__(self, label: str, done: int, total: int) -> None:
        """Draws `label` at done / total where that is news."""
        percent = min(100, done * 100 // max(1, total))
        step = percent if self._terminal else percent // STEP_PERCENT * STEP_PERCENT
        if self._drawn == (label, step):
            return
        if self._terminal and self._drawn is not None and self._drawn[0] != label:
            self._stream.write("\n")
        self._drawn = (label, step)
        if self._terminal:
            filled = "█" * (percent * WIDTH // 100)
            sizes = f"{done / 1e6:.1f} / {total / 1e6:.1f} MB"
            self._stream.write(f"\r{label}  {filled:<{WIDTH}} {percent:3d} %  {sizes} ")
        else:
            self._stream.write(f"{self._lead}{label}, {step} % of {total / 1e6:.1f} MB\n")
        self._stream.flush()

    def close(self) -> None:
        """Leaves the cursor on a fresh line."""
        if self._terminal and self._drawn is not None:
            self._stream.write("\n")
            self._stream.flush()
        self._drawn = None
