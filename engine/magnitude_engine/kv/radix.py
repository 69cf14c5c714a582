"""The index of what is retained: one radix tree per tenant over token ids, in units of pages.

A node is one page. Its path from the root spells the tokens whose keys and values the page depends on, so a page is
found by exactly the sequences that begin with them. A page of 16 tokens may have children; the last, partial page
of a retained sequence is a leaf with fewer ids. Sequences that diverge share the nodes up to the page before:

    root ── 0..15 ── 16..31 ┬─ 32..47 ── 48..52      a session, 53 tokens
                            └─ 32, 7, 9, 1           another one: 33 tokens in common

No node's ids are the beginning of a sibling's: the longer one serves both. Children are kept in the order of their
ids, so that the one with the longest common prefix stands beside the place where the searched ids would go; ids
are compared in full. Unused leaves wait in a heap by the time of their last use. A parent is used whenever a child
is, so sequences lose pages from their end, and every step of an eviction is O(log n).

A full page also has a digest of all tokens up to its end (`blocks.py`): the name of its numbers in the lower tiers,
and of what a sequence that waits would compute.

Numbers of holders are the manager's business (`manager.py`): it leases the pages, and says which are in use.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.blocks import BlockName, next_digest, root_digest
from magnitude_engine.kv.pool import IntegrityError
from magnitude_engine.kv.retention import SessionKey

NO_PAGE = -1
CANDIDATES = 32


@dataclass(slots=True, eq=False)
class Node:
    """One retained page; changed by the tree only.

    Attributes:
        ids: the tokens in it, 1 to 16; none at a root.
        page: where their keys and values are; `NO_PAGE` at a root.
        digest: of all tokens up to the end of a full page; of the tenant at a root; empty for a partial page.
        used: number of the last use, at `used_at` seconds.
        session: which session used it last; `shared` says that it was not the only one.
        queued: whether it has an entry in the heap of unused leaves.
        unsaved: whether it waits to be written to a lower tier.
        left: whether it is not wanted again, unless it is used.
    """

    tenant: str
    ids: tuple[int, ...] = ()
    page: int = NO_PAGE
    digest: bytes = b""
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    used: int = 0
    used_at: float = 0.0
    session: SessionKey | None = None
    shared: bool = False
    queued: bool = False
    unsaved: bool = False
    left: bool = False

    @property
    def name(self) -> BlockName | None:
        """What the page is called in the lower tiers; only full pages have a name."""
        if self.parent is None or len(self.ids) < PAGE_TOKENS:
            return None
        return BlockName(self.digest, self.parent.digest, self.ids)


class Match(NamedTuple):
    """The longest retained prefix: whole pages, then `common` leading tokens of the page of `partial`."""

    full: tuple[Node, ...]
    partial: Node | None
    common: int


class Placed(NamedTuple):
    """The node that serves the tokens; whether it is new; the shorter leaf that it made superfluous."""

    node: Node
    added: bool
    superseded: Node | None


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many leading ids are equal."""
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)


Choice = Callable[[Sequence[Node]], int]


