"""Which retained pages go first: the session that is expected back last loses its pages first.

A session's state (`sessions.py`) says when its pages are wanted again:

- ended, pruned, or left behind by the session's own next step: never;
- waiting for tools: when they are done, as far as the last calls of these tools tell (`toolstats.py`);
- else, and when the tools take longer than ever: after as long as the pages have been unused already (Lindy's rule,
  as for anything of unknown life). By that rule alone the least recently used page goes first.

Two simulated caches (`shadow.py`) see every prompt, one evicting so, the other the least recently used page. The
real cache follows the one that finds more.

Chains are digests of full pages, each covering the tenant and all tokens up to the end of its page. `now` is in
seconds of one monotonic clock. Not thread-safe: the engine's thread owns it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from magnitude_engine.api import SessionUse
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.sessions import Session, SessionKey, SessionTable
from magnitude_engine.kv.shadow import Access, Contest, Policy, Shadow
from magnitude_engine.kv.toolstats import ToolTable

__all__ = ["Candidate", "Retention", "SessionKey"]


class Candidate(NamedTuple):
    """An unleased leaf of the tree of retained pages.

    Attributes:
        session: the only session that used it; None when several did, as they do with a system prompt.
        last_used: when it was used last.
        abandoned: whether it was left behind (`Retention.abandoned`).
    """

    session: SessionKey | None
    last_used: float
    abandoned: bool = False


class Retention:
    """Follows the sessions and chooses what is evicted from a cache of `pages` pages.

    A branch is a session of its own here; ending one does not end the others.
    """

    def __init__(self, pages: int) -> None:
        self._sessions = SessionTable()
        self._tools = ToolTable()
        self._learned = Shadow(pages, self.expected_use_s)
        self._lru = Shadow(pages)
        self._contest = Contest()

    @property
    def policy(self) -> Policy:
        """Which policy `choose` follows now."""
        return self._contest.policy

    @property
    def learned_hit_rate(self) -> float:
        """Share of the pages of the last prompts that the learned policy would have found, 0..1."""
        return self._contest.learned_hit_rate

    @property
    def lru_hit_rate(self) -> float:
        """Share of the pages of the last prompts that evicting the least recently used would have found, 0..1."""
        return self._contest.lru_hit_rate

    def resumed(
        self, key: SessionKey, chain: Sequence[bytes], now: float, told: Mapping[str, float] | None = None
    ) -> tuple[bytes, ...]:
        """A request was admitted; `chain` is that of all full pages of its prompt. Also revives what had ended.

        `told` are the seconds that tools of the last step ran, as far as the client says.

        Returns the last digests of the sequences that the session leaves behind with it.
        """
        step = self._sessions.resume(key, chain, now)
        if step.tools:
            self._tools.took(key.tenant, step.tools, step.waited_s, told or {})
        for end in step.left:
            self._learned.doom(key, end)
        if chain:
            learned, lru = (shadow.access(key, chain, now) for shadow in (self._learned, self._lru))
            self._contest.note(Access(len(chain), learned, lru))
        return step.left

    def paused(self, key: SessionKey, chain: Sequence[bytes], tools: Sequence[str], now: float) -> None:
        """Its step ended with these full pages, output included, and called `tools`; none: it answered its user.

        A session that ended while the step ran stays ended.
        """
        session = self._sessions.get(key)
        ended = session is not None and session.state == "ended"
        if not ended:
            self._sessions.pause(key, chain, tools, now)
            duration = self._tools.duration(key.tenant, tools)
            if duration is not None:
                self._sessions.expect(key, now + duration)
        for shadow in (self._learned, self._lru):
            shadow.access(key, chain, now)
        if ended:
            self._learned.doom(key)

    def ended(self, key: SessionKey, now: float) -> tuple[bytes, ...]:
        """Nothing more comes of this branch of the session, unless `resumed` says otherwise.

        Returns the last digests of its sequences.
        """
        ends = self._sessions.end(key, now)
        if ends is None:
            return ()
        self._learned.doom(key)
        return ends

    def pruned(self, tenant: str, session: str, branch: str | None, now: float) -> tuple[bytes, ...]:
        """Nothing more comes of a branch, or of all branches where `branch` is None; returns as `ended` does."""
        named = [] if branch is None else [SessionKey(tenant, session, branch)]
        return tuple(end for key in named or self._sessions.branches(tenant, session) for end in self.ended(key, now))

    def abandoned(self, key: SessionKey, end: bytes) -> bool:
        """Returns whether what a step of the session last used is not wanted again.

        `end` is the last digest of the chain with which that step was resumed or paused.
        """
        session = self._sessions.get(key)
        found = None if session is None else session.ends.get(end)
        return found is not None and found.left

    def expected_use_s(self, key: SessionKey | None, last_used: float, now: float) -> float:
        """Returns the seconds until pages are used again that `key` used last; infinite when never."""
        session = None if key is None else self._sessions.get(key)
        if key is not None and session is not None:
            if session.state == "ended":
                return math.inf
            left = self._tools.remaining(key.tenant, session.tools, now - session.since)
            if left is not None:
                return left
        return max(now - last_used, 0.0)

    def choose(self, candidates: Sequence[Candidate], now: float) -> int:
        """Returns the index of the one to evict.

        Candidates are the `CANDIDATES` least recently used unleased leaves, the least recently used first, and
        behind them any others that are abandoned or whose session ended. Of equals the first one is chosen; with
        the policy `lru` always the first. At least one is needed (else ValueError).
        """
        if not candidates:
            raise ValueError("choose needs at least one candidate: nothing can be evicted")
        if self.policy == "lru":
            return 0
        scores = [math.inf if c.abandoned else self.expected_use_s(c.session, c.last_used, now) for c in candidates]
        return scores.index(max(scores))

    def due(self, now: float, within_s: float) -> list[SessionKey]:
        """Returns the sessions whose tools are expected to be done within that time, the first one first.

        Those that are overdue by less than that time are among them.
        """
        return self._sessions.due_between(now - within_s, now + within_s)

    def observe_output(self, tenant: str, tool: str, tokens: int) -> None:
        """Learns the length of a tool's result."""
        self._tools.returned(tenant, tool, tokens)

    def expected_output(self, tenant: str, tool: str) -> int | None:
        """Returns the tokens that a result of this tool usually has; None where that is not known yet."""
        record = self._tools.find(tenant, tool)
        tokens = None if record is None else record.tokens.median
        return None if tokens is None else round(tokens)

    def expected_duration_s(self, tenant: str, tool: str) -> float | None:
        """Returns the seconds from a call of this tool to the session's return; None where not known yet."""
        return self._tools.duration(tenant, [tool])

    def sessions(self, now: float) -> list[SessionUse]:
        """Returns what is known of each session, the one that was active last at the end."""
        return [_use(key, session, now) for key, session in self._sessions.items()]

    def check_integrity(self) -> None:
        """Raises IntegrityError when a simulated cache contradicts itself."""
        self._learned.check_integrity()
        self._lru.check_integrity()


def _use(key: SessionKey, session: Session, now: float) -> SessionUse:
    return SessionUse(
        tenant=key.tenant,
        session=key.session,
        branch=key.branch,
        state=session.state,
        tokens=session.pages * PAGE_TOKENS,
        tool=", ".join(session.tools),
        due_s=None if session.due is None else max(session.due - now, 0.0),
    )
