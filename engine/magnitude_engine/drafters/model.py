"""An independent model of the same vocabulary drafts, with keys and values of its own.

It draws as the model will: the same noise, truncation, penalties and masks, so that where the two distributions agree
the drafted token is accepted, sampled or not. What it has computed of a sequence stays until other sequences need the
room, and is followed as far as the sequence said the same; a session's next step goes on with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.draft.controller import LONGEST_CHAIN
from magnitude_engine.drafters.chain import Chain, Guess, Pass, drawn
from magnitude_engine.kv.lease import CacheKey, Lease, pages_for
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.model.runner import Runner
from magnitude_engine.request import Sequence as Choice
from magnitude_engine.scheduler import Order
from magnitude_engine.step import Rows, build_batch

# Rows that it computes at once of what it is behind.
CHUNK = 256


@dataclass(slots=True)
class _Held:
    """What is computed of one sequence.

    Attributes:
        tokens: that `lease` holds keys and values of.
        sure: how many of them are known to be the sequence's own.
        ended: whether the sequence has; the session's next may go on with it.
    """

    owner: SessionKey
    lease: Lease
    tokens: list[int]
    sure: int = 0
    ended: bool = False


class ModelDrafter:
    """Owned by the engine's thread.

    Args:
        columns: token ids that both models know; the draft model's logits may have more columns.
        pages: of its own cache, for all sequences together.
    """

    name = "model"

    def __init__(self, runner: Runner, columns: int, pages: int) -> None:
        self._runner = runner
        self._tensors = runner.allocate_cache(pages)
        self._columns = columns
        self._free = list(range(pages))
        self._held: OrderedDict[Order, _Held] = OrderedDict()

    def a_pass(self, unused: int) -> Pass:
        """Returns a pass of the draft model."""
        return Pass(self._runner, self._tensors, len(self._free))

    def begin(self, chains: Sequence[Chain]) -> list[Chain]:
        """Finds what is held of each sequence, and pages for what it may draft, if need be those unused longest."""
        for chain in chains:
            self._place(chain.sequence)
        return [chain for chain in chains if chain.sequence.order in self._held]

    def behind(self, chain: Chain) -> int:
        """Returns how many known tokens but the last it has not computed."""
        return len(chain.sequence.tokens) - 1 - len(self._held[chain.sequence.order].tokens)

    def catch_up(self, chain: Chain) -> int:
        """Computes up to `CHUNK` of them."""
        held = self._held[chain.sequence.order]
        first = len(held.tokens)
        tokens = chain.sequence.tokens[first : min(first + CHUNK, len(chain.sequence.tokens) - 1)]
        self._forward([(held, tokens)], 0)
        return len(tokens)

    def guess(self, chains: Sequence[Chain]) -> tuple[list[Guess], int]:
        """Computes what is missing of each sequence and its chain, and draws what follows."""
        parts: list[tuple[_Held, list[int]]] = []
        for chain in chains:
            held = self._held[chain.sequence.order]
            known = len(chain.sequence.tokens)
            first = len(held.tokens)
            parts.append((held, [*chain.sequence.tokens[first:], *chain.tokens[max(first - known, 0) :]]))
        logits = self._forward(parts, 1)[:, : self._columns]
        words = -(-logits.shape[1] // 32)
        specs = [chain.spec() for chain in chains]
        fitted = [spec if spec.mask is None else replace(spec, mask=spec.mask[:words]) for spec in specs]
        return drawn(logits, fitted), sum(len(tokens) for _, tokens in parts)

    def leave(self, sequence: Choice) -> None:
        """What is held may serve the session's next step."""
        held = self._held.get(sequence.order)
        if held is not None:
            held.ended = True

    def _forward(self, parts: Sequence[tuple[_Held, list[int]]], wanted: int) -> torch.Tensor:
        batch = build_batch([Rows(tokens, held.lease, wanted) for held, tokens in parts], self._runner.device)
        logits = self._runner.forward(batch, self._tensors).logits
        for held, tokens in parts:
            held.tokens += tokens
            held.lease.length += len(tokens)
        return logits

    def _place(self, sequence: Choice) -> None:
        """Makes what is held of a sequence true and long enough; where that is impossible nothing is held of it."""
        held = self._held.pop(sequence.order, None) or self._adopted(sequence)
        most = min(len(sequence.tokens) + LONGEST_CHAIN, self._runner.shape.context)
        if len(sequence.tokens) >= most:
            self._free += held.lease.pages
            return
        self._follow(held, sequence.tokens)
        self._held[sequence.order] = held
        while len(held.lease.pages) < pages_for(most):
            if not self._free:
                self._free += self._held.popitem(last=False)[1].lease.pages
            if sequence.order not in self._held:
                return
            held.lease.pages.append(self._free.pop())

    def _adopted(self, sequence: Choice) -> _Held:
        """Returns what is held of the session's last step, or nothing yet."""
        for order, held in reversed(self._held.items()):
            if held.ended and held.owner == sequence.owner:
                del self._held[order]
                held.ended, held.sure = False, 0
                return held
        key = CacheKey(*sequence.owner)
        return _Held(sequence.owner, Lease(key), [])

    def _follow(self, held: _Held, tokens: Sequence[int]) -> None:
        """Forgets what the sequence does not say, and its last token at least, whose logits are wanted."""
        at = held.sure
        last = min(len(held.tokens), len(tokens) - 1)
        while at < last and held.tokens[at] == tokens[at]:
            at += 1
        held.sure = at
        del held.tokens[at:]
        held.lease.length = at
        spare = held.lease.pages[pages_for(at) :]
        del held.lease.pages[pages_for(at) :]
        self._free += spare


def pages_within(runner: Runner, mib: int) -> int:
    """Returns how many pages of keys and values fit into `mib` MiB, at least one longest sequence."""
    shape = runner.shape
    page = 2 * shape.layers * PAGE_TOKENS * shape.kv_heads * shape.head_dim * runner.cache_dtype.itemsize
    return max(mib * 1024 * 1024 // page, pages_for(shape.context))
