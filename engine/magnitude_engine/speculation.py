"""Drafts for the sequences of a step: who proposes, how much is verified, what came of it.

A draft is a tree of tokens that may follow a sequence. Its rows are computed in the step beside the sequence's own;
each row's next token is drawn exactly as it would be without it, and the draft is followed as long as it says the
same. So drafting changes when tokens come, never which.

| proposer | what it says | costs |
|---|---|---|
| `suffix` | the session's own words, and the tenant's past runs | a look-up |
| `prediction` | the text that the client expects | a look-up |
| `model` | a smaller model | a pass of it per token |
| `self` | the model with layers left out | a part of a pass per token |

What they propose for a sequence becomes one tree; the rule (`draft/controller.py`) says who is asked and how much of
the trees is verified. An index stays with its session from step to step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from magnitude_engine.draft.controller import Outcome, Rule, Share, Stage
from magnitude_engine.draft.need import Signs, grip
from magnitude_engine.draft.proposer import PredictionProposer, Proposer, SuffixProposer
from magnitude_engine.draft.record import Decision
from magnitude_engine.draft.runs import PastRuns
from magnitude_engine.draft.tree import DraftTree, common, merge
from magnitude_engine.draft.turn import Turn
from magnitude_engine.draft.vote import Limits
from magnitude_engine.drafters.chain import FEW_ROWS, Chain, Drafter, Pace, grow
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.request import Sequence as Choice
from magnitude_engine.scheduler import Order
from magnitude_engine.step import NO_DRAFT, Work

LIMITS = Limits(nodes=16, depth=16, score=0.05)
# An index of 6,000 tokens holds half a megabyte, and is built anew in a few milliseconds.
KEPT_SESSIONS = 32
# Prompt tokens kept before an answer in a tenant's runs, so that the beginning of an answer is found too.
LEAD = 16


@dataclass(slots=True)
class _Draft:
    """What is proposed for one sequence in one step, and where the sequence stood.

    Attributes:
        parts: the trees of the proposers, with the probabilities that they state.
        tree: what of them is offered, later what is verified.
        seconds: by proposer, what it took.
        tokens, drafted, accepted: of the sequence before the step.
    """

    work: Work
    room: int
    parts: dict[str, DraftTree] = field(default_factory=dict)
    tree: DraftTree = NO_DRAFT
    chains: dict[str, Chain] = field(default_factory=dict)
    considered: bool = False
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        sequence = self.work.sequence
        self.tokens, self.drafted, self.accepted = len(sequence.tokens), sequence.drafted, sequence.accepted

    @property
    def covered(self) -> list[float]:
        """How likely the tree holds the token at each depth, from 1 on."""
        sums = [0.0] * max(self.tree.depths, default=0)
        for depth, score in zip(self.tree.depths, self.tree.scores, strict=True):
            sums[depth - 1] += score
        return sums


class _Proposers(NamedTuple):
    """Those of one sequence that only look things up."""

    suffix: SuffixProposer
    prediction: PredictionProposer | None

    def by_name(self) -> list[tuple[str, Proposer]]:
        """Returns them with their names, those first whose word counts most."""
        found: list[tuple[str, Proposer]] = [("suffix", self.suffix)]
        return found if self.prediction is None else [("prediction", self.prediction), *found]


class Speculation:
    """Owned by the engine's thread.

    Args:
        context: most tokens of a sequence.
        runs: what tenants were told before; closed with this.
        clock: seconds, monotonic.

    Attributes:
        rule: decides who is asked and how much is verified; may be set anew.
        drafters: proposers that compute.
        decisions: of the last step.
    """

    def __init__(
        self,
        rule: Rule,
        context: int,
        runs: PastRuns,
        clock: Callable[[], float],
        drafters: Sequence[Drafter] = (),
    ) -> None:
        self.rule = rule
        self.runs = runs
        self.drafters = tuple(drafters)
        self.decisions: dict[Order, Decision] = {}
        self._context = context
        self._clock = clock
        self._active: dict[Order, _Proposers] = {}
        self._kept: OrderedDict[SessionKey, SuffixProposer] = OrderedDict()
        self._drafts: dict[Order, _Draft] = {}
        self._turns: dict[str, Turn] = {}
        self._seconds: dict[str, float] = {}
        self._shares: list[Share] = []

    def draft(self, work: Sequence[Work]) -> list[Work]:
        """Returns the work with the drafts that are worth verifying."""
        self.rule.begin()
        self._seconds, self._shares = {}, []
        drafts = [self._begun(w) for w in work if w.rows == w.sequence.missing and w.sequence.width == 1]
        self._drafts = {draft.work.sequence.order: draft for draft in drafts}
        open_drafts = [draft for draft in drafts if draft.room > 0]
        for draft in open_drafts:
            self._look_up(draft)
        stage = Stage(sum(w.rows for w in work), max(len(drafts), 1), sum(len(draft.tree) for draft in drafts))
        for drafter in self.drafters:
            self._compute(drafter, open_drafts, stage)
        counts = self.rule.choose([sorted(draft.tree.scores, reverse=True) for draft in drafts], stage.base)
        for draft, count in zip(drafts, counts, strict=True):
            draft.tree = draft.tree.prune(count)
        self.decisions = {draft.work.sequence.order: _decision(draft) for draft in open_drafts}
        for draft in open_drafts:
            draft.work.sequence.drafting.decided(self.decisions[draft.work.sequence.order])
        chosen = {draft.work.sequence.order: draft.tree for draft in drafts}
        return [w._replace(draft=chosen.get(w.sequence.order, NO_DRAFT)) for w in work]

    def observe(self, work: Sequence[Work], seconds: float) -> None:
        """Takes in what a step gave that took `seconds`, drafting included."""
        for order in list(self._drafts):
            self._settle(order)
        drafted = sum(len(w.draft) for w in work)
        spent = sum(self._seconds.values())
        if all(w.rows == 1 for w in work):
            shares = _summed(self._shares, self._seconds)
            self.rule.observe(Outcome(len(work), len(work), max(seconds - spent, 0.0), drafted, shares))

    def leave(self, sequence: Choice) -> None:
        """The sequence has ended or lost its seat: its index stays with the session."""
        self._settle(sequence.order)
        for drafter in self.drafters:
            drafter.leave(sequence)
        proposers = self._active.pop(sequence.order, None)
        if proposers is None:
            return
        if sequence.finish is not None and len(sequence.output) > 1:
            start = len(sequence.tokens) - len(sequence.output)
            self.runs.add(sequence.owner.tenant, sequence.tokens[max(0, start - LEAD) :])
        if sequence.choice == 0:
            self._kept[sequence.owner] = proposers.suffix
            self._kept.move_to_end(sequence.owner)
            if len(self._kept) > KEPT_SESSIONS:
                self._kept.popitem(last=False)

    def close(self) -> None:
        """Saves past runs."""
        self.runs.close()

    def _begun(self, work: Work) -> _Draft:
        sequence = work.sequence
        sequence.drafting.watched = False
        room = min(sequence.room, self._context - len(sequence.tokens)) - 1
        return _Draft(work, max(room, 0) if sequence.prepared.generate.preferences.speculation else 0)

    def _look_up(self, draft: _Draft) -> None:
        """Asks the proposers that compute nothing."""
        sequence = draft.work.sequence
        for name, proposer in self._proposers(sequence):
            if not self.rule.asks(name):
                continue
            began = self._clock()
            tree = proposer.propose(sequence.tokens, LIMITS).within(draft.room)
            self._took(name, began)
            if tree.tokens:
                draft.parts[name] = tree
                draft.tree = merge(draft.tree, self.rule.offer(name, tree))
        draft.tree = sequence.allowed(draft.tree)

    def _compute(self, drafter: Drafter, drafts: Sequence[_Draft], stage: Stage) -> None:
        """Lets a proposer compute where that is worth it."""
        ready = [draft for draft in drafts if draft.work.rows <= FEW_ROWS and draft.work.sequence.output]
        if not ready:
            return
        turn = self._turns.setdefault(drafter.name, Turn())
        for draft in ready:
            draft.work.sequence.drafting.watched |= turn.watches
        if not turn.considers:
            turn.take(drafted=False)
            return
        chains = [
            Chain(draft.work.sequence, draft.work.lease, _signs(draft.work.sequence), draft.room, draft.covered)
            for draft in ready
        ]
        for draft in ready:
            draft.considered = True
        self._seconds[drafter.name] = grow(drafter, chains, Pace(self.rule, stage, self._clock))
        turn.take(drafted=any(chain.guesses for chain in chains))
        for draft, chain in zip(ready, chains, strict=True):
            if chain.guesses:
                draft.chains[drafter.name] = chain
                draft.parts[drafter.name] = chain.tree()
                draft.tree = merge(draft.tree, draft.parts[drafter.name])

    def _settle(self, order: Order) -> None:
        """Takes in what became of a draft: for the sequence's own account, and for that of the rule."""
        draft = self._drafts.pop(order, None)
        if draft is None:
            return
        sequence = draft.work.sequence
        said = sequence.tokens[draft.tokens :]
        # A draft that found no pages was not verified.
        tree = draft.tree if sequence.drafted > draft.drafted else NO_DRAFT
        right = set(tree.follow(said)[: sequence.accepted - draft.accepted])
        for name, part in draft.parts.items():
            nodes = common(tree, part)
            share = Share(name, len(nodes), sum(part.scores[at] for at in nodes.values()), len(right & nodes.keys()))
            self._shares.append(share)
            if share.drafted:
                sequence.drafting.settled(name, share.drafted, share.accepted)
        for name, chain in draft.chains.items():
            self._learn(name, chain, said)

    def _learn(self, name: str, chain: Chain, said: Sequence[int]) -> None:
        """Tells the rule which guesses of a chain were right, up to the first that was not."""
        signs: Signs | None = chain.signs
        for guess, token in zip(chain.guesses, said, strict=False):
            self.rule.learn(name, signs, guess.stated, chain.sampled, guess.token == token)
            signs = None
            if guess.token != token:
                return

    def _took(self, name: str, began: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + self._clock() - began

    def _proposers(self, sequence: Choice) -> list[tuple[str, Proposer]]:
        """Returns who is asked about a sequence, by name."""
        proposers = self._active.get(sequence.order)
        if proposers is None:
            kept = self._kept.pop(sequence.owner, None) if sequence.choice == 0 else None
            index = kept.index if kept is not None else None
            trust = kept.trust if kept is not None else None
            suffix = SuffixProposer(index, self.runs.of(sequence.owner.tenant), trust)
            suffix.begin(sequence.tokens)
            text = sequence.prepared.prediction
            start = len(sequence.prepared.prompt)
            proposers = _Proposers(suffix, None if text is None else PredictionProposer(text, start))
            self._active[sequence.order] = proposers
        return proposers.by_name()


def _signs(sequence: Choice) -> Signs:
    record = sequence.drafting
    return Signs(record.kind(sequence.in_call), grip(sequence.leeway), record.confidence)


def _decision(draft: _Draft) -> Decision:
    tree = draft.tree
    if tree.tokens:
        names = tuple(name for name, part in draft.parts.items() if common(tree, part))
        return Decision(names, len(tree), tree.expected, "drafted")
    return Decision((), 0, 0.0, "not worth it" if draft.parts or draft.considered else "nothing known")


def _summed(shares: Sequence[Share], seconds: dict[str, float]) -> tuple[Share, ...]:
    """Returns one share for each proposer that took part."""
    found: dict[str, Share] = {name: Share(name, 0, 0.0, 0, took) for name, took in seconds.items()}
    for share in shares:
        before = found.get(share.proposer, Share(share.proposer, 0, 0.0, 0))
        found[share.proposer] = before._replace(
            drafted=before.drafted + share.drafted,
            promised=before.promised + share.promised,
            accepted=before.accepted + share.accepted,
        )
    return tuple(found.values())
