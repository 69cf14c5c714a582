"""A cache of pages by their digests, one record per page and every choice by scanning them all: what the simulated
caches are compared with, and a stand-in for the real one under a policy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from magnitude_engine.kv.retention import Candidate
from magnitude_engine.kv.sessions import SessionKey
from magnitude_engine.kv.shadow import CANDIDATES, Shadow

Choose = Callable[[Sequence[Candidate], float], int]


def chain(pages: Iterable[object]) -> list[bytes]:
    """Returns the digests of pages with these contents, each covering all before it."""
    digests, before = [], b""
    for page in pages:
        before = hashlib.blake2b(before + repr(page).encode(), digest_size=16).digest()
        digests.append(before)
    return digests


def found(shadow: Shadow, digests: Sequence[bytes]) -> int:
    """Returns how many leading pages of a chain a simulated cache holds."""
    node, at = shadow._root, 0
    while at < len(digests) and (child := node.children.get(digests[at])) is not None:
        for digest in child.digests:
            if at == len(digests) or digests[at] != digest:
                return at
            at += 1
        node = child
    return at


@dataclass(slots=True)
class Page:
    """A held page: the one before it, the only session that used it, when it was used last, what depends on it."""

    parent: bytes | None
    owner: SessionKey | None
    access: int
    used: float
    children: int = 0


class PageCache:
    """Holds `pages` pages; `choose` names the victim among the least recently used leaves."""

    def __init__(self, pages: int, choose: Choose) -> None:
        self.pages = pages
        self.held: dict[bytes, Page] = {}
        self._choose = choose
        self._accesses = 0

    def access(self, key: SessionKey, digests: Sequence[bytes], now: float) -> int:
        """Uses and holds a chain; returns how many of its pages were held."""
        self._accesses += 1
        digests = digests[: self.pages]
        hits = next((i for i, digest in enumerate(digests) if digest not in self.held), len(digests))
        for depth, digest in enumerate(digests):
            page = self.held.get(digest)
            if page is None:
                parent = digests[depth - 1] if depth else None
                self.held[digest] = Page(parent, key, self._accesses, now)
                self._count_child(parent, 1)
            else:
                page.access, page.used = self._accesses, now
                page.owner = key if page.owner == key else None
        while len(self.held) > self.pages:
            victim = self._victim(now)
            self._count_child(self.held.pop(victim).parent, -1)
        return hits

    def _victim(self, now: float) -> bytes:
        leaves = [d for d, page in self.held.items() if not page.children and page.access != self._accesses]
        leaves.sort(key=lambda d: self.held[d].access)
        offered = leaves[:CANDIDATES]
        candidates = [Candidate(self.held[d].owner, self.held[d].used) for d in offered]
        return offered[self._choose(candidates, now)]

    def _count_child(self, parent: bytes | None, change: int) -> None:
        if parent is not None:
            self.held[parent].children += change
