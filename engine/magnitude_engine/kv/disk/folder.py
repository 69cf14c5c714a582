"""The folder of the disk tier: who may use it, where a block lies, what was left there.

    FOLDER/lock                               flock of the one process that uses the folder; holds its process id
    FOLDER/VERSION                            version of this arrangement
    FOLDER/<identity, 64 hex>/<2 hex>/<key, 32 hex>        one block
    FOLDER/<identity, 64 hex>/<2 hex>/<key, 32 hex>.tmp    one that is being written

Another version of the *block* format has another identity, hence another sub-folder: its blocks are misses that may be
evicted. Another version of the *arrangement* is refused: what lies in such a folder could be neither counted against
the size limit nor evicted, only left to fill the disk or deleted unseen, and that is the user's choice.

Only names of the forms above are ever counted or deleted, so a folder that holds other things too loses none of them.
Blocks are not synced one by one: their checksum turns one that a power cut left incomplete into a miss.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from magnitude_engine.errors import ConfigError
from magnitude_engine.kv.blocks import HEADER_BYTES, BlockName, decode, encode
from magnitude_engine.telemetry import worker_log

LAYOUT_VERSION = "1"
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
# A worker that was killed or told to stop holds the folder for a moment; its successor must not fail for that.
LOCK_WAIT_S = 3.0
_LOCK_CHECK_S = 0.05

_IDENTITY = re.compile(r"[0-9a-f]{64}")
_FAN = re.compile(r"[0-9a-f]{2}")
_BLOCK = re.compile(r"[0-9a-f]{32}")
_LEFTOVER = re.compile(r"[0-9a-f]{32}\.tmp")


class Files(Protocol):
    """The operations on block files; each may raise OSError."""

    def read(self, path: str, most: int) -> bytearray:
        """Returns the first `most` bytes of a file, fewer where it is shorter."""

    def write(self, path: str, parts: Sequence[bytes]) -> None:
        """Makes or overwrites a file with `parts`, one after the other."""

    def replace(self, source: str, target: str) -> None:
        """Renames atomically."""

    def unlink(self, path: str) -> None:
        """Deletes a file."""

    def stamp(self, path: str, modified_ns: int) -> None:
        """Sets a file's time of modification."""


class SystemFiles:
    """`Files` of the operating system."""

    def read(self, path: str, most: int) -> bytearray:
        """Returns the first `most` bytes of a file, fewer where it is shorter."""
        with open(path, "rb", buffering=0) as file:
            data = bytearray(min(os.fstat(file.fileno()).st_size, most))
            got = 0
            with memoryview(data) as view:
                while got < len(data) and (count := file.readinto(view[got:])):
                    got += count
        del data[got:]
        return data

    def write(self, path: str, parts: Sequence[bytes]) -> None:
        """Makes or overwrites a file with `parts`, readable by its owner only."""
        with open(path, "wb", buffering=0, opener=_private) as file:
            for part in parts:
                with memoryview(part) as view:
                    done = 0
                    while done < len(view):
                        done += file.write(view[done:])

    def replace(self, source: str, target: str) -> None:
        """Renames atomically."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Deletes a file."""
        os.unlink(path)

    def stamp(self, path: str, modified_ns: int) -> None:
        """Sets a file's time of modification."""
        os.utime(path, ns=(modified_ns, modified_ns))


class FoundFile(NamedTuple):
    """A block file as a scan sees it."""

    path: str
    size: int
    modified_ns: int


class Scan(NamedTuple):
    """What lay in the folder, least recently used first; `removed` files were of no use."""

    blocks: tuple[bytes, ...]
    foreign: tuple[FoundFile, ...]
    newest_ns: int
    removed: int


