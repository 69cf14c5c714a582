"""The model itself drafts, with some of its layers left out.

It reads the keys and values that the sequence has, and writes its own behind them, in the places of the tokens that
the step is about to verify: the pass that verifies computes all layers of them anew, and nothing else is ever read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from magnitude_engine.draft.controller import LONGEST_CHAIN
from magnitude_engine.drafters.chain import Chain, Guess, Pass, drawn
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.model.batch import KeyValueCache
from magnitude_engine.model.runner import Runner
from magnitude_engine.request import Sequence as Choice
from magnitude_engine.step import Rows, build_batch


class SelfDrafter:
    """Owned by the engine's thread.

    Args:
        layers: those that are computed.
    """

    name = "self"

    def __init__(self, runner: Runner, tensors: KeyValueCache, cache: PagedCache, layers: Sequence[int]) -> None:
        self._runner = runner
        self._tensors = tensors
        self._layers = tuple(layers)
        self._cache = cache

    def a_pass(self, unused: int) -> Pass:
        """Returns a pass of its layers."""
        return Pass(self._runner, self._tensors, unused, self._layers)

    def begin(self, chains: Sequence[Chain]) -> list[Chain]:
        """Gives the leases pages for the longest chains."""
        manager = self._cache.manager
        placed = [c for c in chains if manager.extend(c.lease, len(c.sequence.tokens) + LONGEST_CHAIN)]
        self._cache.apply()
        return placed

    def behind(self, chain: Chain) -> int:
        """Returns how many known tokens but the last have no keys and values yet."""
        return chain.sequence.missing - 1

    def catch_up(self, chain: Chain) -> int:
        """Nothing: what a sequence is behind, it is about to compute with all layers."""
        return 0

    def guess(self, chains: Sequence[Chain]) -> tuple[list[Guess], int]:
        """Computes each sequence's missing tokens, later its last drafted one, and draws what follows."""
        shares: list[Rows] = []
        for chain in chains:
            if chain.guesses:
                first = len(chain.sequence.tokens) + len(chain.guesses) - 1
                tokens: Sequence[int] = chain.tokens[-1:]
            else:
                first = chain.lease.length
                tokens = chain.sequence.tokens[first:]
            shares.append(Rows(tokens, replace(chain.lease, length=first), 1))
        logits = self._runner.forward(build_batch(shares, self._runner.device), self._tensors, self._layers).logits
        return drawn(logits, [chain.spec() for chain in chains]), sum(len(share.tokens) for share in shares)

    def leave(self, sequence: Choice) -> None:
        """It holds nothing."""


def spread(layers: int, share: float) -> tuple[int, ...]:
    """Returns about a `share` of a model's layers: the first and last eighth, and the others evenly spread."""
    edge = max(1, layers // 8)
    middle = range(edge, layers - edge)
    wanted = max(round(layers * share) - 2 * edge, 0)
    chosen = [middle[(2 * at + 1) * len(middle) // (2 * wanted)] for at in range(wanted)] if middle else []
    return tuple(sorted({*range(edge), *chosen, *range(layers - edge, layers)}))
