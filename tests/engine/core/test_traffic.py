"""Random traffic on a small pool: sessions that branch and continue, choices, priorities, cancellations, limits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import Recorder, alone, engine_config, generate

pytestmark = pytest.mark.thorough

SESSION_TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"


def random_request(draw: random.Random) -> api.Generate:
    """Returns a request; few different prompts with common prefixes make sharing and divergence frequent."""
    prompt = SESSION_TEXT[: draw.choice((5, 23, 48, 90))] + draw.choice(("", "!", "?", " and so on"))
    sampling = api.Sampling(temperature=draw.choice((0.0, 1.0)), top_k=20, seed=draw.randrange(3))
    fields: dict[str, Any] = {
        "session": draw.choice("abcd"),
        "tenant": draw.choice("tu"),
        "branch": draw.choice(("main", "main", "side")),
        "n": draw.choice((1, 1, 1, 2, 3)),
        "max_tokens": draw.choice((1, 4, 9, 17)),
        "priority": draw.choice((0, 0, 1)),
        "preferences": api.Preferences(max_batch_size=draw.choice((None, None, None, 2))),
        "stop": draw.choice(((), ("e",))),
    }
    return generate(prompt, sampling=sampling, **fields)


def check_traffic(model: LoadedModel, seed: int, count: int) -> None:
    draw = random.Random(seed)
    engine = Engine(model, engine_config(prefill_chunk=draw.choice((8, 24, 64)), max_batch_size=5), pages=12)
    sent: list[tuple[api.Generate, Recorder]] = []
    cancelled: set[str] = set()
    while len(sent) < count or engine.status().running or engine.status().waiting:
        if len(sent) < count and draw.random() < 0.4:
            sent.append((random_request(draw), Recorder()))
            engine.submit(*sent[-1])
        if sent and draw.random() < 0.03:
            request, recorder = draw.choice(sent)
            if not recorder.done:
                cancelled.add(request.request)
                engine.cancel(request.request, request.epoch)
        engine.step()
        engine.check_integrity()
    for request, recorder in sent:
        if request.request in cancelled:
            assert not recorder.done
            continue
        expected = alone(model, request)
        assert recorder.failed is None
        for choice in range(request.n):
            assert recorder.ids(choice) == expected.ids(choice)
            assert recorder.text(choice) == expected.text(choice)
            assert recorder.finish(choice).reason == expected.finish(choice).reason
    status = engine.status()
    assert status.pages_free == status.pages_total == 12
    assert status.counters["cached_tokens"] > 0


def test_some_traffic(model: LoadedModel) -> None:
    check_traffic(model, seed=0, count=10)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_heavy_traffic(model: LoadedModel, seed: int) -> None:
    check_traffic(model, seed, count=60)
