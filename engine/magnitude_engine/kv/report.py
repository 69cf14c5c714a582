"""The radix trees in a form that a person can be shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from magnitude_engine import api
from magnitude_engine.kv.radix import Node


def stretches(roots: Iterable[Node], in_use: Callable[[int], bool], now: float) -> tuple[api.CacheRun, ...]:
    """Returns the pages below `roots`, those without a fork between them joined; parents first."""
    runs: list[api.CacheRun] = []
    stack = [(child, -1) for root in roots for child in reversed(root.children)]
    while stack:
        first, parent = stack.pop()
        run = [first]
        while len(run[-1].children) == 1:
            run.append(run[-1].children[0])
        stack += [(child, len(runs)) for child in reversed(run[-1].children)]
        runs.append(
            api.CacheRun(
                parent=parent,
                tenant=first.tenant,
                tokens=sum(len(node.ids) for node in run),
                pages=len(run),
                in_use=sum(1 for node in run if in_use(node.page)),
                idle_s=max(0.0, now - max(node.used_at for node in run)),
                sessions=len({node.session for node in run if node.session is not None}),
            )
        )
    return tuple(runs)
