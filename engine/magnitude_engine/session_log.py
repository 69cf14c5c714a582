"""Tells retention, the tiers and the explainer what sessions do: when a step begins and ends, which tools it called."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from magnitude_engine import api
from magnitude_engine.explain.cause import Told
from magnitude_engine.explain.explainer import Explainer
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.kv.lease import Cached
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.request import Sequence as Choice

MAX_SESSIONS = 4096


class _End(NamedTuple):
    """Where a session's last step ended: tokens in all, and the tools that it called."""

    tokens: int
    tools: tuple[str, ...]


class SessionLog:
    """Owned by the engine's thread; remembers the sessions that were here last.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, cache: PagedCache, clock: Callable[[], float], explainer: Explainer) -> None:
        self._cache = cache
        self._retention = cache.manager.retention
        self._clock = clock
        self._explainer = explainer
        self._ends: OrderedDict[SessionKey, _End] = OrderedDict()

    def resumed(self, owner: SessionKey, prompt: Sequence[int], told: Mapping[str, float]) -> None:
        """A step of the session begins; `told` are the seconds that the last step's tools ran, where they are known."""
        chain = self._cache.manager.chain(owner.tenant, prompt)
        self._cache.tiers.touch(chain)
        end = self._ends.pop(owner, None)
        # What several tools printed cannot be told apart by its length.
        if end is not None and len(end.tools) == 1 and len(prompt) > end.tokens:
            self._retention.observe_output(owner.tenant, end.tools[0], len(prompt) - end.tokens)
        self._cache.manager.leave(self._retention.resumed(owner, chain, self._clock(), told))

    def began(self, choice: Choice, prompt: Told | None, cached: Cached) -> api.CacheMiss | None:
        """The step's prompt found this much; returns why not more, None where there could not have been."""
        return None if prompt is None else self._explainer.began(choice, prompt, cached)

    def left(self, choice: Choice) -> None:
        """A choice leaves the engine; the lease that it may hold says what was computed."""
        self._explainer.ended(choice)
        if choice.lease is not None:
            tools = tuple(call.name for call in choice.answer.tool_calls)
            self._paused(choice.owner, choice.tokens[: choice.lease.length], tools)

    def ended(self, end: api.EndSession) -> None:
        """Nothing more comes of a session, or of one of its branches."""
        self._explainer.forget(end)
        ends = self._retention.pruned(end.tenant, end.session, end.branch, self._clock())
        if end.pruned and end.branch is not None:
            self._cache.manager.prune(SessionKey(end.tenant, end.session, end.branch), ends)
        else:
            self._cache.manager.leave(ends)

    def _paused(self, owner: SessionKey, computed: Sequence[int], tools: tuple[str, ...]) -> None:
        chain = self._cache.manager.chain(owner.tenant, computed)
        self._ends.pop(owner, None)
        self._ends[owner] = _End(len(computed), tools)
        if len(self._ends) > MAX_SESSIONS:
            self._ends.popitem(last=False)
        self._retention.paused(owner, chain, tools, self._clock())
