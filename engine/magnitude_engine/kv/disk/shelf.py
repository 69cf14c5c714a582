"""What the threads of the disk tier share: the folder, the index and its lock, and a log that says little."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from magnitude_engine.kv.blocks import HEADER_BYTES
from magnitude_engine.kv.disk.folder import BlockFolder, Files, SystemFiles
from magnitude_engine.kv.disk.index import DiskIndex
from magnitude_engine.telemetry import worker_log

_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """How a `DiskTier` behaves; the defaults are for use.

    Attributes:
        queue_bytes: payloads that may wait to be written.
        readers: reader threads.
        pause_s, longest_pause_s: no writing after a failure; doubles with each one in a row.
        smaller_s: for how long after a full disk no more is held than then.
        note_uses_s: how often last uses are noted on disk.
        gap_s: between two writes while the engine computes for somebody, as long as the queue is at most half full.
        lock_wait_s: for how long a folder that another process uses is waited for.
        clock: monotonic seconds.
        wall_ns: nanoseconds since the epoch.
    """

    queue_bytes: int = 64 * 1024 * 1024
    readers: int = 1
    pause_s: float = 1.0
    longest_pause_s: float = 60.0
    smaller_s: float = 600.0
    note_uses_s: float = 5.0
    gap_s: float = 0.1
    lock_wait_s: float = 0.0
    files: Files = field(default_factory=SystemFiles)
    clock: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns


class Shelf:
    """The blocks on disk and in the queue. `lock` guards `index`, and is never held during I/O."""

    def __init__(self, folder: BlockFolder, index: DiskIndex, block_bytes: int, options: DiskOptions) -> None:
        self.folder = folder
        self.index = index
        self.block_bytes = block_bytes
        self.file_bytes = HEADER_BYTES + block_bytes
        self.options = options
        self.lock = threading.Lock()
        self._said_s: dict[str, float] = {}

    def say(self, topic: str, message: str, *values: object) -> None:
        """Logs a trouble, each topic once a minute at most; the figures count them all. Takes the lock."""
        now = self.options.clock()
        with self.lock:
            due = now - self._said_s.get(topic, float("-inf")) >= _LOG_EVERY_S
            if due:
                self._said_s[topic] = now
        if due:
            worker_log.warning(f"disk cache: {message}", *values)
