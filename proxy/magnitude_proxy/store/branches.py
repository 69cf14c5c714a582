"""The branches of a session, and how each act changes them: pure functions over what the store holds.

            ┌─ mbr-1 ─┬─ mbr-4      forked from mbr-1
    main ───┤         └─ mbr-5
            ├─ mbr-2                pruned: it is dead, and so is all that was forked from it
            └─ mbr-3                selected: the session goes on from it, all others are pruned

An act reads the branches with their version and decides on a `Change`, which the store takes only while the version
is still the one that was read; so that of two proxies that act at once one decides anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Literal

import msgspec

from magnitude_proxy.errors import BadRequest, Conflict, NotFound, TooManyRequests
from magnitude_proxy.identity import MAIN_BRANCH

PREFIX = "mbr-"
# Of branches that have ended the last ones are kept, for people and for what reads which steps are dead.
KEPT_ENDED = 256

BranchState = Literal["open", "pruned", "selected"]


class BranchNote(msgspec.Struct, frozen=True, kw_only=True):
    """One branch.

    Attributes:
        number: counts the session's branches, from 1.
        parent: what it was forked from, `main` for the session's main line; `depth` is 1 for those.
        score: the last one, None without one.
        created_s, ended_s: Unix time.
        reason: why it was pruned, where somebody said so.
    """

    number: int
    parent: str
    depth: int
    created_s: float
    state: BranchState = "open"
    score: float | None = None
    ended_s: float | None = None
    reason: str = ""


class Branches(msgspec.Struct, frozen=True, kw_only=True):
    """All branches of a session.

    Attributes:
        version: counts the changes.
        notes: by name, in the order of their forks.
        line: the branch from which the main line goes on, None before any was selected.
        limit: most open ones that the session's client asked for; None for the server's own limit.
    """

    version: int = 0
    notes: Mapping[str, BranchNote] = msgspec.field(default_factory=dict)
    line: str | None = None
    limit: int | None = None

    @property
    def open(self) -> tuple[str, ...]:
        """The names of those that can be asked."""
        return tuple(name for name, note in self.notes.items() if note.state == "open")

    @property
    def dead(self) -> frozenset[str]:
        """The names of those that were pruned."""
        return frozenset(name for name, note in self.notes.items() if note.state == "pruned")


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What an act changes.

    Attributes:
        put: notes that are new or other than before.
        ended: names that can no longer be asked: their leases end.
        forgotten: names that are kept no longer.
        line, limit: the new ones, None where they stay.
    """

    put: Mapping[str, BranchNote] = msgspec.field(default_factory=dict)
    ended: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()
    line: str | None = None
    limit: int | None = None


def forked(branches: Branches, parent: str, names: Sequence[str], limits: tuple[int, int | None], now: float) -> Change:
    """Opens branches of these names that grow from `parent`.

    Args:
        limits: the server's, and the one that the client asks for its session.

    Raises:
        NotFound, Conflict: `parent` is no branch, or not open.
        TooManyRequests: there would be more open ones than the session may have.
    """
    depth = 1 if parent == MAIN_BRANCH else _open(branches, parent).depth + 1
    wanted = limits[1] if limits[1] is not None else branches.limit
    most = min(limits[0], wanted or limits[0])
    if len(branches.open) + len(names) > most:
        raise TooManyRequests(
            f"the session has {len(branches.open)} open branches; {len(names)} more would be over "
            f"max_parallel_branches={most}: prune some first, or have the limit raised",
            param="count",
            code="branch_limit_exceeded",
            headers={"x-should-retry": "false"},
        )
    first = 1 + max((note.number for note in branches.notes.values()), default=0)
    made = {
        name: BranchNote(number=first + index, parent=parent, depth=depth, created_s=now)
        for index, name in enumerate(names)
    }
    return Change(put=made, limit=limits[1])


def scored(branches: Branches, name: str, score: float) -> Change:
    """Notes how good a branch is; raises BadRequest for what is no finite number, NotFound or Conflict."""
    if not isfinite(score):
        raise BadRequest("score must be a finite number", param="score")
    return Change(put={name: msgspec.structs.replace(_open(branches, name), score=score)})


def pruned(branches: Branches, name: str, reason: str, now: float) -> Change:
    """Ends a branch and all that was forked from it; nothing where it has ended already. Raises NotFound."""
    if name not in branches.notes:
        raise _unknown(name)
    gone = [each for each in branches.open if _grew_from(branches, each, name)]
    put = {each: _ended(branches.notes[each], "pruned", reason, now) for each in gone}
    return Change(put=put, ended=tuple(gone), forgotten=_too_many(branches, gone))


def selected(branches: Branches, name: str, now: float) -> Change:
    """The session goes on from a branch, all others are pruned; nothing where it does already.

    Raises:
        NotFound, Conflict: it is no branch, or has ended.
    """
    note = branches.notes.get(name)
    if note is not None and note.state == "selected" and branches.line == name:
        return Change()
    _open(branches, name)
    gone = [each for each in branches.open if each != name]
    put = {each: _ended(branches.notes[each], "pruned", f"{name} was selected", now) for each in gone}
    put[name] = _ended(branches.notes[name], "selected", "", now)
    return Change(put=put, ended=tuple(gone), forgotten=_too_many(branches, [*gone, name]), line=name)


def changed(branches: Branches, change: Change) -> Branches:
    """Returns the branches as they are after a change."""
    kept = {name: note for name, note in branches.notes.items() if name not in change.forgotten}
    return Branches(
        version=branches.version + 1,
        notes={**kept, **change.put},
        line=change.line or branches.line,
        limit=change.limit if change.limit is not None else branches.limit,
    )


def admit(branches: Branches, name: str) -> None:
    """Raises NotFound or Conflict for a request on a branch that is not open; any name that no fork gives is open."""
    if name.startswith(PREFIX) or name in branches.notes:
        _open(branches, name)


def refused(name: str, state: str) -> NotFound | Conflict:
    """Returns the error for a request on a branch that is not open; an empty `state` is that of an unknown one."""
    if not state:
        return _unknown(name)
    told = "was selected: the session itself goes on from it, leave the branch out" if state == "selected" else ""
    return Conflict(
        f"branch {name} {told or 'was pruned: fork another one'}",
        param="branch",
        code="branch_ended",
        headers={"x-should-retry": "false"},
    )


def _unknown(name: str) -> NotFound:
    return NotFound(
        f"the session has no branch {name[:64]!r}: use an id that forking it gave (POST /v1/sessions/ID/branches)",
        param="branch",
        code="branch_not_found",
    )


def _open(branches: Branches, name: str) -> BranchNote:
    note = branches.notes.get(name)
    if note is None:
        raise _unknown(name)
    if note.state != "open":
        raise refused(name, note.state)
    return note


def _grew_from(branches: Branches, name: str, ancestor: str) -> bool:
    """Whether a branch is `ancestor`, or was forked from it over any number of forks."""
    while name != ancestor and name in branches.notes:
        name = branches.notes[name].parent
    return name == ancestor


def _ended(note: BranchNote, state: BranchState, reason: str, now: float) -> BranchNote:
    return msgspec.structs.replace(note, state=state, reason=reason, ended_s=now)


def _too_many(branches: Branches, gone: Sequence[str]) -> tuple[str, ...]:
    """Returns the oldest ended branches, so many that `KEPT_ENDED` stay with those that end now."""
    old = [name for name, note in branches.notes.items() if note.state != "open"]
    return tuple(old[: max(0, len(old) + len(gone) - KEPT_ENDED)])
