"""Costs of steps and drafts are measured with the engine's clock, and what is drafted follows from them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, repeat

import pytest

from magnitude_engine import api
from magnitude_engine.calibrate import DRAFT_ROWS, ROUNDS, ROWS, rule
from magnitude_engine.draft.controller import Controller, FixedRule
from magnitude_engine.drafters.chain import Pass
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import engine_config, generate, run
from testkit.tiny import tiny_model


@pytest.fixture(scope="module")
def packed(one_thread: None) -> LoadedModel:
    return tiny_model(profile="packed")


def engine_of(model: LoadedModel) -> Engine:
    return Engine(model, engine_config(profile=model.runner.profile), pages=48)


def clock_of(seconds: Callable[[int], float], draft_share: float) -> Callable[[], float]:
    """Returns a clock by which the best of the steps of so many rows takes `seconds(rows)`, and others longer.

    The model's own drafts take a share of that.
    """
    best = [[seconds(rows) for rows in ROWS], [draft_share * seconds(rows) for rows in DRAFT_ROWS]]
    taken = [each * (1 + 3 * round_) for sizes in best for round_ in range(ROUNDS) for each in sizes]
    times = chain.from_iterable((0.0, took) for took in taken)
    return lambda: next(times)


def measured(model: LoadedModel, clock: Callable[[], float]) -> Controller | FixedRule:
    stepper = engine_of(model)._stepper
    own = Pass(stepper._runner, stepper._tensors, stepper.manager.total)
    return rule(own, stepper.speculation.drafters, clock)


@pytest.mark.thorough
def test_the_fastest_pass_of_each_number_of_rows_counts(packed: LoadedModel) -> None:
    controller = measured(packed, clock_of(lambda rows: 0.01 + 0.002 * rows, 0.5))
    assert isinstance(controller, Controller)
    expected = [0.01 + 0.002 * rows for rows in (*ROWS, 3, 16)]
    assert [controller.costs.of(rows) for rows in (*ROWS, 3, 16)] == pytest.approx(expected)
    assert [controller.passes["self"].of(rows) for rows in DRAFT_ROWS] == pytest.approx([0.006, 0.009])


@pytest.mark.thorough
def test_a_clock_that_stands_still_leaves_the_fixed_rule(packed: LoadedModel) -> None:
    assert isinstance(measured(packed, repeat(1.0).__next__), FixedRule)


def test_reference_measures_nothing(model: LoadedModel) -> None:
    def never() -> float:
        raise AssertionError

    assert isinstance(measured(model, never), FixedRule)


@pytest.mark.thorough
def test_measuring_leaves_no_trace(packed: LoadedModel) -> None:
    asked = generate("the same words before and after", sampling=api.Sampling(temperature=1.0, seed=4))
    engine, fresh = engine_of(packed), engine_of(packed)
    engine._stepper.calibrate()
    assert isinstance(engine._stepper.speculation.rule, Controller)
    engine.check_integrity()
    assert engine.status().pages_free == 48
    assert run(engine, asked)[0].ids() == run(fresh, asked)[0].ids()