class RadixTree:
    """The retained pages of all tenants. Not thread-safe.

    Args:
        identity: of the model and the form of its pages (`blocks.CacheIdentity.digest`).
        clock: seconds, monotonic.
    """

    def __init__(self, identity: bytes = b"", clock: Callable[[], float] = lambda: 0.0) -> None:
        self._identity = identity
        self._time = clock
        self._now = 0.0
        self._roots: dict[str, Node] = {}
        self._nodes: dict[int, Node] = {}
        self._digests: dict[bytes, Node] = {}
        self._unused: list[tuple[int, int, Node]] = []
        self._left: deque[Node] = deque()
        self._serial = itertools.count()
        self._clock = 0

    def __len__(self) -> int:
        """Returns the number of retained pages."""
        return len(self._nodes)

    def at(self, page: int) -> Node | None:
        """Returns the node of a page."""
        return self._nodes.get(page)

    def page_of(self, digest: bytes) -> int | None:
        """Returns the page of the full page with this digest."""
        node = self._digests.get(digest)
        return None if node is None else node.page

    def path(self, digest: bytes) -> list[Node]:
        """Returns the full page with this digest and all before it, the first page first; none where it is not."""
        path: list[Node] = []
        node = self._digests.get(digest)
        while node is not None and node.page != NO_PAGE:
            path.append(node)
            node = node.parent
        return path[::-1]

    def root(self, tenant: str) -> bytes:
        """Returns the digest before a tenant's first page."""
        return root_digest(self._identity, tenant)

    def roots(self) -> Iterator[Node]:
        """Yields the root of each tenant that has pages."""
        yield from self._roots.values()

    def follow(self, tenant: str, ids: Sequence[int]) -> Iterator[Node]:
        """Yields the full pages that `ids` begin with, without counting that as a use."""
        node = self._roots.get(tenant)
        for start in range(0, len(ids) - PAGE_TOKENS + 1, PAGE_TOKENS):
            chunk = tuple(ids[start : start + PAGE_TOKENS])
            at = bisect_left(node.children, chunk, key=_ids) if node is not None else 0
            if node is None or at == len(node.children) or node.children[at].ids != chunk:
                return
            node = node.children[at]
            yield node

    def match(self, tenant: str, ids: Sequence[int]) -> Match:
        """Returns the longest retained prefix of `ids`, and counts it as used now."""
        self._tick()
        node = self._roots.get(tenant)
        full: list[Node] = []
        while node is not None:
            chunk = tuple(ids[len(full) * PAGE_TOKENS : (len(full) + 1) * PAGE_TOKENS])
            child, common = _closest(node, chunk)
            if child is None or not common:
                break
            self._use(child)
            if common < PAGE_TOKENS:
                return Match(tuple(full), child, common)
            full.append(child)
            node = child
        return Match(tuple(full), None, 0)

    def begin(self, tenant: str) -> Node:
        """Returns the root under which a sequence is placed, page after page; at least one must be."""
        self._tick()
        return self._roots.setdefault(tenant, Node(tenant, digest=self.root(tenant)))

    def place(self, parent: Node, ids: tuple[int, ...], page: int) -> Placed:
        """Puts a page under `parent`, unless a page there holds these tokens already; counts it as used.

        A leaf whose ids are the beginning of these is superseded; where it is the same page, it grows instead.
        """
        at = bisect_left(parent.children, ids, key=_ids)
        found = parent.children[at] if at < len(parent.children) else None
        if found is not None and found.ids[: len(ids)] == ids:
            self._use(found)
            return Placed(found, False, None)
        shorter = parent.children[at - 1] if at else None
        if shorter is not None and shorter.ids != ids[: len(shorter.ids)]:
            shorter = None
        digest = next_digest(parent.digest, ids) if len(ids) == PAGE_TOKENS else b""
        if shorter is not None and shorter.page == page:
            shorter.ids, shorter.digest = ids, digest
            self._named(shorter)
            self._use(shorter)
            return Placed(shorter, False, None)
        node = Node(parent.tenant, ids, page, digest, parent)
        self._use(node)
        parent.children.insert(at, node)
        self._nodes[page] = node
        self._named(node)
        if shorter is not None:
            self._detach(shorter)
        return Placed(node, True, shorter)

    def offer(self, page: int) -> None:
        """Notes that nobody leases `page` any longer: where it is a leaf, it may be evicted."""
        node = self._nodes.get(page)
        if node is not None:
            self._enqueue(node)

    def own(self, node: Node, session: SessionKey) -> None:
        """Notes which session used a page."""
        node.shared = node.shared or node.session not in (None, session)
        node.session = session

    def leave(self, digest: bytes) -> None:
        """Notes that the sequence which ends with or within the page behind this one is not wanted again."""
        end = self._digests.get(digest)
        if end is None:
            return
        for node in end.children:
            if not (node.digest or node.shared) and node.session == end.session:
                self._leave(node)
        if not (end.children or end.shared):
            self._leave(end)

    def uproot(self, session: SessionKey, digest: bytes, leased: Callable[[int], bool]) -> list[Node]:
        """Takes out what only `session` used of the full page with this digest and the pages before and behind it.

        What is leased, and what others go on from, stays. Returns what is gone.
        """
        end = self._digests.get(digest)
        gone: list[Node] = []
        for node in [] if end is None else [*reversed(list(_walk(end))), *reversed(self.path(digest)[:-1])]:
            if not (node.shared or node.children or leased(node.page)) and node.session == session:
                self._detach(node)
                gone.append(node)
        return gone

    def pop_behind(self, gone: Node, leased: Callable[[int], bool]) -> Node | None:
        """Takes out the page before one that was taken out, where it is a leaf now and was only used with that one."""
        node = gone.parent
        if node is None or node.page == NO_PAGE or node.children or node.shared or leased(node.page):
            return None
        if node.used != gone.used:
            return None
        self._detach(node)
        return node

    def pop_unused(self, leased: Callable[[int], bool], choose: Choice | None = None) -> Node | None:
        """Takes out one leaf that is not leased; None if there is none.

        It is one that is not wanted again, else the least recently used one, or which of the `CANDIDATES` least
        recently used `choose` says.
        """
        while self._left:
            node = self._left.popleft()
            if node.left and self._nodes.get(node.page) is node and not (node.children or leased(node.page)):
                self._detach(node)
                return node
        candidates: list[Node] = []
        while self._unused and len(candidates) < (CANDIDATES if choose else 1):
            used, _, node = heapq.heappop(self._unused)
            node.queued = False
            if self._nodes.get(node.page) is not node or leased(node.page):
                continue
            if node.used != used:
                self._enqueue(node)
            elif not node.children:
                candidates.append(node)
        if not candidates:
            return None
        victim = candidates.pop(choose(candidates) if choose else 0)
        for other in candidates:
            self._enqueue(other)
        self._detach(victim)
        return victim

    def remove(self, node: Node) -> list[Node]:
        """Takes a node out with all that depends on it; returns them, none if it was out before."""
        if self._nodes.get(node.page) is not node:
            return []
        below = list(_walk(node))
        for each in reversed(below):
            self._detach(each)
        return below

    def check_integrity(self) -> None:
        """Raises IntegrityError when order, links or lengths are wrong, or a page is in two nodes."""
        reached = 0
        for tenant, root in self._roots.items():
            if not root.children:
                raise IntegrityError("a tenant without pages has a tree")
            for node in itertools.islice(_walk(root), 1, None):
                reached += 1
                if self._nodes.get(node.page) is not node or node.tenant != tenant:
                    raise IntegrityError(f"page {node.page} is in two nodes, or in another tenant's tree")
                if not 1 <= len(node.ids) <= PAGE_TOKENS or (node.children and len(node.ids) < PAGE_TOKENS):
                    raise IntegrityError(f"page {node.page} holds {len(node.ids)} ids, {len(node.children)} children")
            for node in _walk(root):
                _check_children(node)
        if any(self._digests.get(n.digest) is not n for n in self._nodes.values() if n.digest):
            raise IntegrityError("a full page is not found by its digest")
        if reached != len(self._nodes):
            raise IntegrityError(f"{reached} pages are in the trees, {len(self._nodes)} are indexed")

    def _enqueue(self, node: Node) -> None:
        if node.queued or node.children or node.page == NO_PAGE:
            return
        if len(self._unused) > 2 * len(self._nodes) + 64:
            # Entries of nodes that are gone are dropped now and then, so that the heap stays as small as the tree.
            self._unused = [entry for entry in self._unused if self._nodes.get(entry[2].page) is entry[2]]
            heapq.heapify(self._unused)
        node.queued = True
        heapq.heappush(self._unused, (node.used, next(self._serial), node))

    def _leave(self, node: Node) -> None:
        node.left = True
        self._left.append(node)

    def _named(self, node: Node) -> None:
        if node.digest:
            self._digests[node.digest] = node

    def _tick(self) -> None:
        self._clock += 1
        self._now = self._time()

    def _use(self, node: Node) -> None:
        node.used, node.used_at, node.left = self._clock, self._now, False

    def _detach(self, node: Node) -> None:
        """Takes a leaf out; its parent may be a leaf now, and a root without pages is gone."""
        parent = node.parent
        del self._nodes[node.page]
        self._digests.pop(node.digest, None)
        if parent is None:
            return
        del parent.children[bisect_left(parent.children, node.ids, key=_ids)]
        if parent.page != NO_PAGE:
            self._enqueue(parent)
            if node.left and parent.used == node.used and not (parent.children or parent.shared):
                self._leave(parent)
        elif not parent.children:
            del self._roots[parent.tenant]


