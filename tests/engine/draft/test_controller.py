"""The controller: what is worth verifying and computing by cost, and promises that do not hold, in simulated time."""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from magnitude_engine.draft.controller import Controller, FixedRule, Outcome, Share, Stage
from magnitude_engine.draft.costs import StepCosts, is_sane
from magnitude_engine.draft.guard import TRIAL
from magnitude_engine.draft.need import Signs
from magnitude_engine.draft.tree import DraftTree, common, merge

DEPTH = 16
PLAIN_S = 0.010
PROMISE = tuple(0.95**depth for depth in range(1, DEPTH + 1))
SURE = Signs("text", "free", (0.01, 0.99))
UNSURE = Signs("text", "free", (3.0, 0.1))


def costs(row_s: float, plain_s: float = PLAIN_S) -> StepCosts:
    """Returns costs of 10 ms for one row, and `row_s` for each further one."""
    return StepCosts({rows: plain_s + row_s * (rows - 1) for rows in (1, 2, 4, 8)})


@functools.cache
def promise(first: int) -> DraftTree:
    """Returns a chain of tokens from `first` on, each right with 0.95 if those before it are."""
    return DraftTree(tuple(range(first, first + DEPTH)), tuple(range(-1, DEPTH - 1)), PROMISE)


@dataclass(slots=True)
class Simulation:
    """Steps of `sequences` sequences, whose proposers are right with a fixed probability whatever they promise.

    Attributes:
        looked_up: the probability with which each free proposer's next token is right.
        computed: the same for proposers that compute, by whether the model is sure of the last token.
        passes: seconds of a pass of each of these.
        seconds, tokens, drafted: what the steps took and gave, and by proposer how much was verified.
    """

    row_s: float
    looked_up: Mapping[str, float] = field(default_factory=dict)
    computed: Mapping[str, Mapping[Signs, float]] = field(default_factory=dict)
    passes: Mapping[str, float] = field(default_factory=dict)
    sequences: int = 1
    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    draws: random.Random = field(default_factory=lambda: random.Random(7))

    def controller(self) -> Controller:
        passes = {name: costs(0.0, seconds) for name, seconds in self.passes.items()}
        return Controller(costs(self.row_s), passes)

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts."""
        return PLAIN_S + self.row_s * (self.sequences - 1)

    @property
    def speedup(self) -> float:
        """Tokens per second by those of steps without drafts."""
        return self.tokens / self.seconds * self.plain / self.sequences

    def run(self, controller: Controller, steps: int) -> Simulation:
        """Runs steps; returns itself."""
        for _ in range(steps):
            controller.begin()
            signs = SURE if self.draws.random() < 0.5 else UNSURE
            parts = [self._parts(controller, signs) for _ in range(self.sequences)]
            took = {name: each * 0.0 for name, each in self.passes.items()}
            for name in self.computed:
                took[name] = self._compute(controller, name, signs, parts)
            self._verify(controller, parts, took)
        self.steps += steps
        return self

    def _parts(self, controller: Controller, signs: Signs) -> dict[str, tuple[DraftTree, DraftTree, int]]:
        """Returns each free proposer's tree, as it is and as it is offered, and how much of it is right."""
        found: dict[str, tuple[DraftTree, DraftTree, int]] = {}
        for at, (name, truth) in enumerate(self.looked_up.items()):
            if controller.asks(name):
                tree = promise(1000 * at)
                found[name] = (tree, controller.offer(name, tree), self._right(truth))
        return found

    def _right(self, truth: float) -> int:
        count = 0
        while count < DEPTH and self.draws.random() < truth:
            count += 1
        return count

    def _compute(
        self, controller: Controller, name: str, signs: Signs, parts: list[dict[str, tuple[DraftTree, DraftTree, int]]]
    ) -> float:
        """Lets a proposer draft for the first sequence, which is the only one with such proposers."""
        truth, chance = self.computed[name][signs], controller.chance(name, signs)
        drafted, path, took = 0, 1.0, 0.0
        best = max((tree.scores[0] for _, tree, _ in parts[0].values() if tree.tokens), default=0.0)
        right = self._right(truth)
        stage = Stage(self.sequences, self.sequences)
        while True:
            gain = max(path * chance - (best if not drafted else 0.0), 0.0)
            if not controller.goes_on(name, drafted, [gain], stage._replace(drafted=drafted)):
                break
            took += self.passes[name]
            controller.passed(name, 1, self.passes[name])
            path *= controller.worth(name, 0.8, False)
            if drafted <= right:
                controller.learn(name, None if drafted else signs, 0.8, False, drafted < right)
            drafted += 1
        if drafted:
            scores = tuple(0.8 ** (at + 1) for at in range(drafted))
            worths = tuple(controller.worth(name, 0.8, False) ** (at + 1) for at in range(drafted))
            tokens, parents = tuple(range(9000, 9000 + drafted)), tuple(range(-1, drafted - 1))
            stated = DraftTree(tokens, parents, scores)
            parts[0][name] = (stated, DraftTree(tokens, parents, worths), min(right, drafted))
        return took

    def _verify(
        self,
        controller: Controller,
        parts: list[dict[str, tuple[DraftTree, DraftTree, int]]],
        took: Mapping[str, float],
    ) -> None:
        whole = [DraftTree() for _ in parts]
        for at, found in enumerate(parts):
            for _, offered, _ in found.values():
                whole[at] = merge(whole[at], offered)
        counts = controller.choose([sorted(tree.scores, reverse=True) for tree in whole], self.sequences)
        shares = {name: Share(name, 0, 0.0, 0, seconds) for name, seconds in took.items()}
        accepted = 0
        for tree, count, found in zip(whole, counts, parts, strict=True):
            chosen = tree.prune(count)
            for name, (stated, _, right) in found.items():
                nodes = common(chosen, stated)
                came = min(len(nodes), right)
                accepted += came
                before = shares.get(name, Share(name, 0, 0.0, 0))
                promised = before.promised + sum(stated.scores[node] for node in nodes.values())
                shares[name] = Share(
                    name, before.drafted + len(nodes), promised, before.accepted + came, before.seconds
                )
                self.drafted[name] = self.drafted.get(name, 0) + len(nodes)
        seconds = self.plain + self.row_s * sum(counts)
        controller.observe(Outcome(self.sequences, self.sequences, seconds, sum(counts), tuple(shares.values())))
        self.seconds += seconds + sum(took.values())
        self.tokens += self.sequences + accepted