class BlockFolder:
    """The block files of one model in a locked folder; block operations raise OSError."""

    def __init__(self, root: Path, identity: bytes, files: Files, lock_wait_s: float = 0.0) -> None:
        """Makes and locks the folder; one that another process uses is waited for, since that one may be ending.

        Raises:
            ConfigError: it cannot be made or locked, another process uses it, or its version is unknown.
        """
        self._identity = identity
        self._files = files
        self._root = root
        self._base = str(root / identity.hex())
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = _locked(root, lock_wait_s)
        except OSError as problem:
            raise ConfigError(
                f"the cache folder {root} cannot be used: {problem}; choose another folder (--kv-dir), or switch "
                "the disk tier off (--kv-disk-mb 0)",
                param="kv_dir",
            ) from problem
        try:
            _check_version(root)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Gives the folder free; once."""
        os.close(self._lock)

    def scan(self, block_bytes: int) -> Scan:
        """Returns what is there by names, sizes and times; deletes leftovers and files of the wrong size."""
        own: list[FoundFile] = []
        foreign: list[FoundFile] = []
        removed = 0
        for folder in _entries(str(self._root), _IDENTITY):
            mine = folder.path == self._base
            for file in self._block_files(folder.path):
                if not mine:
                    foreign.append(file)
                elif file.size == HEADER_BYTES + block_bytes:
                    own.append(file)
                else:
                    removed += self._remove_leftover(file.path)
        for files in (own, foreign):
            files.sort(key=lambda file: file.modified_ns)
        newest = max((files[-1].modified_ns for files in (own, foreign) if files), default=0)
        keys = tuple(bytes.fromhex(file.path[-32:]) for file in own)
        return Scan(keys, tuple(foreign), newest, removed)

    def put(self, name: BlockName, payload: bytes) -> None:
        """Writes a block; it appears whole or not at all."""
        target = self.path(name.key)
        temporary = f"{target}.tmp"
        parts = (encode(self._identity, name, payload), payload)
        try:
            try:
                self._files.write(temporary, parts)
            except FileNotFoundError:
                for folder in (self._base, os.path.dirname(target)):
                    os.makedirs(folder, mode=0o700, exist_ok=True)
                self._files.write(temporary, parts)
            self._files.replace(temporary, target)
        except OSError:
            with contextlib.suppress(OSError):
                self._files.unlink(temporary)
            raise

    def get(self, name: BlockName, block_bytes: int) -> memoryview:
        """Returns the verified payload, writable memory of the caller's own.

        Raises:
            OSError: the file cannot be read; FileNotFoundError where there is none.
            BlockRejected: it is not this block.
        """
        # One byte more than expected shows that a file is too long.
        data = self._files.read(self.path(name.key), HEADER_BYTES + block_bytes + 1)
        return decode(self._identity, name, data)

    def remove(self, path: str) -> None:
        """Deletes a file unless it is gone already."""
        with contextlib.suppress(FileNotFoundError):
            self._files.unlink(path)

    def stamp(self, key: bytes, modified_ns: int) -> None:
        """Sets when a block was used last; nothing where it is gone."""
        with contextlib.suppress(FileNotFoundError):
            self._files.stamp(self.path(key), modified_ns)

    def path(self, key: bytes) -> str:
        """Returns where a block lies."""
        name = key.hex()
        return f"{self._base}/{name[:2]}/{name}"

    def _block_files(self, base: str) -> Iterator[FoundFile]:
        for fan in _entries(base, _FAN):
            for entry in _entries(fan.path, None):
                if _LEFTOVER.fullmatch(entry.name):
                    self._remove_leftover(entry.path)
                elif _BLOCK.fullmatch(entry.name) and entry.name.startswith(fan.name):
                    with contextlib.suppress(FileNotFoundError):
                        about = entry.stat(follow_symlinks=False)
                        yield FoundFile(entry.path, about.st_size, about.st_mtime_ns)

    def _remove_leftover(self, path: str) -> int:
        try:
            self.remove(path)
        except OSError as problem:
            worker_log.warning("disk cache: %s cannot be deleted: %s", path, problem)
        return 1


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _entries(folder: str, form: re.Pattern[str] | None) -> Iterator[os.DirEntry[str]]:
    """Yields the files of a folder, or its sub-folders whose names have a form; none where it cannot be read."""
    try:
        with os.scandir(folder) as found:
            for entry in found:
                wanted = entry.is_file if form is None else entry.is_dir
                if (form is None or form.fullmatch(entry.name)) and wanted(follow_symlinks=False):
                    yield entry
    except OSError as problem:
        worker_log.warning("disk cache: %s cannot be read: %s", folder, problem)


def _locked(root: Path, wait_s: float) -> int:
    """Returns the descriptor of the lock, which holds as long as it is open."""
    lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _take_lock(lock, wait_s)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
        os.close(lock)
        raise ConfigError(
            f"another process (pid {owner or 'unknown'}) uses the cache folder {root}: give this one another folder "
            "(--kv-dir), or switch its disk tier off (--kv-disk-mb 0)",
            param="kv_dir",
        ) from None
    except OSError:
        os.close(lock)
        raise
    # The id only makes the message above better: a full disk must not stop a start.
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def _take_lock(lock: int, wait_s: float) -> None:
    """Locks the file; raises BlockingIOError when that is not possible for `wait_s` seconds."""
    for left in reversed(range(1 + round(wait_s / _LOCK_CHECK_S))):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(_LOCK_CHECK_S)


def _check_version(root: Path) -> None:
    file = root / "VERSION"
    try:
        found = file.read_text("ascii", "replace").strip()
    except FileNotFoundError:
        found = ""
    except OSError as problem:
        raise ConfigError(f"{file} cannot be read: {problem}", param="kv_dir") from problem
    if found and found != LAYOUT_VERSION:
        raise ConfigError(
            f"the cache folder {root} has version {found[:20]!r} and this program knows version {LAYOUT_VERSION}: give "
            "it another folder, or delete that one (it holds nothing that cannot be computed again)",
            param="kv_dir",
        )
    if not found:
        # An empty file, which a full disk or a crash may leave, counts as none.
        with contextlib.suppress(OSError):
            file.write_text(f"{LAYOUT_VERSION}\n", "ascii")
