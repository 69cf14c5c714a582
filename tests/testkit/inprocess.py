"""An in-process engine whose weights are tiny and random; everything else is as shipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from magnitude_engine.model.loader import LoadedModel
from testkit.engine import spoiled
from testkit.tiny import tiny_model


class Passes:
    """Counts forward passes and the sequences whose next token each of them computed."""

    def __init__(self) -> None:
        self.widths: list[int] = []

    def __call__(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        self.widths.append(logits.shape[0])
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
