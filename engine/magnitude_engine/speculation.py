"""Drafts for the sequences of a step: who proposes, how much is verified, what came of it.

A draft is a chain of tokens that may follow a sequence. Its rows are computed in the step beside the sequence's own;
each row's next token is drawn exactly as it would be without it, and the draft is followed as long as it says the
same. So drafting changes when tokens come, never which.

The proposers are the session's own words and, where there are any, the tenant's past runs (`draft/`). An index stays
with its session from step to step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from magnitude_engine.draft.controller import Outcome
from magnitude_engine.draft.corpus import CorpusLimits, RunCorpus
from magnitude_engine.draft.proposer import Proposer, SuffixProposer
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.draft.vote import Limits
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.request import Sequence as Choice
from magnitude_engine.scheduler import Order
from magnitude_engine.step import NO_DRAFT, Work

LIMITS = Limits(nodes=16, depth=16, score=0.05, fork=False)
# An index of 6,000 tokens holds half a megabyte, and is built anew in a few milliseconds.
KEPT_SESSIONS = 32
KEPT_TENANTS = 16
# With all tenants full, a hundred megabytes.
RUNS = CorpusLimits(tokens=100_000, bytes=8 * 1024 * 1024)
# Prompt tokens kept before an answer in a tenant's runs, so that the beginning of an answer is found too.
LEAD = 16


class Depths(Protocol):
    """Decides how many tokens of each draft are verified (`draft/controller.py`)."""

    def choose(self, drafts: Sequence[Sequence[float]], base: int) -> list[int]:
        """Returns a number for each draft."""

    def observe(self, outcome: Outcome) -> None:
        """Takes in what a step gave."""


class Speculation:
    """Owned by the engine's thread.

    Args:
        context: most tokens of a sequence.

    Attributes:
        depths: decides how much is verified; may be set anew.
    """

    def __init__(self, depths: Depths, context: int) -> None:
        self.depths = depths
        self._context = context
        self._learning = ThreadPoolExecutor(1, thread_name_prefix="magnitude-runs")
        self._active: dict[Order, SuffixProposer] = {}
        self._kept: OrderedDict[SessionKey, SuffixProposer] = OrderedDict()
        self._runs: OrderedDict[str, RunCorpus] = OrderedDict()
        self._promised: dict[Order, float] = {}

    def draft(self, work: Sequence[Work]) -> list[Work]:
        """Returns the work with the drafts that are worth verifying."""
        self._promised = {}
        drawing = [w for w in work if w.rows == w.sequence.missing and w.sequence.width == 1]
        trees = [self._propose(w.sequence) for w in drawing]
        base = sum(w.rows for w in work)
        counts = self.depths.choose([sorted(tree.scores, reverse=True) for tree in trees], base)
        drafts: dict[Order, DraftTree] = {}
        for w, tree, count in zip(drawing, trees, counts, strict=True):
            chosen = drafts[w.sequence.order] = tree.prune(count)
            self._promised[w.sequence.order] = chosen.expected
        return [w._replace(draft=drafts.get(w.sequence.order, NO_DRAFT)) for w in work]

    def observe(self, work: Sequence[Work], accepted: int, seconds: float) -> None:
        """Takes in what a step gave: `accepted` drafted tokens in all."""
        drafted = sum(len(w.draft) for w in work)
        # A draft that found no pages was not verified, so nothing is known of its promise.
        promised = sum(self._promised[w.sequence.order] for w in work if w.draft)
        if all(w.rows == 1 for w in work):
            self.depths.observe(Outcome(len(work), len(work), seconds, drafted, promised, accepted))

    def leave(self, sequence: Choice) -> None:
        """The sequence has ended or lost its seat: its index stays with the session."""
        proposer = self._active.pop(sequence.order, None)
        if proposer is None:
            return
        if sequence.finish is not None and len(sequence.output) > 1:
            start = len(sequence.tokens) - len(sequence.output)
            # A full corpus is built anew now and then, which takes longer than a step.
            self._learning.submit(self._corpus(sequence.owner.tenant).add, sequence.tokens[max(0, start - LEAD) :])
        if sequence.choice == 0:
            self._kept[sequence.owner] = proposer
            self._kept.move_to_end(sequence.owner)
            if len(self._kept) > KEPT_SESSIONS:
                self._kept.popitem(last=False)

    def close(self) -> None:
        """Ends the thread that takes in past runs."""
        self._learning.shutdown(wait=True, cancel_futures=True)

    def _propose(self, sequence: Choice) -> DraftTree:
        """Returns what may follow a sequence, as far as its limits and its grammar allow."""
        room = min(sequence.room, self._context - len(sequence.tokens)) - 1
        if room < 1 or not sequence.prepared.generate.preferences.speculation:
            return NO_DRAFT
        tree = self._proposer(sequence).propose(sequence.tokens, LIMITS)
        return sequence.allowed(tree.kept([node for node, depth in enumerate(tree.depths) if depth <= room]))

    def _proposer(self, sequence: Choice) -> Proposer:
        proposer = self._active.get(sequence.order)
        if proposer is None:
            kept = self._kept.pop(sequence.owner, None) if sequence.choice == 0 else None
            index = kept.index if kept is not None else None
            trust = kept.trust if kept is not None else None
            proposer = SuffixProposer(index, self._corpus(sequence.owner.tenant), trust)
            proposer.begin(sequence.tokens)
            self._active[sequence.order] = proposer
        return proposer

    def _corpus(self, tenant: str) -> RunCorpus:
        """Returns a tenant's past runs."""
        corpus = self._runs.pop(tenant, None)
        if corpus is None:
            corpus = RunCorpus(RUNS)
        self._runs[tenant] = corpus
        if len(self._runs) > KEPT_TENANTS:
            self._runs.popitem(last=False)
        return corpus
