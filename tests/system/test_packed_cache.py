"""SmolLM2 in `packed`: an answer is the same, token for token, cold, cached, batched, branched and restored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from magnitude_engine import api
from magnitude_engine.config import EngineConfig
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel, load_model
from testkit.engine import generate, run
from testkit.model import smollm2_path
from testkit.tiered import evict, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOKENS = 24
SYSTEM = "You are an agent that answers briefly and calls tools when it must. " * 2
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "List three rivers and the countries they flow through.",
    "Describe a lighthouse at night to somebody who never saw the sea.",
)


def settings(folder: Path | None, **more: Any) -> EngineConfig:
    disk: dict[str, Any] = {"kv_disk_mb": 256, "kv_dir": str(folder)} if folder is not None else {}
    path = str(smollm2_path())
    return EngineConfig(**{"model_path": path, "profile": "packed", "threads": 1, "kv_memory_mb": 256, **disk, **more})


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(settings(None))
    torch.set_num_threads(before)


def requests(turn: str = "", **fields: object) -> list[api.Generate]:
    return [generate(SYSTEM + q + turn, session=f"s{i}", max_tokens=TOKENS, **fields) for i, q in enumerate(QUESTIONS)]


def test_no_optimisation_changes_a_token(model: LoadedModel, tmp_path: Path) -> None:
    cold_engine = Engine(model, settings(None, optimization_level="off"), pages=128)
    cold = [run(cold_engine, request)[0] for request in requests()]
    engine = Engine(model, settings(tmp_path, kv_host_mb=64), pages=256)
    # Another conversation with the same beginning comes first, so that the first run is not cold either.
    run(engine, generate(SYSTEM + "Say hello.", max_tokens=1))
    runs = {"batched, beginning shared": run(engine, *requests())}
    runs["cached"] = [run(engine, request)[0] for request in requests()]
    branched = run(engine, *requests(n=2))
    save(engine)
    evict(engine)
    runs["from host memory"] = run(engine, *requests())
    engine.close()
    restarted = Engine(model, settings(tmp_path), pages=256)
    runs["restarted, from disk"] = run(restarted, *requests())
    restarted.close()
    assert all(a.usage.cached_tokens > 0 for answers in [*runs.values(), branched] for a in answers)
    assert all(a.usage.cached_host_tokens > 0 for a in runs["from host memory"])
    assert all(a.usage.cached_disk_tokens > 0 for a in runs["restarted, from disk"])
    for name, answers in runs.items():
        assert [a.ids() for a in answers] == [a.ids() for a in cold], name
    assert all(a.ids(choice) == c.ids() for a, c in zip(branched, cold, strict=True) for choice in range(2))
    assert all(len(a.ids()) == TOKENS for a in cold)
