"""Answers of the Responses API that their clients may ask for again, or go on from.

    magnitude:{HASH}:response    the answer and its conversation; forgotten like an idle session

HASH is an HMAC of the response's id under the tenant's salt: an id of another tenant is as unknown as one that was
never given. Without a store the last answers are kept in memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from magnitude_proxy.store.connection import Link, StoreDown

# A command this long still takes the store a few milliseconds only.
MAX_BYTES = 1024 * 1024
MEMORY_BYTES = 64 * 1024 * 1024
MAX_UNPACKED = 64 * 1024 * 1024
# Up to here packing takes well under a millisecond.
_AT_ONCE = 64 * 1024


class KeptResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: its body as it was sent, and the conversation that it ended, both JSON."""

    body: bytes
    conversation: bytes


class KeptResponses:
    """Keeps, finds and forgets answers by tenant and id.

    Args:
        link: the way to the store; None keeps them in memory, at most `MEMORY_BYTES` of them.
        ttl_s: how long each is kept.
        clock: seconds; for those in memory.
    """

    def __init__(self, link: Link | None, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._ttl_s = ttl_s
        self._clock = clock
        self._memory: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._held = 0

    async def keep(self, salt: str, name: str, kept: KeptResponse) -> bool:
        """Keeps an answer; False where the store is down, or packed it is larger than `MAX_BYTES`."""
        packed = await _beside(_pack, msgspec.msgpack.encode(kept))
        if len(packed) > MAX_BYTES:
            return False
        if self._link is None:
            self._remember(_key(salt, name), packed)
            return True
        try:
            await self._link.call("keep", "SET", _key(salt, name), packed, "PX", max(1, round(self._ttl_s * 1000)))
        except StoreDown:
            return False
        return True

    async def find(self, salt: str, name: str) -> KeptResponse | None:
        """Returns an answer, None where there is none; raises StoreDown."""
        key = _key(salt, name)
        packed = self._recall(key) if self._link is None else await self._link.call("find", "GET", key)
        if packed is None:
            return None
        try:
            if not isinstance(packed, bytes):
                raise ValueError(type(packed).__name__)
            return msgspec.msgpack.decode(await _beside(_unpack, packed), type=KeptResponse)
        except (ValueError, zlib.error, msgspec.MsgspecError) as error:
            raise StoreDown(f"the store holds a broken response: {error}") from error

    async def forget(self, salt: str, name: str) -> bool:
        """Forgets an answer; False where there is none. Raises StoreDown."""
        key = _key(salt, name)
        if self._link is not None:
            return await self._link.call("forget", "DEL", key) == 1
        there = self._recall(key) is not None
        self._drop(key)
        return there

    def _recall(self, key: str) -> bytes | None:
        until, packed = self._memory.get(key, (0.0, b""))
        return packed if packed and self._clock() < until else None

    def _remember(self, key: str, packed: bytes) -> None:
        self._drop(key)
        self._memory[key] = (self._clock() + self._ttl_s, packed)
        self._held += len(packed)
        while self._held > MEMORY_BYTES:
            self._drop(next(iter(self._memory)))

    def _drop(self, key: str) -> None:
        _, packed = self._memory.pop(key, (0.0, b""))
        self._held -= len(packed)


def _key(salt: str, name: str) -> str:
    digest = hmac.new(salt.encode(), name.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
    return f"magnitude:{{{digest}}}:response"


async def _beside(work: Callable[[bytes], bytes], data: bytes) -> bytes:
    """Runs `work` on a thread where it would hold the loop up."""
    return work(data) if len(data) <= _AT_ONCE else await asyncio.to_thread(work, data)


def _pack(data: bytes) -> bytes:
    return zlib.compress(data, 1)


def _unpack(packed: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    data = unpacker.decompress(packed, MAX_UNPACKED)
    if not unpacker.eof:
        raise ValueError("it is longer than any that is kept")
    return data
