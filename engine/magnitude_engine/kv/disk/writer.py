"""Writes queued blocks, evicts to make room, notes last uses, and pauses when the disk refuses.

Writing takes a processor's time from the engine. While that computes for somebody there are gaps between blocks,
unless blocks that leave memory have filled more than half of the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from magnitude_engine.kv.blocks import BlockName
from magnitude_engine.kv.disk.folder import NO_SPACE, FoundFile
from magnitude_engine.kv.disk.index import Block
from magnitude_engine.kv.disk.shelf import Shelf


class BlockWriter:
    """The writer thread and its figures; guarded by the shelf's lock.

    Attributes:
        written: blocks put on disk.
        failed: writes that the disk refused.
        evicted: files deleted for room.
        dropped: blocks not written: queue full, writing paused, or the disk too small for them.
    """

    def __init__(self, shelf: Shelf, limit_bytes: int, newest_use_ns: int) -> None:
        """Starts the thread; no file was used after `newest_use_ns`."""
        self.written = self.failed = self.evicted = self.dropped = 0
        self._shelf = shelf
        self._limit = self._smaller_limit = limit_bytes
        self._smaller_until_s = self._paused_until_s = float("-inf")
        self._failures_in_a_row = 0
        self._newest_use_ns = newest_use_ns
        self._uses: dict[bytes, int] = {}
        self._uses_saved_s = shelf.options.clock()
        self._work, self._idle = threading.Condition(shelf.lock), threading.Condition(shelf.lock)
        self._busy = True
        self._flushing = 0
        self._yielding = False
        self._closed = False
        self._thread = threading.Thread(target=self._write_all, name="kv-disk-writer", daemon=True)
        self._thread.start()

    def write(self, name: BlockName, payload: bytes | memoryview, idly: bool) -> bool:
        """Queues a block of the right size (see `DiskTier.write`)."""
        room = self._shelf.options.queue_bytes // (2 if idly else 1)
        with self._shelf.lock:
            if self._shelf.index.get(name.key) is not None:
                return True
            paused = self._shelf.options.clock() < self._paused_until_s
            full = self._shelf.index.queued_bytes + self._shelf.block_bytes > room
            if self._closed or paused or full:
                self.dropped += 1
                return False
            self._shelf.index.queue(name, bytes(payload))
            self._note_use([name.key])
            self._work.notify()
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts a chain as used now (see `DiskTier.touch`)."""
        with self._shelf.lock:
            self._note_use(keys)
            self._work.notify()

    def yield_to(self, live: bool) -> None:
        """Takes in whether the engine computes for somebody."""
        if live != self._yielding:
            with self._shelf.lock:
                self._yielding = live
                self._work.notify()

    def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is queued and last uses are on disk; False if time ran out."""
        with self._shelf.lock:
            self._flushing += 1
            self._work.notify()
            done = self._idle.wait_for(self._is_idle, timeout_s)
            self._flushing -= 1
        return done

    def close(self, timeout_s: float) -> None:
        """Drops what is queued and ends the thread."""
        with self._shelf.lock:
            self._closed = True
            self.dropped += self._shelf.index.drop_queue()
            self._work.notify_all()
            self._idle.notify_all()
        self._thread.join(timeout_s)

    def _is_idle(self) -> bool:
        return self._closed or not (self._busy or self._uses or self._shelf.index.queued_bytes)

    def _note_use(self, keys: Sequence[bytes]) -> None:
        known = self._shelf.index.use(keys)
        self._newest_use_ns = max(self._shelf.options.wall_ns(), self._newest_use_ns + len(known))
        for depth, key in enumerate(known):
            self._uses[key] = self._newest_use_ns - depth

    def _uses_due_in_s(self) -> float:
        if not self._uses:
            return threading.TIMEOUT_MAX
        due = self._uses_saved_s + self._shelf.options.note_uses_s - self._shelf.options.clock()
        return 0 if self._flushing else due

    def _hurried(self) -> bool:
        half = self._shelf.options.queue_bytes / 2
        return not self._yielding or self._closed or self._flushing > 0 or self._shelf.index.queued_bytes > half

    def _write_all(self) -> None:
        self._store(None)
        while True:
            with self._shelf.lock:
                self._work.wait_for(self._hurried, self._shelf.options.gap_s)
                self._busy = False
                self._idle.notify_all()
                while not (self._closed or self._shelf.index.queued_bytes or self._uses_due_in_s() <= 0):
                    self._work.wait(self._uses_due_in_s())
                if self._closed:
                    return
                self._busy = True
                block = self._shelf.index.next()
                uses: dict[bytes, int] = {}
                if block is None:
                    uses, self._uses = self._uses, {}
                    self._uses_saved_s = self._shelf.options.clock()
            if block is None:
                self._save_uses(uses)
            else:
                self._store(block)

    def _save_uses(self, uses: dict[bytes, int]) -> None:
        try:
            for key, used_ns in uses.items():
                self._shelf.folder.stamp(key, used_ns)
        except OSError as problem:
            self._shelf.say("uses", "the order of last uses cannot be kept: %s", problem)

    def _store(self, block: Block | None) -> None:
        """Makes room for a block of the queue and writes it; with None only goes below the limit."""
        try:
            if not self._make_room(block) or block is None or block.name is None or block.payload is None:
                return
            self._shelf.folder.put(block.name, block.payload)
        except OSError as problem:
            self._pause(problem)
            return
        with self._shelf.lock:
            self._failures_in_a_row = 0
            self.written += 1
            wanted = self._shelf.index.waits(block)
            if wanted:
                self._shelf.index.settle(block)
        if not wanted:
            self.remove(block.key)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Deletes blocks (see `DiskTier.discard`)."""
        for key in keys:
            with self._shelf.lock:
                block = self._shelf.index.get(key)
                if block is not None and block.payload is not None:
                    # Where it is being written just now, the writer sees that nobody waits for it any longer.
                    self._shelf.index.drop(block)
                    block = None
            if block is not None and self.remove(key):
                with self._shelf.lock:
                    self._shelf.index.forget(block)

    def remove(self, key: bytes) -> bool:
        """Deletes a block's file; False where that is not possible."""
        try:
            self._shelf.folder.remove(self._shelf.folder.path(key))
        except OSError as problem:
            self._shelf.say("delete", "a block cannot be deleted: %s", problem)
            return False
        return True

    def _make_room(self, block: Block | None) -> bool:
        """Evicts until `block` fits; False where it is itself what goes first."""
        while True:
            with self._shelf.lock:
                if block is not None and not self._shelf.index.waits(block):
                    return False
                victim = self._victim(0 if block is None else self._shelf.file_bytes)
                if isinstance(victim, Block) and victim.payload is not None:
                    self._shelf.index.drop(victim)
                    self.dropped += 1
                    continue
            if victim is None:
                return True
            # Deleted first and forgotten then: a file that cannot be deleted still counts against the limit.
            self._shelf.folder.remove(
                victim.path if isinstance(victim, FoundFile) else self._shelf.folder.path(victim.key)
            )
            with self._shelf.lock:
                self.evicted += self._shelf.index.forget(victim)

    def _victim(self, need: int) -> Block | FoundFile | None:
        """Returns what goes next so that `need` bytes fit; None when they do."""
        smaller = self._shelf.options.clock() < self._smaller_until_s
        limit = min(self._limit, self._smaller_limit) if smaller else self._limit
        return self._shelf.index.oldest() if self._shelf.index.bytes + need > limit else None

    def _pause(self, problem: OSError) -> None:
        """Stops writing for a while after a failure; what waits is mostly behind the failed block and goes too."""
        options = self._shelf.options
        now = options.clock()
        with self._shelf.lock:
            self.failed += 1
            pause = min(options.pause_s * 2.0**self._failures_in_a_row, options.longest_pause_s)
            self._failures_in_a_row = min(self._failures_in_a_row + 1, 30)
            self._paused_until_s = now + pause
            self.dropped += self._shelf.index.drop_queue()
            if problem.errno in NO_SPACE:
                # Others fill the disk: for now new blocks take the place of old ones.
                self._smaller_limit = max(self._shelf.index.bytes, self._shelf.file_bytes)
                self._smaller_until_s = now + options.smaller_s
        self._shelf.say("write", "writing failed and pauses for %.0f s: %s", pause, problem)
