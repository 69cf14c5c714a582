"""Sessions of one process in memory: the store `none`, and what serves while the real store is away."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from magnitude_proxy.store.record import SessionRecord, StepOutcome, after

MAX_SESSIONS = 10_000
MAX_LEASES = 1024


class Opened(NamedTuple):
    """A lease as a store gives it: the full fencing token and the record at that moment."""

    token: str
    record: SessionRecord


@dataclass(slots=True)
class _Entry:
    """A session and the token of the last lease of each branch that has not committed."""

    record: SessionRecord
    tokens: OrderedDict[str, str] = field(default_factory=OrderedDict)


class MemoryStore:
    """Keeps the `limit` sessions used last, under the same rules as the store's functions."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def open(self, session: str, branch: str, nonce: str, now: float) -> Opened:
        """Gives the lease of `branch`; the branch's lease before it can no longer commit."""
        entry = self._entries.get(session)
        if entry is None:
            entry = _Entry(SessionRecord(session=session, created_s=now))
        record = msgspec.structs.replace(entry.record, epoch=entry.record.epoch + 1, state="thinking", seen_s=now)
        entry.record = record
        token = f"memory.{nonce}.{record.epoch}"
        entry.tokens[branch] = token
        entry.tokens.move_to_end(branch)
        if len(entry.tokens) > MAX_LEASES:
            entry.tokens.popitem(last=False)
        self._keep(session, entry)
        return Opened(token, record)

    def commit(self, session: str, branch: str, token: str, outcome: StepOutcome, now: float) -> bool:
        """Adds one step if `token` is the branch's current lease, and ends that lease."""
        entry = self._entries.get(session)
        if entry is None or entry.tokens.get(branch) != token:
            return False
        del entry.tokens[branch]
        entry.record = after(entry.record, outcome, now)
        return True

    def get(self, session: str) -> SessionRecord | None:
        """Returns the record, None when it is not known."""
        entry = self._entries.get(session)
        return None if entry is None else entry.record

    def remember(self, record: SessionRecord) -> None:
        """Notes what the real store said, so that the session goes on from there when the store is lost."""
        self._keep(record.session, _Entry(record))

    def _keep(self, session: str, entry: _Entry) -> None:
        self._entries[session] = entry
        self._entries.move_to_end(session)
        if len(self._entries) > self._limit:
            self._entries.popitem(last=False)
