"""What the disk tier holds and will write, and what goes first when it is full: decisions only, no I/O, no threads.

Every block has one place in the order of use, also while it waits to be written:

    goes first  ── other models' files, oldest first ── least recently used ─ … ─ most recently used
                                                        (of a chain, the deepest page first)

So the end of a chain that does not fit is never written over its own beginning.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from magnitude_engine.kv.blocks import BlockName
from magnitude_engine.kv.disk.folder import FoundFile


@dataclass(slots=True, eq=False)
class Block:
    """A block of the index. `payload` is set while it waits to be written; then it is on disk."""

    key: bytes
    name: BlockName | None = None
    payload: bytes | None = None


class DiskIndex:
    """Blocks of `file_bytes` each on disk. Not thread-safe.

    Attributes:
        bytes: size of all files on disk, other models' included.
        foreign_bytes: of those, other models'.
        queued_bytes: payloads that wait.
    """

    def __init__(self, file_bytes: int, stored: Iterable[bytes] = (), foreign: Iterable[FoundFile] = ()) -> None:
        self._file_bytes = file_bytes
        self._order = OrderedDict((key, Block(key)) for key in stored)
        self._queue: OrderedDict[bytes, Block] = OrderedDict()
        self._foreign = deque(foreign)
        self.foreign_bytes = sum(file.size for file in self._foreign)
        self.bytes = self.foreign_bytes + len(self._order) * file_bytes
        self.queued_bytes = 0

    def __len__(self) -> int:
        """Returns the number of blocks on disk."""
        return len(self._order) - len(self._queue)

    def get(self, key: bytes) -> Block | None:
        """Returns a block on disk or in the queue."""
        return self._order.get(key)

    def queue(self, name: BlockName, payload: bytes) -> None:
        """Appends a block that `get` does not know to the queue, as the most recently used one."""
        block = Block(name.key, name, payload)
        self._order[name.key] = self._queue[name.key] = block
        self.queued_bytes += len(payload)

    def next(self) -> Block | None:
        """Returns the block that has waited longest; it stays in the queue until `settle` or `drop`."""
        return next(iter(self._queue.values()), None)

    def waits(self, block: Block) -> bool:
        """Returns whether a block is still in the queue."""
        return self._queue.get(block.key) is block

    def settle(self, block: Block) -> None:
        """Notes that a block of the queue is on disk now."""
        self._leave_queue(block)
        block.name = block.payload = None
        self.bytes += self._file_bytes

    def drop(self, block: Block) -> None:
        """Takes a block out of the queue and the index."""
        self._leave_queue(block)
        del self._order[block.key]

    def drop_queue(self) -> int:
        """Drops all that waits; returns how many."""
        count = len(self._queue)
        for block in list(self._queue.values()):
            self.drop(block)
        return count

    def forget(self, gone: Block | FoundFile) -> bool:
        """Notes that a file is gone from the disk; False where the index does not count it (any longer)."""
        if isinstance(gone, FoundFile):
            if not self._foreign or self._foreign[0] is not gone:
                return False
            self._foreign.popleft()
            self.foreign_bytes -= gone.size
            self.bytes -= gone.size
            return True
        if self._order.get(gone.key) is not gone or gone.payload is not None:
            return False
        del self._order[gone.key]
        self.bytes -= self._file_bytes
        return True

    def use(self, keys: Sequence[bytes]) -> list[bytes]:
        """Makes a chain, given from its root, the most recently used; returns the keys that are here, in order."""
        known = [key for key in keys if key in self._order]
        for key in reversed(known):
            self._order.move_to_end(key)
        return known

    def oldest(self) -> Block | FoundFile | None:
        """Returns what goes first when room is needed."""
        if self._foreign:
            return self._foreign[0]
        return next(iter(self._order.values()), None)

    def _leave_queue(self, block: Block) -> None:
        del self._queue[block.key]
        self.queued_bytes -= len(block.payload or b"")
