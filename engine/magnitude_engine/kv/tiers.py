"""The tiers below the device's pages: blocks in host memory, then blocks on disk.

    device page ──evicted──► host memory ──dropped──► gone, but for what is on disk
                └──evicted, or its session pauses: written in the background──► disk ──over its limit──► gone

A block is one full page under the digest of all tokens up to its end (`blocks.py`). Blocks in host memory carry a
checksum that is compared before they are used; those on disk are verified by `disk.py`. What cannot be verified is
a miss. Owned by the engine's thread; disk reads and writes happen on the disk tier's own threads.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magnitude_engine import api
from magnitude_engine.kv.blocks import BlockName
from magnitude_engine.kv.disk import DiskTier, ReadTicket
from magnitude_engine.kv.pool import Payload


class HostBlock(NamedTuple):
    """A block in host memory."""

    name: BlockName
    payload: Payload
    checksum: int


class HostTier:
    """Blocks in memory up to `limit_bytes` of payload, the least recently used dropped first.

    Attributes:
        evicted, rejected: blocks dropped for room, and blocks whose checksum was wrong.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()
        self.bytes = 0
        self.evicted = 0
        self.rejected = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def put(self, name: BlockName, payload: Payload) -> list[HostBlock]:
        """Keeps a block; returns those that had to go for it, which may be itself."""
        self.discard([name.key])
        self._blocks[name.key] = HostBlock(name, payload, zlib.crc32(payload))
        self.bytes += len(payload)
        dropped: list[HostBlock] = []
        while self.bytes > self.limit_bytes:
            _, block = self._blocks.popitem(last=False)
            self.bytes -= len(block.payload)
            dropped.append(block)
        self.evicted += len(dropped)
        return dropped

    def get(self, key: bytes) -> Payload | None:
        """Returns a block's payload and counts it as used; None where it is not there or damaged."""
        block = self._blocks.get(key)
        if block is None:
            return None
        if zlib.crc32(block.payload) != block.checksum:
            self.rejected += 1
            self.discard([key])
            return None
        self._blocks.move_to_end(key)
        return block.payload

    def discard(self, keys: Iterable[bytes]) -> None:
        """Drops blocks that nobody may use."""
        for key in keys:
            block = self._blocks.pop(key, None)
            if block is not None:
                self.bytes -= len(block.payload)


@dataclass(frozen=True, slots=True)
class Fetch:
    """Blocks that are being read from disk, each going on from the one before."""

    names: tuple[BlockName, ...]
    ticket: ReadTicket

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.ticket.done

    def cancel(self) -> None:
        """Reads no more of them."""
        self.ticket.cancel()

    def payloads(self) -> Mapping[bytes, Payload]:
        """Returns what was read and verified, by digest."""
        pairs = zip(self.names, self.ticket.payloads, strict=False)
        return {name.key: payload for name, payload in pairs if payload is not None}


def reading(fetch: Fetch | None) -> bool:
    """Returns whether blocks are on their way."""
    return fetch is not None and not fetch.done


