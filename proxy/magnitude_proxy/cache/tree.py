"""The runs of a cache report as the lines of an indented tree, tenant by tenant, the largest first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from magnitude_engine import api

TENANT_CHARS = 8


class Line(NamedTuple):
    """One line of the tree; figures that it does not have are None.

    Attributes:
        label: what it is, behind the strokes that say where it hangs.
    """

    label: str
    pages: int
    in_use: int | None = None
    idle_s: float | None = None
    sessions: int | None = None


def lines(runs: Sequence[api.CacheRun], depth: int | None, children: int | None) -> Iterator[Line]:
    """Yields the lines of `runs`.

    Args:
        depth: levels of runs that are shown, None for all.
        children: how many runs are shown below one run, and how many tenants; None for all.
    """
    tree = _Tree(runs)
    roots: dict[str, list[int]] = {}
    in_use: Counter[str] = Counter()
    for index, run in enumerate(runs):
        in_use[run.tenant] += run.in_use
        if run.parent < 0:
            roots.setdefault(run.tenant, []).append(index)
    tenants = sorted(roots, key=lambda tenant: -tree.pages_in(roots[tenant]))
    shown = tenants[:children]
    for tenant in shown:
        yield Line(f"tenant {tenant[:TENANT_CHARS]}", tree.pages_in(roots[tenant]), in_use[tenant])
        yield from tree.below(roots[tenant], depth, children)
    hidden = tenants[len(shown) :]
    if hidden:
        yield Line(f"… {len(hidden):,} more", sum(tree.pages_in(roots[tenant]) for tenant in hidden))


class _Item(NamedTuple):
    """A line to come: one run, or where `hidden` several that are not shown; `lead` stands before its joint."""

    lead: str
    last: bool
    level: int
    runs: Sequence[int]
    hidden: bool = False


class _Tree:
    """Which runs hang below which, and how much hangs there."""

    def __init__(self, runs: Sequence[api.CacheRun]) -> None:
        self._runs = runs
        self._children: list[list[int]] = [[] for _ in runs]
        self._pages = [run.pages for run in runs]
        self._count = [1] * len(runs)
        # Parents come first, so that going backwards every run is complete before it is added to its parent.
        for index in range(len(runs) - 1, -1, -1):
            parent = runs[index].parent
            if parent >= 0:
                self._children[parent].append(index)
                self._pages[parent] += self._pages[index]
                self._count[parent] += self._count[index]

    def pages_in(self, runs: Sequence[int]) -> int:
        """Returns the pages of `runs` and of all below them."""
        return sum(self._pages[run] for run in runs)

    def below(self, runs: Sequence[int], depth: int | None, children: int | None) -> Iterator[Line]:
        """Yields `runs`, siblings, each with what hangs below it."""
        # A stack instead of recursion: a session that forks at every step makes a tree as deep as it is long.
        pending = self._items(runs, _Item("", True, 0, ()), depth, children)
        while pending:
            item = pending.pop()
            joint = item.lead + ("└─ " if item.last else "├─ ")
            if item.hidden:
                count = sum(self._count[run] for run in item.runs)
                yield Line(f"{joint}… {count:,} more", self.pages_in(item.runs))
                continue
            index = item.runs[0]
            run = self._runs[index]
            yield Line(f"{joint}{run.tokens:,} tokens", run.pages, run.in_use, run.idle_s, run.sessions)
            pending += self._items(self._children[index], item, depth, children)

    def _items(self, runs: Sequence[int], above: _Item, depth: int | None, children: int | None) -> list[_Item]:
        """Returns the lines of the siblings `runs` below `above`, the last one first."""
        level = above.level + 1
        lead = above.lead + ("   " if above.last else "│  ") if above.level else ""
        ordered = sorted(runs, key=lambda run: (-self._pages[run], run))
        shown = ordered[: children if depth is None or level <= depth else 0]
        hidden = ordered[len(shown) :]
        items = [_Item(lead, False, level, (run,)) for run in shown]
        if hidden:
            items.append(_Item(lead, False, level, hidden, hidden=True))
        if items:
            items[-1] = items[-1]._replace(last=True)
        return items[::-1]
