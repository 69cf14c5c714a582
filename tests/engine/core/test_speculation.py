"""Drafts change when tokens come, never which: every answer is that of an engine without them, event by event.

The drafts are trees around the answer, which fork at random places (`testkit/drafting.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from magnitude_engine import api
from magnitude_engine.config import EngineConfig, Profile
from magnitude_engine.engine import Engine
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.model import attention
from magnitude_engine.model.loader import LoadedModel, load_model
from testkit.drafting import Oracle, drafted_by
from testkit.engine import Recorder, alone, engine_config, generate, run, submit
from testkit.model import smollm2_path
from testkit.tiered import counter
from testkit.tiny import tiny_model

pytestmark = pytest.mark.thorough

PAGES = 96
PAST_THE_END = 9
GREEDY = api.Sampling(temperature=0.0)
SEEDED = api.Sampling(temperature=1.1, top_p=0.95, seed=11)
ALWAYS_RIGHT, OFTEN_RIGHT, ALWAYS_WRONG = 0.0, 0.25, 1.0
EOS = 0

CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"sampling": SEEDED},
    "penalties": {"sampling": api.Sampling(temperature=0.0, frequency_penalty=1.3, presence_penalty=0.7)},
    "seeded penalties": {"sampling": msgspec.structs.replace(SEEDED, frequency_penalty=1.1, presence_penalty=-0.5)},
    "bias": {"sampling": msgspec.structs.replace(SEEDED, logit_bias={70: 4.0, 71: -100.0})},
    "truncated": {"sampling": api.Sampling(temperature=1.4, top_k=5, min_p=0.05, seed=3)},
    "logprobs": {"sampling": SEEDED, "logprobs": 3},
    "greedy logprobs": {"logprobs": 0},
    "several": {"sampling": SEEDED, "n": 3},
    "several with logprobs": {"sampling": SEEDED, "n": 3, "logprobs": 2},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "many tokens": {"sampling": SEEDED, "max_tokens": 33},
    "echo": {"echo": True, "n": 2, "sampling": SEEDED},
    "grammar": {"sampling": SEEDED, "format": api.RegexFormat(pattern="([a-h]{3}, so [n-z]){9}"), "max_tokens": 24},
}
LONG_CASES = [name for name in CASES if name not in ("one token", "two tokens")]


def request(**fields: Any) -> api.Generate:
    return generate("a prompt of some words, a prompt of some words", **{"max_tokens": 12, **fields})


def small(model: LoadedModel, pages: int = PAGES, **settings: Any) -> Engine:
    return Engine(model, engine_config(**settings), pages=pages)


def oracle(model: LoadedModel, requests: list[api.Generate], errors: float) -> Oracle:
    """Returns drafts that go on behind where the answers end."""
    answers = {}
    for each in requests:
        reach = (each.max_tokens or 0) + PAST_THE_END
        endless = msgspec.structs.replace(each, max_tokens=reach, stop=(), ignore_eos=True, logprobs=None, resume=())
        whole = alone(model, endless)
        for choice in range(each.n):
            answers[model.prompts.encode(each.input), choice] = whole.ids(choice)
    return Oracle(answers, errors)


def drafting(model: LoadedModel, requests: list[api.Generate], errors: float, engine: Engine) -> Engine:
    return drafted_by(oracle(model, requests, errors), engine)


def told(answer: Recorder, choice: int) -> list[tuple[object, ...]]:
    """Returns what a client was told of a choice, event by event."""
    deltas = [d for d in answer.of(api.Delta) if d.choice == choice]
    end = answer.finish(choice)
    return [*((d.ids, d.text, d.logprobs, d.tool_calls) for d in deltas), (end.reason, end.matched_stop)]


def equal(model: LoadedModel, asked: api.Generate, answer: Recorder) -> None:
    """Checks each choice against an engine without drafts: the same deltas, the same end."""
    expected = alone(model, asked)
    assert answer.failed is None
    for choice in range(asked.n):
        assert told(answer, choice) == told(expected, choice)
    assert answer.usage.completion_tokens == expected.usage.completion_tokens


def counts_fit(answers: list[Recorder], errors: float) -> None:
    """Checks that drafts were there, and were as right as they were meant to be."""
    drafted = sum(a.usage.drafted_tokens for a in answers)
    accepted = sum(a.usage.accepted_tokens for a in answers)
    assert drafted > 0
    if errors == ALWAYS_WRONG:
        assert accepted == 0
    else:
        assert 0 < accepted <= drafted
        assert (accepted < drafted) or errors == ALWAYS_RIGHT


@pytest.mark.parametrize("errors", [ALWAYS_RIGHT, OFTEN_RIGHT, ALWAYS_WRONG])
@pytest.mark.parametrize("case", CASES)
def test_alone(model: LoadedModel, case: str, errors: float) -> None:
    asked = request(**CASES[case])
    engine = drafting(model, [asked], errors, small(model))
    (answer,) = run(engine, asked)
    equal(model, asked, answer)
    assert engine.status().pages_free == PAGES
    if case in LONG_CASES:
        counts_fit([answer], errors)
        assert (engine._stepper.steps < asked.max_tokens) or errors != ALWAYS_RIGHT


def every_node_sees_all_before_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "above", lambda parents: np.tri(len(parents), dtype=np.bool_))


def a_node_sees_itself_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attention, "above", lambda parents: np.eye(len(parents), dtype=np.bool_))


def paths_stay_where_they_were_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PagedCache, "move", lambda cache, moves: None)


@pytest.mark.parametrize(
    "fault", [every_node_sees_all_before_it, a_node_sees_itself_alone, paths_stay_where_they_were_computed]
)
def test_a_planted_fault_is_caught(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    asked = [generate(f"{i} is computed wrongly", sampling=SEEDED, max_tokens=24) for i in range(3)]
    engine = drafting(model, asked, ALWAYS_RIGHT, small(model))
    fault(monkeypatch)
    answers = run(engine, *asked)
    assert any(told(answer, 0) != told(alone(model, each), 0) for each, answer in zip(asked, answers, strict=True))


@pytest.mark.parametrize("errors", [ALWAYS_RIGHT, OFTEN_RIGHT])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_stop_string_inside_a_draft(model: LoadedModel, sampling: api.Sampling, errors: float) -> None:
    text = alone(model, request(sampling=sampling)).text()
    for stop in (text[5:7], text[-4:-1], text[2]):
        asked = request(sampling=sampling, stop=(stop,))
        engine = drafting(model, [asked], errors, small(model))
        (answer,) = run(engine, asked)
        equal(model, asked, answer)
        assert answer.finish().reason == "stop"
        assert engine.status().pages_free == PAGES


@pytest.mark.parametrize("errors", [ALWAYS_RIGHT, OFTEN_RIGHT])
def test_the_end_of_text_inside_a_draft(model: LoadedModel, errors: float) -> None:
    ends: set[int] = set()
    for seed in range(5):
        sampling = api.Sampling(temperature=1.0, seed=seed, logit_bias={EOS: 6.0})
        asked = request(sampling=sampling, ignore_eos=False, logprobs=1)
        engine = drafting(model, [asked], errors, small(model))
        (answer,) = run(engine, asked)
        equal(model, asked, answer)
        if answer.finish().reason == "stop":
            ends.add(answer.usage.completion_tokens)
    assert len(ends) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("errors", "longest"),
    [
        (OFTEN_RIGHT, 8),
        (OFTEN_RIGHT, 20),
        (ALWAYS_RIGHT, 20),
        (ALWAYS_WRONG, 20),
    ],
)
def test_batched_with_other_kinds(model: LoadedModel, errors: float, longest: int) -> None:
    kinds = [CASES[name] for name in LONG_CASES]
    requests = [generate(f"{i} of many", **{**kind, "max_tokens": longest - i % 5}) for i, kind in enumerate(kinds)]
    engine = drafting(model, requests, errors, small(model, pages=192))
    answers = run(engine, *requests)
    for asked, answer in zip(requests, answers, strict=True):
        equal(model, asked, answer)
    counts_fit(answers, errors)
    assert engine.status().pages_free == 192


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_forked_drafts_over_packed_weights(one_thread: None, sampling: api.Sampling) -> None:
    """Behind more than one block of slots, where nodes see some of the session's and some of their own."""
    model = tiny_model(profile="packed")
    asked = generate("word after word " * 10, sampling=sampling, logprobs=1, max_tokens=30)
    engine = drafting(model, [asked], OFTEN_RIGHT, small(model))
    (answer,) = run(engine, asked)
    equal(model, asked, answer)
    counts_fit([answer], OFTEN_RIGHT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("profile", ["reference", "packed"])
def test_a_real_model(profile: Profile) -> None:
    """Nothing changes, and drafts that are right are nearly all accepted."""
    model = load_model(EngineConfig(model_path=str(smollm2_path()), profile=profile, kv_memory_mb=64))
    texts = {"The capital of France is": GREEDY, "def add(a, b):": SEEDED}
    requests = [generate(text, logprobs=1, max_tokens=18, sampling=sampling) for text, sampling in texts.items()]
    engine = drafting(model, requests, ALWAYS_RIGHT, small(model))
    answers = run(engine, *requests)
    for asked, answer in zip(requests, answers, strict=True):
        equal(model, asked, answer)
    emitted = sum(a.usage.completion_tokens for a in answers)
    assert sum(a.usage.accepted_tokens for a in answers) > 0.6 * emitted
    assert engine.status().pages_free == PAGES


@pytest.mark.slow
@pytest.mark.parametrize("errors", [OFTEN_RIGHT, ALWAYS_WRONG])
def test_preempted_where_pages_are_short(model: LoadedModel, errors: float) -> None:
    requests = [generate(f"{i} is short of pages", sampling=SEEDED, max_tokens=38) for i in range(5)]
    engine = drafting(model, requests, errors, small(model, pages=9))
    answers = run(engine, *requests)
    for asked, answer in zip(requests, answers, strict=True):
        equal(model, asked, answer)
    counts_fit(answers, errors)
    assert counter(engine, "preemptions") > 0
    assert engine.status().pages_free == 9


@pytest.mark.parametrize("logprobs", [None, 1])
def test_resumed_at_every_cut(model: LoadedModel, logprobs: int | None) -> None:
    fields: dict[str, Any] = {"sampling": SEEDED, "logprobs": logprobs}
    whole = alone(model, request(**fields))
    deltas = whole.of(api.Delta)
    resumed: list[api.Generate] = []
    for cut in range(len(deltas) + 1):
        ids = tuple(i for d in deltas[:cut] for i in d.ids)
        known = api.Resume(choice=0, ids=ids, chars=sum(len(d.text) for d in deltas[:cut]))
        resumed.append(request(**fields, resume=(known,)))
    engine = drafting(model, resumed, OFTEN_RIGHT, small(model))
    answers = run(engine, *resumed)
    for cut, answer in enumerate(answers):
        assert answer.ids() == whole.ids()[cut:]
        assert "".join(d.text for d in deltas[:cut]) + answer.text() == whole.text()
        entries = [entry for d in [*deltas[:cut], *answer.of(api.Delta)] for entry in d.logprobs]
        assert entries == [entry for d in deltas for entry in d.logprobs]
    counts_fit(answers, OFTEN_RIGHT)


@pytest.mark.parametrize("errors", [ALWAYS_RIGHT, OFTEN_RIGHT, ALWAYS_WRONG])
def test_the_sessions_next_step_starts_from_what_was_drafted(model: LoadedModel, errors: float) -> None:
    first = request(sampling=SEEDED, max_tokens=36, session="s")
    engine = drafting(model, [first], errors, small(model))
    (before,) = run(engine, first)
    history = (*model.prompts.encode(first.input), *before.ids())
    second = generate((*history, *model.tokenizer.encode("and then?")), session="s", step=1)
    drafted_by(oracle(model, [second], errors), engine)
    (answer,) = run(engine, second)
    assert answer.started.cached_tokens == len(history) - 1
    equal(model, second, answer)


def test_cancelled_between_drafts(model: LoadedModel) -> None:
    doomed, other = (request(sampling=SEEDED, max_tokens=30, session=name) for name in "ab")
    engine = drafting(model, [doomed, other], OFTEN_RIGHT, small(model))
    recorders = submit(engine, doomed, other)
    engine.step()
    engine.step()
    engine.cancel(doomed.request, doomed.epoch)
    while engine.step():
        engine.check_integrity()
    assert not recorders[0].done
    equal(model, other, recorders[1])
    assert engine.status().pages_free == PAGES


@pytest.mark.parametrize("case", LONG_CASES)
def test_what_a_tenant_was_told_before_is_drafted(model: LoadedModel, case: str) -> None:
    """The proposers as shipped: another session's run says the same, so that it is found."""
    engine = small(model)
    first, second = request(**CASES[case]), request(**CASES[case])
    run(engine, first)
    before = engine._stepper.steps
    (answer,) = run(engine, second)
    equal(model, second, answer)
    assert answer.usage.accepted_tokens > 0
    assert engine._stepper.steps - before < second.max_tokens


def test_nothing_of_one_tenants_runs_is_drafted_for_another(model: LoadedModel) -> None:
    engine = small(model)
    run(engine, request(tenant="one"))
    (answer,) = run(engine, request(tenant="two"))
    (fresh,) = run(small(model), request(tenant="two"))
    assert answer.usage.drafted_tokens == fresh.usage.drafted_tokens


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"speculation": False}, {}),
        ({"optimization_level": "off"}, {}),
        ({}, {"preferences": api.Preferences(speculation=False)}),
    ],
    ids=["setting", "level", "preference"],
)
def test_switched_off(model: LoadedModel, settings: dict[str, Any], fields: dict[str, Any]) -> None:
    engine = small(model, **settings)
    for _ in range(2):
        asked = request(**fields)
        (answer,) = run(engine, asked)
        equal(model, asked, answer)
        assert (answer.usage.drafted_tokens, answer.usage.accepted_tokens) == (0, 0)
    assert (counter(engine, "drafted_tokens"), counter(engine, "accepted_tokens")) == (0, 0)


def test_the_counters_say_what_the_usages_say(model: LoadedModel) -> None:
    requests = [generate(f"{i} counts", sampling=SEEDED) for i in range(4)]
    engine = drafting(model, requests, OFTEN_RIGHT, small(model))
    answers = run(engine, *requests)
    assert counter(engine, "drafted_tokens") == sum(a.usage.drafted_tokens for a in answers)
    assert counter(engine, "accepted_tokens") == sum(a.usage.accepted_tokens for a in answers)
