"""Past runs on disk: one file per tenant and vocabulary, whole or not at all.

    FOLDER/<32 hex>.runs        a keyed digest of tenant and vocabulary
    FOLDER/<32 hex>.runs.tmp    one that is being written

    magic 8 | version 4 | runs 4 | tokens 8 | identity 32 | length of each run, 4 each | token ids, 4 each | checksum 32

Integers are little-endian. The identity covers tenant, vocabulary and salt, the checksum (blake2b) everything before
it. What disagrees is a miss: runs only ever save time.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Literal

from magnitude_engine.draft.corpus import CorpusLimits, RunCorpus
from magnitude_engine.telemetry import worker_log

FORMAT_VERSION = 1

_MAGIC = b"MAGRUNS\0"
_IDENTITY_BYTES = 32
_CHECKSUM_BYTES = 32
_HEADER = struct.Struct(f"<8sIIQ{_IDENTITY_BYTES}s")
_LARGEST_SALT = 64

Reason = Literal["truncated", "foreign", "corrupt"]


class RunsRejected(Exception):
    """A file must not be used: too short, another one's or version's, or changed bytes."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


class RunStore:
    """The corpora of all tenants of one vocabulary; loads and saves, holds none.

    One process at a time may save into a folder.
    """

    def __init__(self, folder: Path, salt: bytes, vocabulary: str, limits: CorpusLimits | None = None) -> None:
        """`salt` is the server's secret (at most 64 bytes, else ValueError), `vocabulary` the tokenizer's hash."""
        if len(salt) > _LARGEST_SALT:
            raise ValueError(f"a salt has at most {_LARGEST_SALT} bytes, not {len(salt)}")
        self._folder = folder
        self._salt = salt
        self._vocabulary = vocabulary
        self._limits = limits or CorpusLimits()

    def path(self, tenant: str) -> Path:
        """Returns where a tenant's runs lie."""
        return self._folder / f"{self._identity(tenant)[:16].hex()}.runs"

    def runs(self, tenant: str) -> list[array[int]]:
        """Returns the tenant's runs, the least recently used first; none where there is no file that may be used."""
        path = self.path(tenant)
        try:
            return decode(self._identity(tenant), path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, RunsRejected) as problem:
            worker_log.warning("past runs: %s is not used: %s", path, problem)
            return []

    def load(self, tenant: str) -> RunCorpus:
        """Returns the tenant's corpus; an empty one where there is no file, or none that may be used."""
        return RunCorpus(self._limits, self.runs(tenant))

    def save(self, tenant: str, corpus: RunCorpus) -> None:
        """Writes the tenant's corpus in place of what was there.

        Raises:
            OSError: it cannot be written; what was there is still there.
        """
        path = self.path(tenant)
        temporary = path.with_name(f"{path.name}.tmp")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(temporary, "wb", opener=_private) as file:
                file.write(encode(self._identity(tenant), corpus.runs()))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    def delete(self, tenant: str) -> None:
        """Removes what is kept of a tenant."""
        path = self.path(tenant)
        for each in (path, path.with_name(f"{path.name}.tmp")):
            each.unlink(missing_ok=True)

    def _identity(self, tenant: str) -> bytes:
        parts = b"".join(
            len(part).to_bytes(8, "little") + part for part in (tenant.encode(), self._vocabulary.encode())
        )
        return blake2b(parts, key=self._salt, digest_size=_IDENTITY_BYTES, person=b"magnitude-runs").digest()


def encode(identity: bytes, runs: Sequence[array[int]]) -> bytes:
    """Returns the file of `runs`."""
    lengths = array("I", (len(run) for run in runs))
    tokens = array("i")
    for run in runs:
        tokens.extend(run)
    head = _HEADER.pack(_MAGIC, FORMAT_VERSION, len(lengths), len(tokens), identity)
    body = head + _little(lengths).tobytes() + _little(tokens).tobytes()
    return body + blake2b(body, digest_size=_CHECKSUM_BYTES).digest()


def decode(identity: bytes, data: bytes) -> list[array[int]]:
    """Returns the runs in a file.

    Raises:
        RunsRejected: `data` is not exactly a file of this identity.
    """
    if len(data) < _HEADER.size + _CHECKSUM_BYTES:
        raise RunsRejected("truncated")
    magic, version, runs, tokens, owner = _HEADER.unpack_from(data)
    if (magic, version) != (_MAGIC, FORMAT_VERSION):
        raise RunsRejected("foreign")
    middle = _HEADER.size + 4 * runs
    end = middle + 4 * tokens
    if len(data) != end + _CHECKSUM_BYTES:
        raise RunsRejected("truncated" if len(data) < end + _CHECKSUM_BYTES else "corrupt")
    if blake2b(data[:end], digest_size=_CHECKSUM_BYTES).digest() != data[end:]:
        raise RunsRejected("corrupt")
    if owner != identity:
        raise RunsRejected("foreign")
    lengths, ids = array("I"), array("i")
    lengths.frombytes(data[_HEADER.size : middle])
    ids.frombytes(data[middle:end])
    _little(lengths)
    _little(ids)
    if sum(lengths) != tokens or any(token < 0 for token in ids):
        raise RunsRejected("corrupt")
    found: list[array[int]] = []
    at = 0
    for length in lengths:
        found.append(ids[at : at + length])
        at += length
    return found


def _little(values: array[int]) -> array[int]:
    """Swaps between this machine's byte order and the file's, in place."""
    if sys.byteorder != "little":
        values.byteswap()
    return values


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