def test_costs_lie_on_straight_lines_between_and_beyond_what_was_measured() -> None:
    known = StepCosts({1: 1.0, 2: 1.5, 4: 3.5, 8: 3.5})
    assert [known.of(rows) for rows in (1, 2, 3, 4, 6, 12)] == [1.0, 1.5, 2.5, 3.5, 3.5, 3.5]
    assert StepCosts({1: 1.0, 2: 2.0}).of(5) == 5.0
    # More rows never cost less, and what is measured otherwise was slowed down.
    assert [StepCosts({1: 2.0, 2: 1.0, 4: 3.0}).of(rows) for rows in (1, 2, 4)] == [1.0, 1.0, 3.0]


def test_costs_follow_what_steps_take_and_one_stalled_step_changes_them_a_little() -> None:
    known = costs(0.001)
    known.note(1, 100.0)
    assert known.of(1) < 1.15 * PLAIN_S
    for _ in range(200):
        known.note(1, 2 * PLAIN_S)
    assert known.of(1) == pytest.approx(2 * PLAIN_S, rel=0.01)
    assert known.of(8) > 1.2 * (PLAIN_S + 0.007)


@pytest.mark.parametrize("measured", [{1: 0.0, 2: 1.0}, {1: float("inf"), 2: 1.0}, {1: float("nan"), 2: 1.0}])
def test_costs_that_cannot_be_measured_are_not_used(measured: dict[int, float]) -> None:
    assert not is_sane(measured)
    assert is_sane({1: 0.01, 2: 0.011})


