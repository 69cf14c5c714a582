"""Where a sequence is in its grammar: masks, forced tokens, drafts.

The library's matcher stays broken after its first error, and then allows only the end of the answer, which would
be silent truncation. So nothing is consumed here that the mask does not allow, and every failure is raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from magnitude_engine.errors import GrammarFailure


class DraftMasks(NamedTuple):
    """What the grammar says to a tree of drafted tokens.

    Attributes:
        masks: int32 [1 + nodes, words]: the mask now, and after each node; undefined behind one that is not allowed.
        allowed: the nodes that those masks allow together with all above them, rising.
    """

    masks: torch.Tensor
    allowed: tuple[int, ...]


class GrammarState:
    """One sequence's place in a grammar; not thread-safe. `CompiledGrammar.begin` makes it.

    Every method that says what comes next raises GrammarFailure where the grammar became too complex to follow.
    """

    def __init__(self, matcher: Any, words: int, eos: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos = eos
        self._buffer = torch.zeros(words, dtype=torch.int32)
        self._drafts = torch.zeros((0, words), dtype=torch.int32)
        self._current = False
        self._ends = 0
        self._run: tuple[int, ...] = ()

    def mask(self) -> torch.Tensor:
        """Returns which tokens may come next: int32 [words], bit `token % 32` of word `token // 32`.

        It is this state's own buffer on the CPU, overwritten by the next call after a change: copy it to keep it,
        and do not write to it.
        """
        if not self._current:
            self._fill(self._buffer)
            self._current = True
        return self._buffer

    def accept(self, token: int) -> None:
        """Takes the next token.

        Raises:
            GrammarFailure: the mask does not allow it; the state is as it was.
        """
        run = self._run
        # A forced token is the only one that the mask allows, so that the mask need not be computed.
        if run[:1] != (token,) and not _allows(self.mask(), token):
            raise GrammarFailure(f"token {token} is not allowed here by the request's grammar")
        self._advance(token)
        self._run = run[1:] if run[:1] == (token,) else ()

    def forced(self) -> tuple[int, ...]:
        """Returns the tokens that must come next, whatever the model says; each is the only one its mask allows.

        They are canonical: the tokeniser's own for their text. The end of the answer is never among them.
        """
        if self._ends:
            return ()
        if not self._run:
            self._run = tuple(self._matcher.compute_ff_tokens())
            self._check()
        return self._run

    @property
    def may_end(self) -> bool:
        """Whether the answer may end here."""
        mask = self.mask()
        return any(_allows(mask, token) for token in self._eos)

    @property
    def ended(self) -> bool:
        """Whether nothing but the end of the answer may come."""
        mask = self.mask()
        words: list[int] = mask.tolist()
        allowed = sum((word & 0xFFFFFFFF).bit_count() for word in words if word)
        return allowed == sum(_allows(mask, token) for token in self._eos)

    def fork(self) -> GrammarState:
        """Returns an independent copy."""
        copy = GrammarState(self._matcher.deep_copy(), len(self._buffer), self._eos)
        copy._ends = self._ends
        return copy

    def masks(self, draft: Sequence[int], parents: Sequence[int] | None = None) -> DraftMasks:
        """Returns the masks along a tree of tokens, as far as they allow it; the state stays as it is.

        `parents` has for each token the index of the one above it, which stands before it, or -1; None for a chain. A
        token that spells what the grammar wants, but is not among the mask's, counts as not allowed, exactly as when
        it is drawn. The rows are this state's own buffer, overwritten by the next call.
        """
        if parents is None:
            parents = range(-1, len(draft) - 1)
        if len(self._drafts) <= len(draft):
            self._drafts = torch.zeros((len(draft) + 1, len(self._buffer)), dtype=torch.int32)
        rows = self._drafts
        rows[0] = self.mask()
        allowed: list[int] = []
        below = _below(parents)
        # The library's `rollback` can leave a matcher whose masks allow what it then refuses, so that drafts are
        # followed on copies, one for each way on.
        waiting: list[tuple[int, GrammarState]] = [(-1, self)]
        while waiting:
            above, state = waiting.pop()
            ways = [node for node in below.get(above, ()) if _allows(rows[above + 1], draft[node])]
            for node in ways:
                # The last way on takes the copy that led here.
                following = state if state is not self and node == ways[-1] else state.fork()
                try:
                    following._advance(draft[node])
                    following._fill(rows[node + 1])
                except GrammarFailure:
                    # The answer fails there too, if it comes there.
                    continue
                allowed.append(node)
                waiting.append((node, following))
        return DraftMasks(rows[: len(draft) + 1], tuple(sorted(allowed)))

    def _fill(self, row: torch.Tensor) -> None:
        if self._ends:
            row.zero_()
            for token in self._eos:
                row[token // 32] |= _bit(token)
            return
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * 4)
        self._check()

    def _advance(self, token: int) -> None:
        """Takes a token that the mask allows."""
        self._current, self._run = False, ()
        if token in self._eos:
            self._ends += 1
            return
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            problem = str(self._matcher.get_error()).splitlines()[0][:200]
            raise GrammarFailure(
                f"the request's grammar became too complex to follow ({problem}); simplify its patterns"
            )


def _below(parents: Sequence[int]) -> dict[int, list[int]]:
    """Returns the nodes right below each node."""
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


def _allows(mask: torch.Tensor, token: int) -> bool:
    return 0 <= token < 32 * mask.numel() and (int(mask[token // 32]) >> (token % 32)) & 1 == 1


def _bit(token: int) -> int:
    """Returns the token's bit as a signed 32-bit number."""
    bit = 1 << (token % 32)
    return bit - (1 << 32) if bit >> 31 else bit
