"""Prefill ahead of requests: what is settled of the next prompt is computed while nothing else runs."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_engine import telemetry as names
from magnitude_engine.engine import Engine
from magnitude_engine.errors import EngineError
from magnitude_engine.kv.radix import common_prefix
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.request import Sequence
from magnitude_engine.warm import ENOUGH_TOKENS, TRIAL, Usefulness, WarmAsk
from testkit.clock import ManualClock
from testkit.engine import Recorder, alone, drain, engine_config, generate, run, submit

pytestmark = pytest.mark.thorough

PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL = api.Tool(name="list_files", description="Lists files.", parameters=PARAMETERS)
CALL = '<tool_call>\n{"name": "list_files", "arguments": {"path": "src"}}\n</tool_call>'
ASKED = (
    api.Message(role="system", content="You are a careful assistant that answers in few words."),
    api.Message(role="user", content="Which files are in the folder src of this project?"),
)
OUTPUT = "main.py\nwarm.py\npredict.py\nREADME.md and some more that are not listed here\n" * 4


def new_engine(model: LoadedModel, pages: int = 96, **settings: Any) -> Engine:
    return Engine(model, engine_config(**settings), pages=pages)


def chat(*more: api.Message) -> api.ChatInput:
    return api.ChatInput(messages=(*ASKED, *more), tools=(TOOL,))


def ask(model: LoadedModel, **fields: Any) -> api.Generate:
    """Returns a request whose answer is `CALL`: all but the end of it is known, as after a restart."""
    ids = tuple(model.tokenizer.encode(CALL))
    known = api.Resume(choice=0, ids=ids)
    return generate(chat(), **{"session": "s", "max_tokens": len(ids) + 3, "resume": (known,), **fields})


def settle(engine: Engine) -> None:
    """Waits for what is being rendered, then steps until nothing is left to do."""
    engine._predictor.wait()
    drain(engine)


def counter(engine: Engine, metric: names.Metric) -> float:
    return engine.status().counters[metric.name]


def first_step(engine: Engine, model: LoadedModel, **fields: Any) -> api.Message:
    """Runs the step that calls the tool; returns the answer as the client repeats it."""
    kept: list[Sequence] = []
    answered = engine._stepper._hooks.answered
    hooks = dataclasses.replace(engine._stepper._hooks, answered=lambda s: (kept.append(s), answered(s)))
    engine._stepper._hooks = hooks
    recorder = Recorder()
    engine.submit(ask(model, **fields), recorder)
    while not recorder.done:
        engine.step()
    (sequence,) = kept
    assert [call.name for call in sequence.answer.tool_calls] == ["list_files"]
    return sequence.answer


def next_step(answer: api.Message, output: str = OUTPUT, **fields: Any) -> api.Generate:
    result = api.Message(role="tool", content=output, tool_call_id=answer.tool_calls[0].id)
    return generate(chat(answer, result), **{"session": "s", **fields})


def output_event(answer: api.Message, text: str, kind: Any = "output") -> api.ToolEvent:
    return api.ToolEvent(tenant="t", session="s", kind=kind, call=answer.tool_calls[0].id, tool="list_files", text=text)


def test_after_a_tool_call_all_up_to_its_result_is_computed(model: LoadedModel) -> None:
    engine = new_engine(model)
    answer = first_step(engine, model)
    settle(engine)
    computed = counter(engine, names.WARM_ROWS)
    assert computed > 0
    request = next_step(answer)
    (step,) = run(engine, request)
    before_result = common_prefix(*(model.prompts.encode(next_step(answer, text).input) for text in ("a", "Z")))
    # One or two ids at the seam may depend on what the result begins with.
    assert step.usage.cached_tokens >= before_result - 2
    assert step.ids() == alone(model, request).ids()
    settle(engine)
    assert counter(engine, names.WARM_USED) >= 0.8 * computed


def test_a_tools_output_is_computed_while_it_comes(model: LoadedModel) -> None:
    engine = new_engine(model)
    answer = first_step(engine, model)
    settle(engine)
    done = counter(engine, names.WARM_ROWS)
    for at in range(0, len(OUTPUT), 70):
        engine.tool_event(output_event(answer, OUTPUT[at : at + 70]))
        settle(engine)
        assert counter(engine, names.WARM_ROWS) > done
        done = counter(engine, names.WARM_ROWS)
    engine.tool_event(output_event(answer, "", "finished"))
    settle(engine)
    request = next_step(answer)
    (step,) = run(engine, request)
    assert step.usage.cached_tokens >= step.usage.prompt_tokens - 16
    assert step.ids() == alone(model, request).ids()


def test_a_wrong_guess_changes_nothing(model: LoadedModel) -> None:
    engine = new_engine(model)
    answer = first_step(engine, model)
    engine.tool_event(output_event(answer, OUTPUT, "finished"))
    settle(engine)
    request = next_step(answer, "Something else entirely was printed. " * 5)
    (step,) = run(engine, request)
    assert step.ids() == alone(model, request).ids()
    engine.check_integrity()


def test_live_work_goes_first_and_takes_the_pages(model: LoadedModel) -> None:
    engine = new_engine(model, pages=44)
    answer = first_step(engine, model)
    engine.tool_event(output_event(answer, OUTPUT, "finished"))
    engine._predictor.wait()
    engine.step()
    before = counter(engine, names.WARM_ROWS)
    assert before > 0
    stranger = generate("The quick brown fox jumps over the lazy dog, again and again. " * 9, max_tokens=6)
    (recorder,) = submit(engine, stranger)
    while not recorder.done:
        engine.step()
        assert counter(engine, names.WARM_ROWS) == before
    assert recorder.ids() == alone(model, stranger).ids()
    drain(engine)
    assert counter(engine, names.WARM_ROWS) > before


def test_pages_for_the_expected_result_are_reserved(model: LoadedModel) -> None:
    engine = new_engine(model)
    retention = engine._stepper.manager.retention
    for _ in range(4):
        retention.observe_output("t", "list_files", 160)
    first_step(engine, model)
    engine._predictor.wait()
    drain(engine)
    (task,) = engine._stepper.ahead.queue._tasks.values()
    assert task.lease is not None
    assert len(task.lease.pages) * 16 >= task.lease.length + 160


@pytest.mark.parametrize("fields", [{"preferences": api.Preferences(predictive_caching=False)}, {}])
def test_nothing_is_computed_ahead_where_it_is_not_wanted(model: LoadedModel, fields: dict[str, Any]) -> None:
    engine = new_engine(model, optimization_level="balanced" if fields else "off")
    first_step(engine, model, **fields)
    settle(engine)
    assert counter(engine, names.WARM_ROWS) == 0


def test_registered_tools_are_warm_before_the_first_request(model: LoadedModel) -> None:
    engine = new_engine(model)
    told: list[bool] = []
    engine.register(api.Register(tenant="t", tools=(TOOL,), system=ASKED[0].content), lambda: told.append(True))
    settle(engine)
    assert told == [True]
    (step,) = run(engine, generate(chat()))
    assert step.usage.cached_tokens > step.usage.prompt_tokens - len(ASKED[1].content) - 40
    (other,) = run(engine, generate(chat(), tenant="u"))
    assert other.usage.cached_tokens == 0


def test_a_session_that_ended_is_forgotten(model: LoadedModel) -> None:
    engine = new_engine(model)
    answer = first_step(engine, model)
    engine.end_session(api.EndSession(tenant="t", session="s"))
    settle(engine)
    engine.tool_event(output_event(answer, OUTPUT))
    settle(engine)
    assert counter(engine, names.WARM_ROWS) == 0
    assert len(engine._stepper.ahead.queue) == 0


def test_a_failed_step_drops_what_was_computed_ahead(model: LoadedModel) -> None:
    engine = new_engine(model)
    first_step(engine, model)
    settle(engine)
    engine._stepper.fail_running(EngineError("broken"))
    engine.check_integrity()
    assert engine.status().pages_free == 96
    assert len(engine._stepper.ahead.queue) == 0


def test_what_does_not_pay_is_tried_now_and_then() -> None:
    useful = Usefulness()
    assert all(useful.worth("t") for _ in range(20))
    useful.note("t", ENOUGH_TOKENS, 10)
    assert sum(useful.worth("t") for _ in range(4 * TRIAL)) == 4
    assert useful.worth("u")
    for _ in range(8):
        useful.note("t", ENOUGH_TOKENS, ENOUGH_TOKENS)
    assert useful.worth("t")


def test_an_ask_that_does_not_go_on_replaces_the_one_before(model: LoadedModel) -> None:
    engine = new_engine(model)
    warm = engine._stepper.ahead.queue
    owner = SessionKey("t", "s", "main")
    warm.ask(WarmAsk(owner, tuple(range(3, 90))), engine._clock())
    engine.step()
    warm.ask(WarmAsk(owner, tuple(range(100, 150))), engine._clock())
    drain(engine)
    (task,) = warm._tasks.values()
    assert task.lease is not None
    assert task.lease.length == 50
    assert counter(engine, names.WARM_ROWS) == 64 + 50


@pytest.mark.slow
def test_what_a_session_needs_from_disk_is_read_before_its_tool_ends(model: LoadedModel, tmp_path: Path) -> None:
    clock = ManualClock()
    settings = engine_config(kv_disk_mb=8, kv_dir=str(tmp_path))
    engine = Engine(model, settings, clock=clock, pages=64)
    for _ in range(3):
        first_step(engine, model)
        clock.advance(20.0)
    answer = first_step(engine, model)
    settle(engine)
    while engine.tidy():
        pass
    stepper = engine._stepper
    assert stepper.cache.tiers.flush(10.0)
    stepper.ahead.queue.yield_pages()
    stepper.manager.evict(64)
    stranger = generate("Somebody else writes a long answer meanwhile.", max_tokens=200)
    (recorder,) = submit(engine, stranger)
    engine.step()
    assert not stepper.ahead.queue.reading
    clock.advance(19.0)
    engine.step()
    (task,) = stepper.ahead.queue._tasks.values()
    assert task.fetch is not None
    request = next_step(answer)
    (step,) = run(engine, request)
    assert recorder.done
    assert step.usage.cached_disk_tokens >= 512
    assert step.ids() == alone(model, request).ids()
    engine.close()


def test_whoever_waits_for_a_registration_is_told_however_it_ends(model: LoadedModel) -> None:
    engine = new_engine(model)
    told: list[str] = []
    for name in ("first", "second"):
        engine.register(api.Register(tenant="t", tools=(TOOL,)), functools.partial(told.append, name))
        engine._predictor.wait()
        engine.step()
    assert told == ["first"]
    engine.close()
    assert told == ["first", "second"]


def test_pages_held_for_what_comes_next_count_as_free(model: LoadedModel) -> None:
    engine = new_engine(model)
    first_step(engine, model)
    first_step(engine, model, session="another")
    settle(engine)
    assert len(engine._stepper.ahead.queue.leases()) == 2
    assert engine._stepper.manager.available < 96
    assert engine.status().pages_free == 96
