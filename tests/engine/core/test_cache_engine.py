"""What the engine does with the tiers between steps: saves while it is idle, and counts what it got from where."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from magnitude_engine import api
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.warm import WarmAsk
from testkit.engine import alone, generate, run, submit
from testkit.tiered import PATIENCE_S, counter, disk_stats, evict, save, tiered

pytestmark = pytest.mark.thorough

LONG = "a history of many words that fills page after page of the cache, and goes on for a while after that " * 2


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.01)


def test_an_idle_engine_saves_everything_also_where_the_queue_is_short(model: LoadedModel, tmp_path: Path) -> None:
    engine = tiered(model, tmp_path, prefill_chunk=4096)
    disk = engine._stepper.cache.tiers._disk
    assert disk is not None
    disk._shelf.options = dataclasses.replace(disk._shelf.options, queue_bytes=3 * disk._shelf.block_bytes)
    engine.start()
    (answer,) = submit(engine, generate(LONG, max_tokens=1))
    wait_until(lambda: answer.done)
    wait_until(lambda: disk_stats(engine).blocks == answer.usage.prompt_tokens // 16)
    engine.close()


def test_tokens_of_a_resumed_answer_are_not_counted_as_prompt(model: LoadedModel, tmp_path: Path) -> None:
    """The prompt is one page; the rest that comes from disk is what had been generated."""
    engine = tiered(model, tmp_path)
    request = generate("sixteen letters and more", max_tokens=80)
    (before,) = run(engine, request)
    save(engine)
    evict(engine)
    known = api.Resume(choice=0, ids=tuple(before.ids()[:60]))
    (after,) = run(engine, generate("sixteen letters and more", max_tokens=80, resume=(known,)))
    engine.close()
    assert after.ids() == alone(model, request).ids()[60:]
    usage = after.usage
    assert usage.cached_tokens == usage.prompt_tokens
    assert usage.cached_disk_tokens == usage.prompt_tokens
    report = engine._stepper.report()
    assert [tier.tokens_served for tier in report.tiers if tier.name == "device"] == [0]


def test_closing_twice_and_opening_at_once(model: LoadedModel, tmp_path: Path) -> None:
    """A worker's successor may come while the worker still writes."""
    before = tiered(model, tmp_path)
    run(before, generate(LONG, session="s"))
    before.start()
    before.close()
    after = tiered(model, tmp_path)
    (answer,) = run(after, generate(LONG, session="s"))
    after.close()
    assert answer.usage.cached_disk_tokens >= answer.usage.prompt_tokens // 16 * 16 - 16
    assert answer.ids() == alone(model, generate(LONG)).ids()


@pytest.mark.slow
def test_prefill_ahead_gives_its_pages_up_before_anybody_loses_a_seat(model: LoadedModel) -> None:
    engine = tiered(model, pages=12)
    ahead = WarmAsk(SessionKey("t", "expected", "main"), tuple(range(40, 60)), reserve=60)
    engine._stepper.ahead.queue.ask(ahead, time.monotonic())
    while engine.step():
        pass
    assert engine._stepper.manager.available == 7
    requests = [generate(text, max_tokens=70) for text in ("one", "two")]
    answers = run(engine, *requests)
    assert [answer.ids() for answer in answers] == [alone(model, request).ids() for request in requests]
    assert counter(engine, "preemptions") == 0
