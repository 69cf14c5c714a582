"""The tenants' past runs while they are used: read, added to and saved beside the engine's thread.

    FOLDER/key              32 random bytes (mode 0600) that the names and contents of the files depend on
    FOLDER/<32 hex>.runs    see store.py

Tenants come as salts that the proxy derives from its secret, so that the key need only tell this folder's files from
those of others. Of more tenants than `KEPT_FILES` the files that were written longest ago are deleted.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from magnitude_engine.draft.corpus import CorpusLimits, RunCorpus
from magnitude_engine.draft.store import RunStore
from magnitude_engine.telemetry import worker_log

# With all tenants full, a hundred megabytes of memory.
LIMITS = CorpusLimits(tokens=100_000, bytes=8 * 1024 * 1024)
KEPT_TENANTS = 16
# A file has up to 400 kB.
KEPT_FILES = 256
SAVE_EVERY_S = 30.0
KEY_BYTES = 32


class PastRuns:
    """Called by the engine's thread; what takes long happens on a thread of its own, in the order of the calls.

    Args:
        store: where runs are kept over restarts; None keeps them in memory only.
        clock: seconds, monotonic.
    """

    def __init__(self, store: RunStore | None, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="magnitude-runs")
        self._corpora: OrderedDict[str, RunCorpus] = OrderedDict()
        self._changed: dict[str, RunCorpus] = {}
        self._saved = clock()

    def of(self, tenant: str) -> RunCorpus:
        """Returns a tenant's runs at once; those on disk join them when they are read."""
        corpus = self._corpora.pop(tenant, None)
        if corpus is None:
            corpus = RunCorpus(LIMITS)
            if self._store is not None:
                self._pool.submit(self._read, self._store, tenant, corpus)
        self._corpora[tenant] = corpus
        if len(self._corpora) > KEPT_TENANTS:
            self._save(self._corpora.popitem(last=False)[0])
        return corpus

    def add(self, tenant: str, run: Sequence[int]) -> None:
        """Takes in a run; now and then what has changed is saved."""
        corpus = self.of(tenant)
        # A full corpus is built anew now and then, which takes longer than a step.
        self._pool.submit(corpus.add, run)
        self._changed[tenant] = corpus
        if self._clock() - self._saved >= SAVE_EVERY_S:
            self._saved = self._clock()
            for each in list(self._changed):
                self._save(each)

    def settle(self) -> None:
        """Waits until everything was taken in, read and saved that was asked for."""
        self._pool.submit(lambda: None).result()

    def close(self) -> None:
        """Saves what has changed and ends the thread."""
        for each in list(self._changed):
            self._save(each)
        self._pool.shutdown(wait=True)

    def _save(self, tenant: str) -> None:
        corpus = self._changed.pop(tenant, None)
        if corpus is not None and self._store is not None:
            self._pool.submit(_write, self._store, tenant, corpus)

    def _read(self, store: RunStore, tenant: str, corpus: RunCorpus) -> None:
        for run in store.runs(tenant):
            corpus.add(run)


def open_store(folder: Path, vocabulary: str) -> RunStore | None:
    """Returns the store in a folder that this process alone uses; None, with a warning, where that cannot be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = _key(folder / "key")
        _prune(folder)
    except OSError as problem:
        worker_log.warning("past runs are not kept: %s cannot be used: %s", folder, problem)
        return None
    return RunStore(folder, key, vocabulary, LIMITS)


def _write(store: RunStore, tenant: str, corpus: RunCorpus) -> None:
    try:
        store.save(tenant, corpus)
    except OSError as problem:
        worker_log.warning("past runs: %s cannot be written: %s", store.path(tenant), problem)


def _key(path: Path) -> bytes:
    """Returns the folder's key, made anew where there is none of the right length."""
    with contextlib.suppress(FileNotFoundError):
        key = path.read_bytes()
        if len(key) == KEY_BYTES:
            return key
        path.unlink()
    key = secrets.token_bytes(KEY_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(key)
    return key


def _prune(folder: Path) -> None:
    files = sorted(folder.glob("*.runs"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[KEPT_FILES:]:
        file.unlink(missing_ok=True)
    for leftover in folder.glob("*.runs.tmp"):
        leftover.unlink(missing_ok=True)
