"""What a client expects of an answer is drafted and accounted for, and decides no token of it."""

from __future__ import annotations

from typing import Any

import pytest

from magnitude_engine import api
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import alone, engine_config, generate, run

pytestmark = pytest.mark.thorough

LENGTH = 40
# Ids of printable characters, so that text gives the tokens back that it was made of.
PRINTABLE = {token: -100.0 for token in range(274) if not 35 <= token < 97}
GREEDY = api.Sampling(temperature=0.0, logit_bias=PRINTABLE)
SEEDED = api.Sampling(temperature=1.0, seed=5, logit_bias=PRINTABLE)


def request(**fields: Any) -> api.Generate:
    return generate("rewrite this file", **{"max_tokens": LENGTH, "sampling": GREEDY, **fields})


def answered(model: LoadedModel, asked: api.Generate) -> tuple[api.Usage, int]:
    """Returns the usage, and how many steps the answer took."""
    engine = Engine(model, engine_config(), pages=64)
    (answer,) = run(engine, asked)
    expected = alone(model, asked)
    assert [answer.text(choice) for choice in range(asked.n)] == [expected.text(choice) for choice in range(asked.n)]
    return answer.usage, engine._stepper.steps


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_an_answer_that_was_predicted_takes_few_steps(model: LoadedModel, sampling: api.Sampling) -> None:
    text = alone(model, request(sampling=sampling)).text()
    usage, steps = answered(model, request(sampling=sampling, prediction=text))
    assert steps < LENGTH / 4
    assert usage.accepted_prediction_tokens is not None
    assert usage.accepted_prediction_tokens > 0.7 * LENGTH
    assert usage.rejected_prediction_tokens == 0


def test_a_prediction_with_a_change_in_it_is_followed_on_both_sides(model: LoadedModel) -> None:
    text = alone(model, request(sampling=SEEDED)).text()
    changed = text[:15] + "?!" + text[18:]
    usage, steps = answered(model, request(sampling=SEEDED, prediction=changed))
    assert steps < LENGTH / 2
    assert usage.accepted_prediction_tokens is not None
    assert usage.rejected_prediction_tokens is not None
    assert usage.accepted_prediction_tokens > LENGTH / 2
    assert usage.rejected_prediction_tokens > 0


@pytest.mark.parametrize("prediction", ["", "nothing of this will be said, whatever happens", "<|im_end|>"])
def test_a_wrong_prediction_is_counted_as_rejected(model: LoadedModel, prediction: str) -> None:
    usage, _ = answered(model, request(prediction=prediction))
    assert usage.accepted_prediction_tokens == 0
    assert usage.rejected_prediction_tokens is not None
    assert (usage.rejected_prediction_tokens > 0) == (prediction != "")


def test_without_a_prediction_nothing_is_said_of_one(model: LoadedModel) -> None:
    usage, _ = answered(model, request())
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (None, None)


def test_usage_says_who_drafted_and_what_was_decided(model: LoadedModel) -> None:
    text = alone(model, request(sampling=SEEDED)).text()
    usage, steps = answered(model, request(sampling=SEEDED, prediction=text, n=2))
    by_name = {use.name: use for use in usage.speculation}
    assert by_name["prediction"].accepted == usage.accepted_prediction_tokens
    assert sum(use.drafted for use in usage.speculation) >= usage.drafted_tokens
    assert usage.draft_decisions["drafted"] > 0
    assert sum(usage.draft_decisions.values()) <= 2 * steps


def test_predictions_are_for_all_choices_and_resumed_ones(model: LoadedModel) -> None:
    whole = alone(model, request(sampling=SEEDED))
    known = api.Resume(choice=0, ids=tuple(whole.ids()[:7]), chars=7)
    engine = Engine(model, engine_config(), pages=64)
    (answer,) = run(engine, request(sampling=SEEDED, prediction=whole.text(), resume=(known,)))
    assert answer.ids() == whole.ids()[7:]
    assert answer.usage.accepted_prediction_tokens is not None
    assert answer.usage.accepted_prediction_tokens > 0.6 * (LENGTH - 7)
