"""Blocks: full pages of keys and values as bytes, named by the tokens they depend on, checked to the last bit.

The keys and values of a page depend on the model, on the page's tokens and on all tokens before it. So a page is named
by a chain of digests, and looking up a prompt needs no tree:

    root = digest(model, tenant)     key 0 = digest(root, ids 0..15)     key 1 = digest(key 0, ids 16..31)     …

A digest alone is not trusted: a block carries the identity of the model, its key, its parent's key and its ids, and
all of them are compared before it is used. As a file it is a header of 192 bytes, then the payload:

    magic 8 | version 4 | ids 4 | identity 32 | key 16 | parent 16
    token ids 64 | payload bytes 8 | zeros 24 | checksum 16

The checksum (blake2b) covers everything before it and the payload. Integers are little-endian. Nothing here does I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple

import msgspec

from magnitude_engine.config import PAGE_TOKENS

FORMAT_VERSION = 1
IDENTITY_BYTES = 32
KEY_BYTES = 16
HEADER_BYTES = 192

_MAGIC = b"MAGKVBLK"
_CHECKSUM_BYTES = 16
_PAGE = struct.Struct(f"<{PAGE_TOKENS}I")
_FIELDS = struct.Struct(f"<8sII{IDENTITY_BYTES}s{KEY_BYTES}s{KEY_BYTES}s{_PAGE.size}sQ24x")
_VERSION = struct.Struct("<8sI")
_LENGTH = struct.Struct("<Q")
_LENGTH_AT = 8 + 4 + 4 + IDENTITY_BYTES + 2 * KEY_BYTES + _PAGE.size

Reason = Literal["truncated", "foreign", "corrupt"]


class BlockRejected(Exception):
    """A block must not be used: too short, another block or version in its place, or changed bytes."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class CacheIdentity(NamedTuple):
    """What the numbers in a cache depend on besides tokens and tenant, and how they are laid out."""

    weights_hash: str
    tokenizer_hash: str
    profile: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int = PAGE_TOKENS

    def digest(self) -> bytes:
        """Returns 32 bytes that differ for other models, layouts and versions of the block format."""
        return blake2b(msgspec.msgpack.encode((FORMAT_VERSION, *self)), digest_size=IDENTITY_BYTES).digest()


class BlockName(NamedTuple):
    """A block by its own digest, the digest of the page before it (the root's for page 0) and its 16 token ids."""

    key: bytes
    parent: bytes
    ids: tuple[int, ...]


def root_digest(identity: bytes, tenant: str) -> bytes:
    """Returns the 16 bytes that stand before a tenant's first page."""
    return blake2b(identity + tenant.encode(), digest_size=KEY_BYTES, person=b"magnitude-root").digest()


def next_digest(parent: bytes, ids: Sequence[int]) -> bytes:
    """Returns the 16-byte key of the page with these ids behind `parent`.

    Raises:
        ValueError: there are not 16 ids, or one does not fit into 32 bits.
    """
    return blake2b(parent + _pack(ids), digest_size=KEY_BYTES).digest()


def chain(root: bytes, ids: Sequence[int]) -> list[bytes]:
    """Returns the keys of all full pages of `ids`; ids of a last, partial page are left out."""
    keys = []
    key = root
    for start in range(0, len(ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
        key = next_digest(key, ids[start : start + PAGE_TOKENS])
        keys.append(key)
    return keys


def names(root: bytes, ids: Sequence[int]) -> list[BlockName]:
    """Returns the names of all full pages of `ids`, first page first."""
    keys = chain(root, ids)
    return [
        BlockName(key, parent, tuple(ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]))
        for index, (parent, key) in enumerate(zip([root, *keys], keys, strict=False))
    ]


def encode(identity: bytes, name: BlockName, payload: bytes | memoryview) -> bytes:
    """Returns the header that stands before `payload` in a file.

    Raises:
        ValueError: the identity or the name has the wrong length.
    """
    fields = header_fields(identity, name, memoryview(payload).nbytes)
    return fields + _checksum(fields, payload)


def decode(identity: bytes, name: BlockName, data: bytes | bytearray | memoryview) -> memoryview:
    """Returns the payload in a file's bytes `data`, as a view of them.

    Raises:
        BlockRejected: `data` is not exactly the block of this name and identity.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise BlockRejected("truncated")
    if _VERSION.unpack_from(view) != (_MAGIC, FORMAT_VERSION):
        raise BlockRejected("foreign")
    payload = view[HEADER_BYTES:]
    (length,) = _LENGTH.unpack_from(view, _LENGTH_AT)
    if len(payload) != length:
        raise BlockRejected("truncated" if len(payload) < length else "corrupt")
    fields, checksum = view[: _FIELDS.size], view[_FIELDS.size : HEADER_BYTES]
    if checksum != _checksum(fields, payload):
        raise BlockRejected("corrupt")
    if fields != header_fields(identity, name, length):
        raise BlockRejected("foreign")
    return payload


def header_fields(identity: bytes, name: BlockName, length: int) -> bytes:
    """Returns the header without its checksum for a payload of `length` bytes.

    Raises:
        ValueError: the identity or the name has the wrong length.
    """
    if len(identity) != IDENTITY_BYTES or len(name.key) != KEY_BYTES or len(name.parent) != KEY_BYTES:
        raise ValueError(f"identities are {IDENTITY_BYTES} bytes and keys {KEY_BYTES}")
    ids = _pack(name.ids)
    return _FIELDS.pack(_MAGIC, FORMAT_VERSION, PAGE_TOKENS, identity, name.key, name.parent, ids, length)


def _pack(ids: Sequence[int]) -> bytes:
    try:
        return _PAGE.pack(*ids)
    except struct.error as problem:
        raise ValueError(f"a page needs {PAGE_TOKENS} token ids of 32 bits: {problem}") from None


def _checksum(fields: bytes | memoryview, payload: bytes | memoryview) -> bytes:
    digest = blake2b(fields, digest_size=_CHECKSUM_BYTES)
    digest.update(payload)
    return digest.digest()