@pytest.mark.parametrize(
    ("row_s", "probabilities", "chosen"),
    [
        # Rows that cost nothing are all verified; such that cost as much as a step never are.
        (0.0, PROMISE, DEPTH),
        (PLAIN_S, PROMISE, 0),
        # One at a tenth of a step is worth its row where it is likelier than what a second gives otherwise.
        (0.001, (0.9, 0.8, 0.01), 2),
        (0.001, (0.05,), 0),
        (0.001, (), 0),
    ],
)
def test_depth_follows_cost_and_probability(row_s: float, probabilities: tuple[float, ...], chosen: int) -> None:
    assert Controller(costs(row_s)).choose([probabilities], 1) == [chosen]


def test_the_likeliest_tokens_of_all_sequences_come_first() -> None:
    counts = Controller(costs(0.004)).choose([(0.9, 0.85), (), (0.3, 0.2), (0.95,)], 4)
    assert counts == [2, 0, 0, 1]


def test_more_sequences_draft_less_where_rows_are_dear() -> None:
    few = sum(Controller(costs(0.003)).choose([PROMISE], 1))
    many = sum(Controller(costs(0.003)).choose([PROMISE] * 8, 8)) / 8
    assert (few, many) == (8, 2)
    # Costs that jump behind eight rows stop it at eight.
    steep = Controller(StepCosts({1: 0.01, 8: 0.0101, 9: 0.05, 16: 0.4}))
    assert sum(steep.choose([PROMISE] * 8, 8)) == 0
    assert sum(steep.choose([PROMISE], 1)) == 7


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("row_s", "sequences"), [(0.0, 1), (0.0001, 4), (0.0003, 1), (0.001, 1), (0.001, 4), (0.004, 1)]
)
def test_a_proposer_that_is_always_wrong_costs_two_percent_at_most(row_s: float, sequences: int) -> None:
    run = Simulation(row_s, {"suffix": 0.0}, sequences=sequences)
    run.run(run.controller(), 800)
    assert run.drafted["suffix"] > 0
    assert run.speedup >= 0.98


@pytest.mark.thorough
@pytest.mark.parametrize("truth", [0.1, 0.3, 0.5])
def test_a_proposer_that_promises_too_much_is_never_slower(truth: float) -> None:
    run = Simulation(0.001, {"suffix": truth})
    assert run.run(run.controller(), 1000).speedup >= 0.98


@pytest.mark.thorough
@pytest.mark.parametrize("pass_s", [0.0005, 0.002, 0.006])
def test_proposers_that_compute_and_are_always_wrong_cost_two_percent_at_most_all_together(pass_s: float) -> None:
    wrong = {SURE: 0.0, UNSURE: 0.0}
    run = Simulation(
        0.0005,
        {"suffix": 0.0, "prediction": 0.0},
        {"model": wrong, "self": wrong},
        {"model": pass_s, "self": pass_s},
    )
    run.run(run.controller(), 1000)
    assert run.drafted["self"] + run.drafted["model"] > 0
    assert run.speedup >= 0.98


def test_a_proposer_that_costs_more_than_it_can_give_is_never_asked() -> None:
    right = {SURE: 1.0, UNSURE: 1.0}
    run = Simulation(0.0005, {}, {"self": right}, {"self": 0.0095})
    assert run.run(run.controller(), 200).speedup == pytest.approx(1.0)
    assert run.drafted == {}


@pytest.mark.thorough
def test_a_cheap_model_that_is_right_speeds_up() -> None:
    run = Simulation(0.0005, {}, {"model": {SURE: 0.9, UNSURE: 0.9}}, {"model": 0.001})
    assert run.run(run.controller(), 300).speedup > 1.8


