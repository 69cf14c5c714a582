"""Disk tiers for tests: small blocks, chains of them, files that fail on purpose, and a process that owns a folder.

python disk.py FOLDER BLOCK_BYTES       opens the folder, prints a line, and writes blocks until it is killed
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.errors import ConfigError
from magnitude_engine.kv.blocks import HEADER_BYTES, BlockName, CacheIdentity, names, root_digest
from magnitude_engine.kv.disk import DiskOptions, DiskTier, ReadTicket
from magnitude_engine.kv.disk.folder import SystemFiles

IDENTITY = CacheIdentity("weights", "tokenizer", "reference", "float32", 2, 1, 8).digest()
OTHER_MODEL = CacheIdentity("others", "tokenizer", "reference", "float32", 2, 1, 8).digest()
BLOCK = 512
FILE = HEADER_BYTES + BLOCK
PATIENCE_S = 20.0
# Where thousands of small files are made and deleted quickly; None means the usual temporary folder.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def chain_of(seed: int, pages: int, tenant: str = "a") -> list[BlockName]:
    """Returns the names of a chain of `pages` pages that no other seed shares."""
    ids = random.Random(seed).choices(range(50_000), k=pages * PAGE_TOKENS)
    return names(root_digest(IDENTITY, tenant), ids)


def payload_of(name: BlockName, size: int = BLOCK) -> bytes:
    """Returns the payload that belongs to a name in all tests."""
    return random.Random(name.key).randbytes(size)


def opened(
    folder: Path, blocks: int = 1000, identity: bytes = IDENTITY, options: DiskOptions | None = None
) -> DiskTier:
    """Returns a tier with room for `blocks` blocks, and all but a byte of one more."""
    return DiskTier.open(folder, identity, BLOCK, (blocks + 1) * FILE - 1, options)


def stored(tier: DiskTier, chain: Sequence[BlockName]) -> None:
    """Writes a chain, counts it as used, and waits until both are on disk."""
    for name in chain:
        assert tier.write(name, payload_of(name))
    tier.touch([name.key for name in chain])
    assert tier.flush(PATIENCE_S)


def fetched(tier: DiskTier, chain: Sequence[BlockName]) -> list[bytes]:
    """Returns what a read of the chain gives."""
    ready = threading.Event()
    ticket: ReadTicket = tier.read(chain, ready.set)
    assert ready.wait(PATIENCE_S)
    assert ticket.done
    return [bytes(payload) for payload in ticket.payloads]


def held(tier: DiskTier, chain: Sequence[BlockName]) -> list[bool]:
    """Returns for each block whether the tier has it."""
    return [tier.holds(name.key) for name in chain]


def file_of(folder: Path, name: BlockName, identity: bytes = IDENTITY) -> Path:
    """Returns where a block lies."""
    return folder / identity.hex() / name.key.hex()[:2] / name.key.hex()


def files_in(folder: Path) -> list[Path]:
    """Returns all files of blocks, whole or not."""
    return [path for path in folder.glob("*/*/*") if path.is_file()]


class FaultyFiles(SystemFiles):
    """Files on a disk that refuses operations: `refuse[operation]` is the errno with which it does."""

    def __init__(self) -> None:
        self.refuse: dict[str, int] = {}
        self.calls: list[str] = []

    def _meet(self, operation: str, path: str) -> None:
        self.calls.append(operation)
        if operation in self.refuse:
            raise OSError(self.refuse[operation], os.strerror(self.refuse[operation]), path)

    def read(self, path: str, most: int) -> bytearray:
        self._meet("read", path)
        return super().read(path, most)

    def write(self, path: str, parts: Sequence[bytes]) -> None:
        """A refused write leaves half of the file, as a full disk does."""
        if "write" in self.refuse:
            super().write(path, [b"".join(parts)[: FILE // 2]])
        self._meet("write", path)
        super().write(path, parts)

    def replace(self, source: str, target: str) -> None:
        self._meet("replace", source)
        super().replace(source, target)

    def unlink(self, path: str) -> None:
        self._meet("unlink", path)
        super().unlink(path)

    def stamp(self, path: str, modified_ns: int) -> None:
        self._meet("stamp", path)
        super().stamp(path, modified_ns)


class GatedFiles(SystemFiles):
    """Files whose writes and reads wait until their gate is opened; `reached` says that one waits or has passed."""

    def __init__(self) -> None:
        self.writes, self.reads = threading.Event(), threading.Event()
        self.reached = threading.Event()

    def write(self, path: str, parts: Sequence[bytes]) -> None:
        self.reached.set()
        assert self.writes.wait(PATIENCE_S)
        super().write(path, parts)

    def read(self, path: str, most: int) -> bytearray:
        self.reached.set()
        assert self.reads.wait(PATIENCE_S)
        return super().read(path, most)


def own(folder: Path, size: int) -> None:
    """Writes chains until the process is killed; says when the first is on disk, or why it may not."""
    try:
        tier = DiskTier.open(folder, IDENTITY, size, 10**9)
    except ConfigError as problem:
        print(problem.param, problem.message, flush=True)
        return
    for seed in itertools.count():
        for name in chain_of(seed, 20):
            tier.write(name, payload_of(name, size))
        tier.flush(PATIENCE_S)
        print(tier.stats.written, tier.stats.failed_writes, flush=True)


if __name__ == "__main__":
    own(Path(sys.argv[1]), int(sys.argv[2]))
