"""Caches that are only simulated, to see which way of choosing victims finds more pages again.

A `Shadow` holds digests instead of keys and values. The digest of a page covers its tenant and all tokens up to its
end, so a prompt is a chain of digests, and chains with a common beginning share it. Pages that were last used
together and have one way on are one run: an access compares and moves runs, not pages.

    root ── [d0 d1 d2] ┬─ [d3 d4 d5 d6]        a session
                       └─ [e3 e4]              another one: three pages in common

Runs stand in the order of their last use, those of one access from the end of the chain to its beginning. So every
run stands behind all that depend on it, the first run is always a leaf, and pages go from the end of a sequence.

A `Contest` compares the pages that two shadows found and names the policy that the real cache should follow.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from magnitude_engine.kv.pool import IntegrityError
from magnitude_engine.kv.sessions import SessionKey

Policy = Literal["learned", "lru"]
Outlook = Callable[[SessionKey | None, float, float], float]
"""(the one session that used it or None, last use, now) → seconds until its next use."""

CANDIDATES = 32
WINDOW = 256
FEWEST_ACCESSES = 64
MARGIN = 0.005


@dataclass(slots=True, eq=False)
class Run:
    """Pages that follow each other; changed by the shadow only.

    Attributes:
        owner: the one session that used them; None when several did.
        end: the last digest of the chain that used them last.
        access, used: number and time of the last access.
        doomed: goes before all that is not, from its end.
    """

    digests: list[bytes]
    parent: Run | None
    owner: SessionKey | None = None
    end: bytes = b""
    access: int = 0
    used: float = 0.0
    doomed: bool = False
    children: dict[bytes, Run] = field(default_factory=dict)


class Shadow:
    """A simulated cache of `pages` pages. Not thread-safe.

    Without an outlook it evicts the least recently used leaf. With one it evicts what is doomed, then that of the
    `CANDIDATES` least recently used leaves whose next use is farthest away; of equal ones the first.
    """

    def __init__(self, pages: int, outlook: Outlook | None = None) -> None:
        self._pages = pages
        self._outlook = outlook
        self._root = Run([], None)
        self._order: OrderedDict[Run, None] = OrderedDict()
        self._doomed: OrderedDict[Run, None] = OrderedDict()
        self._owned: dict[SessionKey, dict[Run, None]] = {}
        self._held = 0
        self._access = 0

    def __len__(self) -> int:
        """Returns the number of pages held."""
        return self._held

    def access(self, key: SessionKey, chain: Sequence[bytes], now: float) -> int:
        """Uses and holds all pages of `chain`, as many as there is room for; returns how many were held before."""
        self._access += 1
        pages = list(chain)
        if not pages:
            return 0
        path, hits = self._descend(pages)
        for run in path:
            if run.owner != key:
                self._disown(run)
        self._add(path, pages[hits:], key)
        # From the end to the beginning: a run stands behind what depends on it.
        for run in reversed(self._join(path)):
            self._order.move_to_end(run)
            self._doomed.pop(run, None)
            run.end, run.access, run.used, run.doomed = chain[-1], self._access, now, False
        self._evict(now)
        return hits

    def doom(self, key: SessionKey, end: bytes | None = None) -> None:
        """Nobody will ask again for what only this session used; with `end`, for what its step that ended there did.

        It is the first to be evicted unless it is used again.
        """
        for run in self._owned.get(key, ()):
            if end is None or run.end == end:
                run.doomed = True
                if not run.children:
                    self._doomed[run] = None

    def check_integrity(self) -> None:
        """Raises IntegrityError when links, order or counts are wrong, or more is held than there is room for."""
        place = {run: index for index, run in enumerate(self._order)}
        if sum(len(run.digests) for run in place) != self._held or self._held > self._pages:
            raise IntegrityError(f"{self._held} pages are counted in a shadow of {self._pages} pages, not those held")
        for run in place:
            parent = run.parent
            if parent is None or not run.digests or parent.children.get(run.digests[0]) is not run:
                raise IntegrityError("pages are held without the pages before them")
            if parent is not self._root and place.get(parent, -1) < place[run]:
                raise IntegrityError("pages are ordered before pages that depend on them")
            if (run in self._doomed) != (run.doomed and not run.children):
                raise IntegrityError("the doomed leaves are not those that are queued")
            if run.owner is not None and run not in self._owned.get(run.owner, ()):
                raise IntegrityError("a session's pages are not indexed")
        if sum(map(len, self._owned.values())) != sum(1 for run in place if run.owner is not None):
            raise IntegrityError("pages are indexed for sessions that do not own them")

    def _descend(self, pages: list[bytes]) -> tuple[list[Run], int]:
        """Returns the runs of the longest held prefix, the last one split where the prefix ends, and its length."""
        node, at, path = self._root, 0, []
        while at < len(pages) and (child := node.children.get(pages[at])) is not None:
            size = len(child.digests)
            piece = pages[at : at + size]
            node = child if piece == child.digests else self._split(child, _common(child.digests, piece))
            path.append(node)
            at += len(node.digests)
        return path, at

    def _split(self, run: Run, at: int) -> Run:
        """Splits a run before page `at`; returns the new run of the pages before it, which is to be used now."""
        head = Run(run.digests[:at], run.parent, run.owner)
        _parent(run).children[run.digests[0]] = head
        del run.digests[:at]
        run.parent = head
        head.children[run.digests[0]] = run
        self._order[head] = None
        self._own(head, head.owner)
        return head

    def _add(self, path: list[Run], pages: list[bytes], key: SessionKey) -> None:
        """Holds `pages` behind the runs of `path`: in its last one where that is the session's own leaf."""
        if not pages:
            return
        self._held += len(pages)
        last = path[-1] if path else self._root
        if last.owner == key and not last.children:
            last.digests += pages
            return
        run = last.children[pages[0]] = Run(pages, last, key)
        self._order[run] = None
        self._own(run, key)
        path.append(run)

    def _join(self, path: list[Run]) -> list[Run]:
        """Makes one run of those that follow each other with one owner and one way on; returns the path then."""
        joined: list[Run] = []
        for run in path:
            before = joined[-1] if joined else None
            if before is None or len(before.children) > 1 or before.owner != run.owner:
                joined.append(run)
                continue
            _parent(before).children[before.digests[0]] = run
            run.parent = before.parent
            run.digests[:0] = before.digests
            del self._order[before]
            self._disown(before)
            joined[-1] = run
        return joined

    def _evict(self, now: float) -> None:
        """Removes pages until no more are held than there is room for, those just used only after all others."""
        scores: dict[Run, float] = {}
        while self._held > self._pages:
            run = self._victim(now, scores)
            count = min(self._held - self._pages, len(run.digests))
            self._held -= count
            if count < len(run.digests):
                del run.digests[-count:]
            else:
                self._remove(run)

    def _victim(self, now: float, scores: dict[Run, float]) -> Run:
        """`scores` keeps what was computed for this `now`."""
        if self._outlook is None:
            return next(iter(self._order))
        if self._doomed:
            return next(iter(self._doomed))
        victim, farthest, seen = None, -1.0, 0
        for run in self._order:
            if run.access == self._access or seen == CANDIDATES:
                break
            if run.children:
                continue
            seen += 1
            score = scores.get(run)
            if score is None:
                score = scores[run] = self._outlook(run.owner, run.used, now)
            if score > farthest:
                victim, farthest = run, score
        return victim or next(iter(self._order))

    def _remove(self, run: Run) -> None:
        parent = _parent(run)
        del parent.children[run.digests[0]]
        del self._order[run]
        self._doomed.pop(run, None)
        self._disown(run)
        if parent.doomed and not parent.children:
            self._doomed[parent] = None

    def _own(self, run: Run, key: SessionKey | None) -> None:
        if key is not None:
            self._owned.setdefault(key, {})[run] = None

    def _disown(self, run: Run) -> None:
        """Takes a run from its owner."""
        if run.owner is not None:
            owned = self._owned[run.owner]
            owned.pop(run, None)
            if not owned:
                del self._owned[run.owner]
            run.owner = None