@pytest.mark.thorough
def test_need_skips_what_is_not_guessed_before_it_is_computed() -> None:
    """A proposer that is right only where the model is sure is asked there, and does better than always asking."""
    run = Simulation(0.0005, {}, {"self": {SURE: 0.95, UNSURE: 0.0}}, {"self": 0.004})
    controller = run.controller()
    run.run(controller, 800)
    assert controller.chance("self", SURE) > 0.8 > 0.5 > controller.chance("self", UNSURE)
    assert controller.goes_on("self", 0, [controller.chance("self", SURE)], Stage(1, 1))
    assert not controller.goes_on("self", 0, [controller.chance("self", UNSURE)], Stage(1, 1))
    assert run.speedup > 1.1


def test_what_others_propose_is_not_computed_again() -> None:
    controller = Simulation(0.0005, passes={"model": 0.002}).controller()
    assert controller.goes_on("model", 0, [0.9], Stage(1, 1))
    assert not controller.goes_on("model", 0, [0.9 - 0.85], Stage(1, 1))


@pytest.mark.thorough
def test_a_wrong_proposer_does_not_hold_back_a_right_one() -> None:
    run = Simulation(0.001, {"suffix": 0.0, "prediction": 0.95})
    alone = Simulation(0.001, {"prediction": 0.95})
    run.run(run.controller(), 500)
    alone.run(alone.controller(), 500)
    assert run.speedup > 0.95 * alone.speedup > 2.0


@pytest.mark.slow
@pytest.mark.parametrize(("row_s", "sequences"), [(0.0001, 1), (0.001, 1), (0.002, 1), (0.001, 2)])
def test_drafting_comes_back_when_promises_become_true(row_s: float, sequences: int) -> None:
    honest = Simulation(row_s, {"suffix": 0.95}, sequences=sequences)
    honest.run(honest.controller(), 300)
    turning = Simulation(row_s, {"suffix": 0.0}, sequences=sequences)
    controller = turning.controller()
    turning.run(controller, 2000)
    turning.looked_up = {"suffix": 0.95}
    turning.run(controller, 1100)
    again = Simulation(row_s, {"suffix": 0.95}, sequences=sequences).run(controller, 300)
    assert honest.speedup > 1.3
    assert again.speedup > 0.95 * honest.speedup


def test_drafts_that_are_dearer_than_measured_are_dropped() -> None:
    """Half of each draft is right, which would pay at the price that was measured, and not at what it really takes."""
    controller = Controller(costs(0.0005))
    counts: list[int] = []
    for _ in range(300):
        controller.begin()
        offered = controller.offer("suffix", promise(0))
        (count,) = controller.choose([offered.scores], 1)
        counts.append(count)
        right = count // 2
        share = Share("suffix", count, sum(PROMISE[:count]), right)
        controller.observe(Outcome(1, 1, PLAIN_S + 0.009 * count, count, (share,) if count else ()))
    assert counts[0] > 8
    seconds = sum(PLAIN_S + 0.009 * count for count in counts[100:])
    assert (200 + sum(count // 2 for count in counts[100:])) / seconds * PLAIN_S > 0.97


@pytest.mark.thorough
def test_a_trial_is_small() -> None:
    run = Simulation(0.001, {"suffix": 0.0})
    controller = run.controller()
    run.run(controller, 300)
    before = run.drafted["suffix"]
    run.run(controller, 400)
    assert TRIAL <= run.drafted["suffix"] - before <= 4 * TRIAL


def test_the_fixed_rule_takes_what_is_likely_whatever_comes_of_it() -> None:
    rule = FixedRule({"model": 3})
    assert rule.choose([(0.9, 0.5, 0.15, 0.14), (), (0.1,), (0.5,) * 9 + (0.49,)], 3) == [3, 0, 0, 9]
    rule.observe(Outcome(1, 1, 100.0, 16, (Share("suffix", 16, 15.0, 0),)))
    assert rule.choose([PROMISE], 1) == [13]
    assert [rule.goes_on("model", depth, [1.0], Stage(1, 1)) for depth in range(5)] == [True, True, True, False, False]
    assert not rule.goes_on("model", 0, [0.3], Stage(1, 1))
    assert not rule.goes_on("self", 0, [1.0], Stage(1, 1))
