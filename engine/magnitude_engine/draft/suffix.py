"""Drafts from a sequence's own words: what followed the last time its latest tokens occurred."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from magnitude_engine.draft.chains import LONGEST, MATCHES, Chains, Match
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.draft.vote import Limits, Trust, vote


class SuffixIndex:
    """An index over one session's prompt and output; the session's next step keeps what its prompt shares with it.

    Not thread-safe. A token takes about 3 µs to add, a prompt of 6,000 tokens a few milliseconds; 36 bytes per token
    and up to 64 for the tables are held.
    """

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._chains = Chains()
        self._chains.extend(tokens)

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._chains.nbytes

    @property
    def tail(self) -> Sequence[int]:
        """The last tokens, as many as a match may have."""
        return self._chains.tokens[-LONGEST:]

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds tokens, one or many."""
        if len(tokens) == 1:
            self._chains.append(tokens[0])
        else:
            self._chains.extend(tokens)

    def follow(self, tokens: Sequence[int]) -> int:
        """Makes `tokens` the indexed sequence; returns how many of the indexed tokens were kept."""
        held = len(self._chains)
        shared = min(held, len(tokens))
        ours = np.frombuffer(self._chains.tokens, dtype=np.int32)[:shared] if shared else np.empty(0, np.int32)
        differs = np.flatnonzero(ours != np.asarray(tokens[:shared], dtype=np.int32))
        del ours
        kept = int(differs[0]) if len(differs) else shared
        if 2 * kept < held:
            self._chains = Chains()
            kept = 0
        else:
            self._chains.truncate(kept)
        self._chains.extend(tokens[kept:])
        return kept

    def matches(self, limit: int = MATCHES) -> list[Match]:
        """Returns earlier places with the same last tokens, those of longer n-grams first, then later places."""
        return self._chains.matches(self.tail, limit)

    def propose(self, max_nodes: int, max_depth: int, trust: Trust | None = None) -> DraftTree:
        """Returns what may follow, at most `max_nodes` nodes and `max_depth` tokens deep."""
        return vote(self.matches(), trust or Trust(), Limits(max_nodes, max_depth, 0.0)).tree
