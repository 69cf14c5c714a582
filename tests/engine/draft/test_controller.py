"""The controller: what is worth verifying by cost, and promises that do not hold, in simulated time."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from magnitude_engine.draft.controller import Controller, FixedDepth, Outcome, StepCosts, is_sane

DEPTH = 16
PLAIN_S = 0.010
PROMISE = tuple(0.95**depth for depth in range(1, DEPTH + 1))


def costs(row_s: float) -> StepCosts:
    """Returns costs of 10 ms for one row, and `row_s` for each further one."""
    return StepCosts({rows: PLAIN_S + row_s * (rows - 1) for rows in (1, 2, 4, 8)})


class Run(NamedTuple):
    """What simulated steps gave.

    Attributes:
        slowdown: seconds by those of as many steps without drafts.
        speedup: tokens per second by those of steps without drafts.
    """

    slowdown: float
    speedup: float
    drafted: int


def simulate(controller: Controller, steps: int, truth: float, row_s: float, sequences: int = 1) -> Run:
    """Runs steps whose proposer always promises 0.95 a token, and is right with probability `truth`."""
    draws = random.Random(7)
    plain = PLAIN_S + row_s * (sequences - 1)
    seconds, tokens, drafted = 0.0, 0, 0
    for _ in range(steps):
        counts = controller.choose([PROMISE] * sequences, sequences)
        accepted = 0
        for count in counts:
            right = 0
            while right < count and draws.random() < truth:
                right += 1
            accepted += right
        took = plain + row_s * sum(counts)
        promised = sum(sum(PROMISE[:count]) for count in counts)
        controller.observe(Outcome(sequences, sequences, took, sum(counts), promised, accepted))
        seconds += took
        tokens += sequences + accepted
        drafted += sum(counts)
    return Run(seconds / (steps * plain), tokens / seconds * plain / sequences, drafted)


def test_costs_lie_on_straight_lines_between_and_beyond_what_was_measured() -> None:
    known = StepCosts({1: 1.0, 2: 1.5, 4: 3.5, 8: 3.5})
    assert [known.of(rows) for rows in (1, 2, 3, 4, 6, 12)] == [1.0, 1.5, 2.5, 3.5, 3.5, 3.5]
    assert StepCosts({1: 1.0, 2: 2.0}).of(5) == 5.0


def test_more_rows_never_cost_less() -> None:
    known = StepCosts({1: 2.0, 2: 1.0, 4: 3.0})
    assert [known.of(rows) for rows in (1, 2, 4)] == [2.0, 2.0, 3.0]


def test_costs_follow_what_steps_take() -> None:
    known = costs(0.001)
    for _ in range(200):
        known.note(1, 2 * PLAIN_S)
    assert known.of(1) == pytest.approx(2 * PLAIN_S, rel=0.01)
    assert known.of(8) > 1.2 * (PLAIN_S + 0.007)


def test_one_stalled_step_changes_costs_a_little() -> None:
    known = costs(0.001)
    known.note(1, 100.0)
    assert known.of(1) < 1.15 * PLAIN_S


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


@pytest.mark.parametrize(
    ("row_s", "sequences"), [(0.0, 1), (0.0001, 4), (0.0003, 1), (0.001, 1), (0.001, 4), (0.004, 1)]
)
def test_a_proposer_that_is_always_wrong_costs_two_percent_at_most(row_s: float, sequences: int) -> None:
    run = simulate(Controller(costs(row_s)), 2000, 0.0, row_s, sequences)
    assert run.drafted > 0
    assert run.slowdown <= 1.02
    assert run.speedup >= 0.98


@pytest.mark.parametrize("truth", [0.1, 0.3, 0.5])
def test_a_proposer_that_promises_too_much_is_never_slower(truth: float) -> None:
    assert simulate(Controller(costs(0.001)), 2000, truth, 0.001).speedup >= 0.98


@pytest.mark.slow
@pytest.mark.parametrize(("row_s", "sequences"), [(0.0001, 1), (0.001, 1), (0.002, 1), (0.001, 2)])
def test_drafting_comes_back_when_promises_become_true(row_s: float, sequences: int) -> None:
    controller = Controller(costs(row_s))
    honest = simulate(Controller(costs(row_s)), 300, 0.95, row_s, sequences).speedup
    simulate(controller, 2000, 0.0, row_s, sequences)
    simulate(controller, 1100, 0.95, row_s, sequences)
    again = simulate(controller, 300, 0.95, row_s, sequences).speedup
    assert honest > 1.3
    assert again > 0.95 * honest


def test_fixed_depth_takes_what_is_likelier_than_not() -> None:
    rule = FixedDepth()
    assert rule.choose([(0.9, 0.5, 0.49), (), (0.2,)], 3) == [2, 0, 0]
    rule.observe(Outcome(1, 1, 100.0, 16, 15.0, 0))
    assert rule.choose([PROMISE], 1) == [13]


@pytest.mark.parametrize("measured", [{1: 0.0, 2: 1.0}, {1: float("inf"), 2: 1.0}, {1: float("nan"), 2: 1.0}])
def test_costs_that_cannot_be_measured_are_not_used(measured: dict[int, float]) -> None:
    assert not is_sane(measured)
    assert is_sane({1: 0.01, 2: 0.011})
