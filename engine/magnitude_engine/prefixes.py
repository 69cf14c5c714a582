"""Which prefix a sequence shares with the others that wait or run, so that the scheduler lets them go together.

A chain names the full pages of a sequence's prompt: each name stands for the page and everything before it (a
digest over both and the tenant), so two chains have a name in common exactly where their prefixes are equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence


class Prefixes:
    """Counts the chains of all sequences in the engine. Not thread-safe; holds nothing of those that left."""

    def __init__(self) -> None:
        self._members: Counter[bytes] = Counter()

    def __len__(self) -> int:
        """Returns how many different pages the sequences have."""
        return len(self._members)

    def enter(self, chain: Sequence[bytes]) -> None:
        """Takes a sequence in."""
        self._members.update(chain)

    def leave(self, chain: Sequence[bytes]) -> None:
        """Takes out a sequence that was entered."""
        for name in chain:
            self._members[name] -= 1
            if self._members[name] <= 0:
                del self._members[name]

    def group(self, chain: Sequence[bytes]) -> bytes | None:
        """Returns the name of the longest prefix that a sequence which is in shares with another; None for none.

        Members never grow in number along a chain, so it is found in O(log pages).
        """
        pages = bisect_left(chain, True, key=lambda name: self._members[name] < 2)
        return chain[pages - 1] if pages else None
