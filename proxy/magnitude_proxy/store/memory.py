"""Sessions of one process in memory: the store `none`, and what serves while the real store is away."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from magnitude_proxy.bounded import keep
from magnitude_proxy.limits import NO_TERMS, Terms
from magnitude_proxy.store.branches import Branches, Change, admit, changed
from magnitude_proxy.store.credit import KEPT, Fate, Feedback, SessionView, StepNote, note, ordered
from magnitude_proxy.store.record import Owner, SessionRecord, StepOutcome, after, after_fenced, begun

MAX_SESSIONS = 10_000
MAX_LEASES = 1024
NO_SESSION = -1
NO_STEP = -2


class Opened(NamedTuple):
    """A lease as a store gives it: the full fencing token and the record at that moment.

    Where a limit is reached there is no lease: `refused` names the limit, and the session is as it was.
    """

    token: str
    record: SessionRecord
    refused: str | None = None


@dataclass(slots=True)
class _Entry:
    """A session, the token of the last lease of each branch that has not committed, and notes (see `SessionView`).

    `fenced` are tokens of branches that have a later lease; `branches` is None where only the store knows them.
    """

    record: SessionRecord
    tokens: OrderedDict[str, str] = field(default_factory=OrderedDict)
    fenced: OrderedDict[str, None] = field(default_factory=OrderedDict)
    steps: dict[int, StepNote] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)
    said: dict[str, Feedback] = field(default_factory=dict)
    advice: str = ""
    branches: Branches | None = field(default_factory=Branches)


class MemoryStore:
    """Keeps the `limit` sessions used last, under the same rules as the store's functions."""

    def __init__(self, limit: int = MAX_SESSIONS, alone: bool = True) -> None:
        """`alone` says that no other store knows more than this one."""
        self._limit = limit
        self._alone = alone
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def open(self, session: str, branch: str, owner: Owner, nonce: str, now: float, terms: Terms = NO_TERMS) -> Opened:
        """Gives the lease of `branch`; the branch's lease before it can no longer commit.

        Raises:
            NotFound, Conflict: the branch is none of the session, or has ended.
        """
        entry = self._entries.get(session)
        if entry is None:
            made = SessionRecord(session=session, created_s=now, source=owner.source, raw=owner.raw)
            entry = _Entry(made, branches=Branches() if self._alone else None)
        if entry.branches is not None:
            admit(entry.branches, branch)
        known, refused = begun(entry.record, terms, now)
        if refused is not None:
            return Opened("", known, refused)
        epoch = known.epoch + 1
        record = msgspec.structs.replace(known, epoch=epoch, state="thinking", seen_s=now, tenant=owner.tenant)
        entry.record = record
        entry.advice = owner.advice or entry.advice
        if branch in entry.tokens:
            keep(entry.fenced, entry.tokens[branch], None, MAX_LEASES)
        token = f"memory.{nonce}.{record.epoch}"
        keep(entry.tokens, branch, token, MAX_LEASES)
        self._keep(session, entry)
        return Opened(token, record)

    def commit(self, session: str, branch: str, token: str, outcome: StepOutcome, now: float) -> bool:
        """Adds one step if `token` is the branch's current lease, and ends that lease.

        Of a lease that a later one has fenced only what the limits count is added.
        """
        entry = self._entries.get(session)
        if entry is None or entry.tokens.get(branch) != token:
            if entry is not None and token in entry.fenced:
                del entry.fenced[token]
                entry.record = after_fenced(entry.record, outcome)
            return False
        del entry.tokens[branch]
        step = entry.record.steps
        entry.record = after(entry.record, outcome, now)
        for notes in (entry.steps, entry.dead):
            notes.pop(step - KEPT, None)
        kept = note(branch, outcome, now)
        if kept is not None:
            entry.steps[step] = kept
        return True

    def get(self, session: str) -> SessionRecord | None:
        """Returns the record, None when it is not known."""
        entry = self._entries.get(session)
        return None if entry is None else entry.record

    def view(self, session: str) -> SessionView | None:
        """Returns all that is known of a session, None when it is not known."""
        entry = self._entries.get(session)
        if entry is None:
            return None
        feedback = ordered(list(entry.said.values()))
        return SessionView(
            record=entry.record,
            steps=dict(entry.steps),
            dead=dict(entry.dead),
            feedback=feedback,
            advice=entry.advice,
            branches=entry.branches or Branches(),
        )

    def of(self, tenant: str) -> list[SessionRecord]:
        """Returns the sessions of a tenant, those opened last first."""
        return [entry.record for entry in reversed(self._entries.values()) if entry.record.tenant == tenant]

    def feedback(self, session: str, tenant: str, feedback: Feedback) -> Fate:
        """Keeps feedback of a session; there is no stream in memory, so that nothing is ever pending."""
        entry = self._owned(session, tenant)
        if entry is None:
            return Fate("unknown", 0)
        name, steps = feedback.id(), entry.record.steps
        if name in entry.said:
            return Fate("known", steps)
        if len(entry.said) >= KEPT:
            earliest = ordered(list(entry.said.values()))[0]
            if (feedback.at_s, name) < (earliest.at_s, earliest.id()):
                return Fate("old", steps)
            del entry.said[earliest.id()]
        entry.said[name] = feedback
        return Fate("added", steps)

    def fail(self, session: str, tenant: str, step: int | None, reason: str) -> int:
        """Marks a step, the last one where it is None, as dead; returns it, NO_SESSION or NO_STEP."""
        entry = self._owned(session, tenant)
        if entry is None:
            return NO_SESSION
        steps = entry.record.steps
        step = steps - 1 if step is None else step
        if not max(0, steps - KEPT) <= step < steps:
            return NO_STEP
        entry.dead[step] = reason
        entry.record = msgspec.structs.replace(entry.record, state="failed")
        return step

    def branch(self, session: str, tenant: str, change: Change) -> bool:
        """Changes a session's branches; False when the tenant has none of this id."""
        entry = self._owned(session, tenant)
        if entry is None:
            return False
        entry.branches = changed(entry.branches or Branches(), change)
        if change.line is not None:
            entry.record = msgspec.structs.replace(entry.record, line=change.line)
        for name in change.ended:
            entry.tokens.pop(name, None)
        return True

    def finish(self, session: str, tenant: str) -> bool:
        """Forgets a session; False when the tenant has none of this id."""
        return self._owned(session, tenant) is not None and self._entries.pop(session, None) is not None

    def _owned(self, session: str, tenant: str) -> _Entry | None:
        entry = self._entries.get(session)
        return entry if entry is not None and entry.record.tenant == tenant else None

    def remember(self, record: SessionRecord) -> None:
        """Notes what the real store said, so that the session goes on from there when the store is lost."""
        self._keep(record.session, _Entry(record, branches=None))

    def _keep(self, session: str, entry: _Entry) -> None:
        keep(self._entries, session, entry, self._limit)