def _ids(node: Node) -> tuple[int, ...]:
    return node.ids


def _closest(node: Node, chunk: tuple[int, ...]) -> tuple[Node | None, int]:
    """Returns the child with the longest common prefix, and its length."""
    at = bisect_left(node.children, chunk, key=_ids)
    if at < len(node.children) and node.children[at].ids == chunk:
        return node.children[at], len(chunk)
    beside = [(common_prefix(child.ids, chunk), child) for child in node.children[max(0, at - 1) : at + 1]]
    common, child = max(beside, key=lambda pair: pair[0], default=(0, None))
    return child, common


def _walk(node: Node) -> Iterator[Node]:
    """Yields a node and all below it, parents first."""
    stack = [node]
    while stack:
        each = stack.pop()
        yield each
        stack += each.children


def _check_children(node: Node) -> None:
    for child in node.children:
        if child.parent is not node:
            raise IntegrityError(f"page {child.page} does not know the page before it")
        if node.page != NO_PAGE and child.used > node.used:
            raise IntegrityError(f"page {child.page} was used without the page before it")
    for left, right in itertools.pairwise(node.children):
        if left.ids >= right.ids or right.ids[: len(left.ids)] == left.ids:
            raise IntegrityError(f"pages {left.page} and {right.page} are out of order or hold the same tokens")
