"""An in-process engine whose weights are tiny and random; everything else is as shipped."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from magnitude_engine.inprocess import MagnitudeEngine
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import spoiled
from testkit.tiny import tiny_model


class Passes:
    """Sees every forward pass.

    Attributes:
        widths: of each pass, the sequences whose next token it computed.
        script: ids that the model says next, whatever it would have said; for one sequence at a time.
        gate: while it is not set, passes wait.
    """

    def __init__(self) -> None:
        self.widths: list[int] = []
        self.script: deque[int] = deque()
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        self.gate.wait()
        self.widths.append(logits.shape[0])
        if self.script and logits.shape[0] == 1:
            logits = torch.zeros_like(logits)
            logits[0, self.script.popleft()] = 100.0
        return logits


def use_tiny_model(folder: Path, monkeypatch: pytest.MonkeyPatch, context: int = 2048) -> Passes:
    """Has every engine of this process load a tiny model and keep its data in `folder`; returns what it computes."""
    weights = folder / "tiny.gguf"
    weights.write_bytes(b"GGUF")
    passes = Passes()

    def load(config: object, progress: Callable[[float], None] | None = None) -> LoadedModel:
        return spoiled(tiny_model(context=context), passes)

    monkeypatch.setenv("MAGNITUDE_MODEL", str(weights))
    monkeypatch.setenv("MAGNITUDE_DATA_DIR", str(folder / "data"))
    monkeypatch.setattr("magnitude_engine.model.loader.load_model", load)
    return passes


def settle(engine: MagnitudeEngine) -> None:
    """Waits until all that may be computed ahead is computed; the engine is loaded and nothing is asked of it."""
    running = engine._engine
    assert running is not None
    running._predictor.wait()
    engine.inspect()
    warm = running._stepper.ahead.queue
    wait_until(lambda: not any(task.missing for task in list(warm._tasks.values())))


def wait_until(true: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Returns when `true` says so; raises TimeoutError after `limit_s`."""
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit_s} s")
        time.sleep(0.002)
