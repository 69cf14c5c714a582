"""The disk tier: verified blocks in one folder, written and read by threads of its own.

The engine's thread only asks and queues; it never waits for a disk. Whatever goes wrong with a disk costs cache: a
write that fails drops what was queued and pauses writing, a block that is missing, damaged or another one's is a miss.

    write ──► queue (bounded) ──► writer thread ──► FOLDER        read ──► ticket ──► reader threads ──► payloads
                                     └ evicts, notes last uses                           └ verify, delete what is bad

Last uses are kept as the files' times of modification, noted every few seconds, so that the order of eviction survives
a restart (after `kill -9` it may be some seconds old).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from magnitude_engine.errors import ConfigError
from magnitude_engine.kv.blocks import HEADER_BYTES, IDENTITY_BYTES, BlockName, header_fields
from magnitude_engine.kv.disk.folder import BlockFolder
from magnitude_engine.kv.disk.index import DiskIndex
from magnitude_engine.kv.disk.reader import BlockReader, ReadTicket
from magnitude_engine.kv.disk.shelf import DiskOptions, Shelf
from magnitude_engine.kv.disk.writer import BlockWriter

_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class DiskStats:
    """Figures of a tier: `blocks` of this model on disk, `bytes` of all files, the rest since it was opened.

    Attributes:
        foreign_bytes: of `bytes`, blocks of other models.
        failed_writes: writes that the disk refused.
        rejected: files that were not the block they should be; they are deleted.
        evicted: files deleted for room.
        dropped: blocks not written: queue full, writing paused, or the disk too small for them.
        read_seconds: time in which the readers read and verified `read_bytes` of payload.
    """

    blocks: int
    bytes: int
    limit_bytes: int
    foreign_bytes: int
    written: int
    failed_writes: int
    rejected: int
    evicted: int
    dropped: int
    read_bytes: int
    read_seconds: float


class DiskTier:
    """Blocks of one model on disk; any thread may call every method; only `flush`, `discard` and `close` wait."""

    def __init__(self, folder: BlockFolder, block_bytes: int, limit_bytes: int, options: DiskOptions) -> None:
        """Takes over an open folder; use `open`."""
        found = folder.scan(block_bytes)
        index = DiskIndex(HEADER_BYTES + block_bytes, found.blocks, found.foreign)
        self._limit = limit_bytes
        self._shelf = Shelf(folder, index, block_bytes, options)
        self._writer = BlockWriter(self._shelf, limit_bytes, found.newest_ns)
        self._reader = BlockReader(self._shelf, found.removed)
        self._closing = threading.Lock()

    @classmethod
    def open(
        cls, folder: Path, identity: bytes, block_bytes: int, limit_bytes: int, options: DiskOptions | None = None
    ) -> DiskTier:
        """Returns the tier of `folder` for payloads of `block_bytes`, with files of at most `limit_bytes` in all.

        Raises:
            ConfigError: the limit is below one block, or the folder cannot be made or locked, is used by another
                process, or has an unknown version.
        """
        options = options or DiskOptions()
        if limit_bytes < HEADER_BYTES + block_bytes:
            raise ConfigError(
                f"the disk tier may hold {limit_bytes} bytes and one block has {HEADER_BYTES + block_bytes}: raise "
                "kv_disk_mb, or switch the disk tier off with 0",
                param="kv_disk_mb",
            )
        found = BlockFolder(folder, identity, options.files, options.lock_wait_s)
        return cls(found, block_bytes, limit_bytes, options)

    def holds(self, key: bytes) -> bool:
        """Returns whether a block is on disk or waits to be written; a read may still find it a miss."""
        with self._shelf.lock:
            return self._shelf.index.get(key) is not None

    def write(self, name: BlockName, payload: bytes | memoryview, idly: bool = False) -> bool:
        """Queues a block, as the most recently used one; `touch` the chain when all of it is queued.

        A memoryview is copied here, which costs far more than the rest; bytes are not. Returns False, and does
        nothing, while the queue is full (half full for what is written `idly`, which memory still holds), writing is
        paused or the tier is closed; True where the block is here already.

        Raises:
            ValueError: name or payload have the wrong length.
        """
        size = memoryview(payload).nbytes
        if size != self._shelf.block_bytes:
            raise ValueError(f"a block has {self._shelf.block_bytes} bytes, not {size}")
        header_fields(bytes(IDENTITY_BYTES), name, size)
        return self._writer.write(name, payload, idly)

    def yield_to(self, live: bool) -> None:
        """Takes in whether the engine computes for somebody: then blocks are written one by one, with gaps."""
        self._writer.yield_to(live)

    def read(self, names: Sequence[BlockName], ready: Callable[[], None]) -> ReadTicket:
        """Starts to read a chain's blocks in order; blocks that still wait to be written are found too.

        `ready` is called once when the ticket is done, cancelled or not: from a reader thread, or from the thread
        that closes the tier or reads from a closed one.
        """
        return self._reader.read(names, ready)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts a chain, given from its first page on, as used now: its deepest pages are evicted first."""
        self._writer.touch(keys)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Deletes blocks whose numbers nobody may read again; this waits for the disk."""
        self._writer.discard(keys)

    @property
    def read_rate(self) -> float | None:
        """Payload bytes per second that one thread reads and verifies, smoothed; None before the first read."""
        return self._reader.rate

    @property
    def stats(self) -> DiskStats:
        """The figures at this moment."""
        index, writer, reader = self._shelf.index, self._writer, self._reader
        with self._shelf.lock:
            return DiskStats(
                blocks=len(index),
                bytes=index.bytes,
                limit_bytes=self._limit,
                foreign_bytes=index.foreign_bytes,
                written=writer.written,
                failed_writes=writer.failed,
                rejected=reader.rejected,
                evicted=writer.evicted,
                dropped=writer.dropped,
                read_bytes=reader.read_bytes,
                read_seconds=reader.read_seconds,
            )

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was queued is written or dropped and last uses are noted; False if time ran out."""
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """Writes what it can in 2 s, ends the threads and gives the folder free; a second call does nothing.

        A thread that hangs in a call to the disk is left behind: what it may still write is verified when read.
        """
        if not self._closing.acquire(blocking=False):
            return
        self._writer.flush(_CLOSE_S)
        self._writer.close(_CLOSE_S)
        self._reader.close(_CLOSE_S)
        self._shelf.folder.close()
