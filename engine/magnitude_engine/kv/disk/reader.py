"""Reads chains of blocks and verifies them; deletes what is not the block it should be."""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence

from magnitude_engine.kv.blocks import BlockName, BlockRejected
from magnitude_engine.kv.disk.index import Block
from magnitude_engine.kv.disk.shelf import Shelf
from magnitude_engine.telemetry import worker_log

_RATE_WEIGHT = 0.1


class ReadTicket:
    """Blocks being read, in order. `payloads` grows until `done`, and ends before the first block that is a miss.

    Each payload is writable memory that belongs to the ticket's owner.
    """

    def __init__(self, names: Sequence[BlockName], ready: Callable[[], None]) -> None:
        self.names = tuple(names)
        self.payloads: list[memoryview] = []
        self._ready = ready
        self._cancelled = False
        self._done = False

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self._done

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def cancel(self) -> None:
        """Asks to read no further block; the ticket is done soon after."""
        self._cancelled = True

    def finish(self) -> None:
        """Ends the ticket; the reader's business."""
        self._done = True
        try:
            self._ready()
        except Exception:  # noqa: BLE001  a caller's mistake must not end the thread that reads for everybody
            worker_log.exception("disk cache: a callback failed")


class BlockReader:
    """Reader threads and their figures; guarded by the shelf's lock.

    Attributes:
        rejected: files that were not the block they should be.
        read_bytes, read_seconds: payload read and verified, and the time that took.
    """

    def __init__(self, shelf: Shelf, rejected: int) -> None:
        """Starts the threads; `rejected` files were found bad before."""
        self.rejected = rejected
        self.read_bytes = 0
        self.read_seconds = 0.0
        self._shelf = shelf
        self._seconds_per_byte: float | None = None
        self._tickets: deque[ReadTicket] = deque()
        self._asked = threading.Condition(shelf.lock)
        self._closed = False
        self._threads = tuple(
            threading.Thread(target=self._read_all, name="kv-disk-reader", daemon=True)
            for _ in range(shelf.options.readers)
        )
        for thread in self._threads:
            thread.start()

    @property
    def rate(self) -> float | None:
        """Payload bytes per second that one thread reads and verifies, smoothed; None before the first."""
        spent = self._seconds_per_byte
        return 1 / spent if spent else None

    def read(self, names: Sequence[BlockName], ready: Callable[[], None]) -> ReadTicket:
        """Queues a chain (see `DiskTier.read`)."""
        ticket = ReadTicket(names, ready)
        with self._shelf.lock:
            closed = self._closed
            if not closed:
                self._tickets.append(ticket)
                self._asked.notify()
        if closed:
            ticket.finish()
        return ticket

    def close(self, timeout_s: float) -> None:
        """Ends all tickets with what they have, and the threads."""
        with self._shelf.lock:
            self._closed = True
            left, self._tickets = list(self._tickets), deque()
            self._asked.notify_all()
        for ticket in left:
            ticket.finish()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)

    def _read_all(self) -> None:
        while True:
            with self._shelf.lock:
                while not (self._tickets or self._closed):
                    self._asked.wait()
                if self._closed:
                    return
                ticket = self._tickets.popleft()
            for name in ticket.names:
                payload = None if ticket.cancelled or self._closed else self._fetch(name)
                if payload is None:
                    break
                ticket.payloads.append(payload)
            ticket.finish()

    def _fetch(self, name: BlockName) -> memoryview | None:
        """Returns a verified payload; None for a miss of any kind."""
        with self._shelf.lock:
            block = self._shelf.index.get(name.key)
            waiting = None if block is None else block.payload
            same = block is not None and block.name == name
        if block is None:
            return None
        if waiting is not None:
            return memoryview(bytearray(waiting)) if same else None
        began = self._shelf.options.clock()
        try:
            payload = self._shelf.folder.get(name, self._shelf.block_bytes)
        except FileNotFoundError:
            self._forget(block)
            return None
        except BlockRejected as problem:
            self._reject(block, problem.reason)
            return None
        except OSError as problem:
            if problem.errno == errno.EIO:
                self._reject(block, str(problem))
            else:
                self._shelf.say("read", "a block cannot be read: %s", problem)
            return None
        self._count(self._shelf.options.clock() - began)
        return payload

    def _reject(self, block: Block, why: str) -> None:
        path = self._shelf.folder.path(block.key)
        self._shelf.say("reject", "%s is deleted: %s", path, why)
        try:
            self._shelf.folder.remove(path)
        except OSError as problem:
            self._shelf.say("delete", "a bad block cannot be deleted: %s", problem)
        with self._shelf.lock:
            self.rejected += 1
        self._forget(block)

    def _forget(self, block: Block) -> None:
        with self._shelf.lock:
            self._shelf.index.forget(block)

    def _count(self, seconds: float) -> None:
        size = self._shelf.block_bytes
        with self._shelf.lock:
            self.read_bytes += size
            self.read_seconds += seconds
            new, old = seconds / size, self._seconds_per_byte
            self._seconds_per_byte = new if old is None else old + _RATE_WEIGHT * (new - old)
