"""Who proposes: the interface of everything that drafts, and the two that need no model.

A proposer serves one sequence. Whatever it proposes is verified, so it can cost time but never change a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from magnitude_engine.draft.chains import LONGEST, Chains, Match
from magnitude_engine.draft.corpus import RunCorpus
from magnitude_engine.draft.suffix import SuffixIndex
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.draft.vote import NO_BALLOT, Limits, Trust, vote

DEFAULT_LIMITS = Limits()

_RESUMING_LENGTH = 2


class Proposer(Protocol):
    """Proposes what follows a sequence."""

    def propose(self, context: Sequence[int], limits: Limits = DEFAULT_LIMITS) -> DraftTree:
        """Returns what may follow `context`: all tokens known so far, prompt included.

        From call to call a context only grows. An empty tree says that nothing is known.
        """


class SuffixProposer:
    """Lets the sequence's own words and the tenant's past runs vote together (`vote.py`).

    What it trusts matches of each length with follows from every token that comes, verified drafts or not.

    Attributes:
        index: of the session; kept from step to step.
        trust: of the session, too.
    """

    def __init__(
        self, index: SuffixIndex | None = None, runs: RunCorpus | None = None, trust: Trust | None = None
    ) -> None:
        self.index = SuffixIndex() if index is None else index
        self.trust = Trust() if trust is None else trust
        self._runs = runs
        self._ballot = NO_BALLOT

    def begin(self, prompt: Sequence[int]) -> int:
        """Takes a step's prompt; returns how many of its tokens were in the index already."""
        self._ballot = NO_BALLOT
        return self.index.follow(prompt)

    def propose(self, context: Sequence[int], limits: Limits = DEFAULT_LIMITS) -> DraftTree:
        """Returns what may follow (`Proposer`); a context shorter than the last one begins anew."""
        known = len(self.index)
        if len(context) < known:
            self.begin(context)
        elif len(context) > known:
            self.trust.learn(self._ballot, context[known])
            self.index.extend(context[known:])
        places = self.index.matches()
        if self._runs is not None:
            places += self._runs.matches(self.index.tail)
        self._ballot = vote(places, self.trust, limits)
        return self._ballot.tree


class PredictionProposer:
    """Follows a text that the client expects as the answer (OpenAI's `prediction`).

    It goes on where the answer left the text: after a token that differs it looks for the answer's last tokens, the
    longest match first and then the nearest to where it was. Where there is none it takes one token as replaced, and
    stays there until the answer comes back.
    """

    def __init__(self, prediction: Sequence[int], start: int) -> None:
        """`start` is the length of the prompt, which the answer follows."""
        self.trust = Trust()
        self._chains = Chains()
        self._chains.extend(prediction)
        self._start = self._seen = start
        self._at = 0
        self._agreed = LONGEST
        self._ballot = NO_BALLOT

    def propose(self, context: Sequence[int], limits: Limits = DEFAULT_LIMITS) -> DraftTree:
        """Returns what may follow (`Proposer`)."""
        if len(context) > self._seen:
            self.trust.learn(self._ballot, context[self._seen])
        for end in range(self._seen + 1, len(context) + 1):
            self._advance(context[max(self._start, end - LONGEST) : end])
        self._seen = max(self._seen, len(context))
        followed = Match(self._chains.tokens, self._at, self._agreed)
        self._ballot = vote([followed] if self._at < len(self._chains) else [], self.trust, limits)
        return self._ballot.tree

    def _advance(self, tail: Sequence[int]) -> None:
        """Moves on behind the last token of `tail`."""
        tokens = self._chains.tokens
        if self._at < len(tokens) and tokens[self._at] == tail[-1]:
            self._at += 1
            self._agreed = min(self._agreed + 1, LONGEST)
            return
        found = [match for match in self._chains.matches(tail) if match.length >= _RESUMING_LENGTH]
        best = min(found, key=lambda match: (-match.length, abs(match.at - self._at)), default=None)
        if best is not None:
            self._at, self._agreed = best.at, best.length
        elif self._agreed > 1:
            self._at, self._agreed = self._at + 1, 1