class Tiers:
    """Host memory and disk, either of which may be missing.

    Args:
        identity: of the model and the form of its pages; part of every digest.
        host_bytes: limit of host memory; 0 for none.
        disk: the disk tier; it is closed with this.
        block_bytes: size of a block.
    """

    def __init__(
        self, identity: bytes = b"", host_bytes: int = 0, disk: DiskTier | None = None, block_bytes: int = 0
    ) -> None:
        self.identity = identity
        self._host = HostTier(host_bytes) if host_bytes else None
        self._disk = disk
        self._block_bytes = block_bytes
        self.served = {"host": 0, "disk": 0}
        self.slow_reads = 0

    def wants(self, key: bytes) -> bool:
        """Whether a page that is evicted should be spilled."""
        return self.lacks(key) or (self._host is not None and key not in self._host)

    def lacks(self, key: bytes) -> bool:
        """Whether a retained page should be written back to disk."""
        return self._disk is not None and not self._disk.holds(key)

    def keep(self, name: BlockName, payload: Payload) -> None:
        """Takes an evicted page: into host memory, and to disk too unless it is there, as a restart finds it there."""
        dropped = self._host.put(name, payload) if self._host is not None else []
        if self.lacks(name.key):
            self.save(name, payload)
        for block in dropped:
            if self.lacks(block.name.key):
                self.save(block.name, block.payload)

    def save(self, name: BlockName, payload: Payload, idly: bool = False) -> bool:
        """Begins to write a block to disk; False where that is not possible now (see `DiskTier.write`)."""
        return self._disk is not None and self._disk.write(name, payload, idly)

    def yield_to(self, live: bool) -> None:
        """Takes in whether the engine computes for somebody; writing to disk takes less of the processors then."""
        if self._disk is not None:
            self._disk.yield_to(live)

    def load(self, key: bytes) -> Payload | None:
        """Returns a block from host memory."""
        return self._host.get(key) if self._host is not None else None

    def fetch(self, names: Iterable[BlockName], prefill_rate: float, ready: Callable[[], None]) -> Fetch | None:
        """Begins to read the blocks of `names` that are on disk only, up to the first that is nowhere.

        `ready` is called on another thread when all were read. None where there is nothing to read, or where
        computing the tokens, at `prefill_rate` tokens/s, is quicker than reading their blocks.
        """
        if self._disk is None:
            return None
        wanted = self._on_disk(names)
        if not wanted:
            return None
        rate = self._disk.read_rate
        tokens = sum(len(name.ids) for name in wanted)
        if rate and prefill_rate and len(wanted) * self._block_bytes / rate > tokens / prefill_rate:
            self.slow_reads += 1
            return None
        return Fetch(tuple(wanted), self._disk.read(wanted, ready))

    def served_tokens(self, host: int, disk: int) -> None:
        """Counts tokens that a sequence got from here."""
        self.served["host"] += host
        self.served["disk"] += disk

    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts the blocks of a sequence as used now."""
        if self._disk is not None:
            self._disk.touch(keys)

    def discard(self, keys: Sequence[bytes]) -> None:
        """Drops blocks whose numbers are broken."""
        if self._host is not None:
            self._host.discard(keys)
        if self._disk is not None:
            self._disk.discard(keys)

    def flush(self, timeout_s: float) -> bool:
        """Waits until what was saved is on disk; False when the time ran out."""
        return self._disk is None or self._disk.flush(timeout_s)

    def close(self) -> None:
        """Ends the disk tier's threads and gives its folder back."""
        if self._disk is not None:
            self._disk.close()

    def use(self) -> tuple[api.TierUse, ...]:
        """Returns what each tier holds."""
        return (*self._host_use(), *self._disk_use())

    def _on_disk(self, names: Iterable[BlockName]) -> list[BlockName]:
        wanted: list[BlockName] = []
        for name in names:
            if self._host is not None and name.key in self._host:
                continue
            if self._disk is None or not self._disk.holds(name.key):
                break
            wanted.append(name)
        return wanted

    def _host_use(self) -> tuple[api.TierUse, ...]:
        if self._host is None:
            return ()
        return (
            api.TierUse(
                name="host",
                blocks=len(self._host),
                bytes=self._host.bytes,
                limit_bytes=self._host.limit_bytes,
                tokens_served=self.served["host"],
                evicted=self._host.evicted,
                rejected=self._host.rejected,
            ),
        )

    def _disk_use(self) -> tuple[api.TierUse, ...]:
        if self._disk is None:
            return ()
        stats = self._disk.stats
        return (
            api.TierUse(
                name="disk",
                blocks=stats.blocks,
                bytes=stats.bytes,
                limit_bytes=stats.limit_bytes,
                tokens_served=self.served["disk"],
                evicted=stats.evicted,
                rejected=stats.rejected,
                failed_writes=stats.failed_writes,
            ),
        )
