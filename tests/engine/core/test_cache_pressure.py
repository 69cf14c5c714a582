"""Sixty-four pages and two hundred sessions: every request ends, with the tokens that it gets where there is room."""

from __future__ import annotations

import pytest

from magnitude_engine import api
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import engine_config, generate, run, submit
from testkit.tiered import counter, tier_use, tiered

SEEDED = api.Sampling(temperature=1.1, top_p=0.95, seed=23)
SYSTEM = "you are one of many agents, and all of you have this prompt in common. "


def crowd(size: int) -> list[api.Generate]:
    """Returns requests of `size` sessions: half share a beginning, some are urgent, some want two answers."""
    requests = []
    for i in range(size):
        text = (SYSTEM if i % 2 else "") + f"session {i} says {'something long ' * (i % 5)}"
        requests.append(
            generate(
                text,
                session=f"s{i}",
                tenant="t" if i % 7 else "u",
                sampling=SEEDED,
                priority=-(i % 3 == 0),
                n=1 + (i % 10 == 4),
                max_tokens=4 + i * 11 % 43 + (40 if i % 20 == 3 else 0),
            )
        )
    return requests


def answered_alike(model: LoadedModel, engine: Engine, requests: list[api.Generate]) -> None:
    """Runs everything at once, and compares with an engine that has room for all and retains nothing."""
    pages = engine.status().pages_total
    answers = run(engine, *requests)
    config = engine_config(optimization_level="off", max_batch_size=64, max_waiting=1000)
    roomy = Engine(model, config, pages=1024)
    ample = submit(roomy, *requests)
    while roomy.step():
        pass
    for request, answer, expected in zip(requests, answers, ample, strict=True):
        assert answer.failed is None
        for choice in range(request.n):
            assert answer.ids(choice) == expected.ids(choice)
            assert answer.finish(choice) == expected.finish(choice)
            assert len(answer.ids(choice)) == request.max_tokens
    status = engine.status()
    assert (status.running, status.waiting, status.pages_free) == (0, 0, pages)
    assert counter(engine, "cached_tokens") > 0


@pytest.mark.slow
def test_eight_sessions_on_a_few_pages(model: LoadedModel) -> None:
    engine = tiered(model, pages=12, max_waiting=1000)
    answered_alike(model, engine, crowd(8))
    assert counter(engine, "preemptions") > 0


@pytest.mark.slow
@pytest.mark.parametrize("host_mb", [0, 1])
@pytest.mark.parametrize("batch", [16, 64])
def test_two_hundred_sessions_on_sixty_four_pages(model: LoadedModel, host_mb: int, batch: int) -> None:
    engine = tiered(model, pages=64, kv_host_mb=host_mb, max_waiting=1000, max_batch_size=batch)
    answered_alike(model, engine, crowd(200))
    assert counter(engine, "preemptions") > 0
    if host_mb:
        assert engine._stepper.manager.evicted.spilled > 0
        use = tier_use(engine, "host")
        assert use.tokens_served > 0
        assert use.bytes <= use.limit_bytes
        # More came back than new requests found: sequences that gave way did not compute all again.
        assert use.tokens_served > counter(engine, "cached_host_tokens")
