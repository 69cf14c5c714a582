"""What a tenant's past runs said, as an index that drafts for its new ones.

One `RunCorpus` belongs to one tenant and one vocabulary; `RunStore` (store.py) finds it by both. A run is what a model
wrote in one answer or session, best with the few prompt tokens before it, so that the beginning of an answer is
found too. All runs lie in one index behind one another, with a token that matches nothing after each.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from magnitude_engine.draft.chains import BYTES_PER_TOKEN, LONGEST, MATCHES, ORDERS, Chains, Match
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.draft.vote import Limits, Trust, vote

SHORTEST_RUN = 8
SEPARATOR = -1

_USEFUL_MATCH = 4
_BYTES_PER_RUN = 400
# A table has at most four entries per token (`Chains`), and 256 at the beginning.
_TABLE_BYTES = 4 * len(ORDERS)
_MOST_BYTES_PER_TOKEN = BYTES_PER_TOKEN + 4 * _TABLE_BYTES + -(-_BYTES_PER_RUN // (SHORTEST_RUN + 1))


class CorpusLimits(NamedTuple):
    """How much one tenant's corpus may hold: tokens (one more is counted for each run), and bytes of memory."""

    tokens: int = 200_000
    bytes: int = 32 * 1024 * 1024

    @property
    def most_tokens(self) -> int:
        """The number of tokens that keeps both limits whatever the lengths of the runs."""
        return max(min(self.tokens, (self.bytes - 256 * _TABLE_BYTES) // _MOST_BYTES_PER_TOKEN), 0)


@dataclass(slots=True)
class _Run:
    """A run's place in the index, and when it was last added or matched."""

    digest: bytes
    start: int
    end: int
    used: int


class RunCorpus:
    """A bounded set of runs. Any thread may look up while one thread adds.

    Over the limit, runs go that were added or matched least recently, until the rest fills three quarters of it. An
    equal run is held once, of a run longer than a quarter of the limit the end is kept, and one shorter than
    `SHORTEST_RUN` is not held.
    """

    def __init__(self, limits: CorpusLimits | None = None, runs: Iterable[Sequence[int]] = ()) -> None:
        self._limit = (limits or CorpusLimits()).most_tokens
        self._lock = threading.Lock()
        self._chains = Chains()
        self._order: list[_Run] = []
        self._starts: list[int] = []
        self._held: dict[bytes, _Run] = {}
        self._ticks = 0
        for run in runs:
            self.add(run)

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, within the slack with which arrays grow."""
        return self._chains.nbytes + _BYTES_PER_RUN * len(self._order)

    def runs(self) -> list[array[int]]:
        """Returns the runs, the least recently used first."""
        with self._lock:
            tokens = self._chains.tokens
            return [tokens[run.start : run.end] for run in sorted(self._order, key=lambda run: run.used)]

    def add(self, tokens: Sequence[int]) -> None:
        """Takes in a run.

        Raises:
            ValueError: a token id is below 0.
            OverflowError: a token id does not fit into 31 bits.
        """
        run = array("i", tokens[-(self._limit // 4) :] if self._limit >= 4 else ())
        if any(token < 0 for token in run):
            raise ValueError(f"a run holds token id {min(run)}; ids begin at 0")
        if len(run) < SHORTEST_RUN:
            return
        digest = blake2b(run.tobytes(), digest_size=16).digest()
        with self._lock:
            self._ticks += 1
            known = self._held.get(digest)
            if known is not None:
                known.used = self._ticks
                return
        run.append(SEPARATOR)
        added = _Run(digest, len(self._chains), len(self._chains) + len(run) - 1, self._ticks)
        if len(self._chains) + len(run) > self._limit or self._chains.room < len(run):
            self._rebuild(run, added)
        else:
            with self._lock:
                self._chains.extend(run)
                self._enter(added)

    def matches(self, tail: Sequence[int], limit: int = MATCHES) -> list[Match]:
        """Returns places in the runs with the same tokens as at the end of `tail` (`Chains.matches`).

        The run with the longest match counts as used where that is `_USEFUL_MATCH` tokens or more.
        """
        with self._lock:
            found = self._chains.matches(tail, limit)
            best = max(found, key=lambda match: match.length, default=None)
            if best is not None and best.length >= _USEFUL_MATCH:
                self._ticks += 1
                self._order[bisect_right(self._starts, best.at) - 1].used = self._ticks
            return found

    def propose(self, context: Sequence[int], max_nodes: int, max_depth: int, trust: Trust | None = None) -> DraftTree:
        """Returns what may follow `context`, at most `max_nodes` nodes and `max_depth` tokens deep."""
        return vote(self.matches(context[-LONGEST:]), trust or Trust(), Limits(max_nodes, max_depth, 0.0)).tree

    def _rebuild(self, run: array[int], added: _Run) -> None:
        """Adds a run to a new index of those that stay; look-ups wait for the exchange only."""
        kept = self._staying(len(run))
        tokens = array("i")
        placed: list[_Run] = []
        for each in kept:
            placed.append(_Run(each.digest, len(tokens), len(tokens) + each.end - each.start, each.used))
            tokens.extend(self._chains.tokens[each.start : each.end + 1])
        placed.append(_Run(added.digest, len(tokens), len(tokens) + len(run) - 1, added.used))
        tokens.extend(run)
        chains = Chains()
        chains.extend(tokens)
        with self._lock:
            self._chains, self._order, self._starts, self._held = chains, [], [], {}
            for each in placed:
                self._enter(each)

    def _staying(self, incoming: int) -> list[_Run]:
        """Returns the runs that stay when `incoming` more tokens come, in the order of the index."""
        if len(self._chains) + incoming <= self._limit:
            return self._order
        room = self._limit * 3 // 4 - incoming
        staying: list[_Run] = []
        for run in sorted(self._order, key=lambda run: -run.used):
            room -= run.end + 1 - run.start
            if room < 0:
                break
            staying.append(run)
        return sorted(staying, key=lambda run: run.start)

    def _enter(self, run: _Run) -> None:
        self._order.append(run)
        self._starts.append(run.start)
        self._held[run.digest] = run