class Access(NamedTuple):
    """One access of both shadows: pages asked for, and found by either."""

    pages: int
    learned: int
    lru: int


class Contest:
    """Compares the two policies over the last `WINDOW` accesses; the learned one is in force at first.

    The other one takes over when it found more by `MARGIN` of all pages, after `FEWEST_ACCESSES` or more, and by
    more than chance explains: twice the root of the summed squares of the differences, which is two standard
    deviations of their sum if neither policy were better.
    """

    def __init__(self) -> None:
        self.policy: Policy = "learned"
        self._window: deque[Access] = deque()
        self._pages = self._learned = self._lru = self._squares = 0

    @property
    def learned_hit_rate(self) -> float:
        """Share of the pages asked for that the learned policy found, 0..1."""
        return self._learned / self._pages if self._pages else 0.0

    @property
    def lru_hit_rate(self) -> float:
        """The same of the least recently used policy."""
        return self._lru / self._pages if self._pages else 0.0

    def note(self, access: Access) -> None:
        """Counts an access; `policy` may change."""
        self._window.append(access)
        self._count(access, 1)
        if len(self._window) > WINDOW:
            self._count(self._window.popleft(), -1)
        ahead = self._lru - self._learned if self.policy == "learned" else self._learned - self._lru
        enough = len(self._window) >= FEWEST_ACCESSES and ahead > MARGIN * self._pages
        if enough and ahead * ahead > 4 * self._squares:
            self.policy = "lru" if self.policy == "learned" else "learned"

    def _count(self, access: Access, sign: int) -> None:
        self._pages += sign * access.pages
        self._learned += sign * access.learned
        self._lru += sign * access.lru
        self._squares += sign * (access.learned - access.lru) ** 2


def _parent(run: Run) -> Run:
    if run.parent is None:
        raise IntegrityError("the root was taken for pages that are held")
    return run.parent


def _common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)
