"""Runs requests on an engine step by step, and records what they are answered."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch

from magnitude_engine import api
from magnitude_engine.config import EngineConfig
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel

Kind = TypeVar("Kind")
_numbers = itertools.count()


def engine_config(**settings: Any) -> EngineConfig:
    """Returns settings for a tiny model: small steps, so that chunks and batches really happen."""
    return EngineConfig(**{"model_path": "tiny", "profile": "reference", "prefill_chunk": 64, **settings})


def generate(prompt: str | tuple[int, ...] | api.Input, **fields: Any) -> api.Generate:
    """Returns a request with an id of its own; greedy unless `sampling` says otherwise."""
    number = next(_numbers)
    source: api.Input
    if isinstance(prompt, str):
        source = api.TextInput(text=prompt)
    elif isinstance(prompt, tuple):
        source = api.TokenInput(ids=prompt)
    else:
        source = prompt
    defaults: dict[str, Any] = {
        "request": f"r{number}",
        "epoch": 1,
        "tenant": "t",
        "session": f"s{number}",
        "sampling": api.Sampling(temperature=0.0),
        "max_tokens": 12,
        "ignore_eos": True,
    }
    return api.Generate(**{**defaults, "input": source, **fields})


class Recorder:
    """A sink that keeps every event and checks their order."""

    def __init__(self) -> None:
        self.events: list[api.AnswerEvent] = []

    def __call__(self, event: api.AnswerEvent) -> None:
        assert not self.done, f"{event} came after the end"
        self.events.append(event)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Returns all events of a kind."""
        return [e for e in self.events if isinstance(e, kind)]

    @property
    def done(self) -> bool:
        """Whether the last event was one that ends the request."""
        return bool(self.events) and isinstance(self.events[-1], api.Completed | api.Failed)

    @property
    def failed(self) -> api.Failed | None:
        """The failure, if there was one."""
        return next(iter(self.of(api.Failed)), None)

    @property
    def started(self) -> api.Started:
        """The start."""
        (event,) = self.of(api.Started)
        return event

    @property
    def usage(self) -> api.Usage:
        """The usage of the completed request."""
        (event,) = self.of(api.Completed)
        return event.usage

    def ids(self, choice: int = 0) -> list[int]:
        """Returns the token ids of a choice."""
        return [i for d in self.of(api.Delta) if d.choice == choice for i in d.ids]

    def text(self, choice: int = 0) -> str:
        """Returns the text of a choice."""
        return "".join(d.text for d in self.of(api.Delta) if d.choice == choice)

    def finish(self, choice: int = 0) -> api.Finished:
        """Returns how a choice ended."""
        (event,) = [f for f in self.of(api.Finished) if f.choice == choice]
        return event


def submit(engine: Engine, *requests: api.Generate) -> list[Recorder]:
    """Hands requests over; returns their recorders."""
    recorders = [Recorder() for _ in requests]
    for request, recorder in zip(requests, recorders, strict=True):
        engine.submit(request, recorder)
    return recorders


def run(engine: Engine, *requests: api.Generate, between: Callable[[], None] = lambda: None) -> list[Recorder]:
    """Runs requests to their end on this thread, calling `between` after each step; checks the page accounts."""
    recorders = submit(engine, *requests)
    drain(engine, between)
    return recorders


def drain(engine: Engine, between: Callable[[], None] = lambda: None) -> None:
    """Steps until nothing is left to do, reading from disk included."""
    while (stepped := engine.step()) or engine.reading:
        engine.check_integrity()
        if stepped:
            between()
        else:
            time.sleep(0.0005)
    engine.check_integrity()


_answers: dict[tuple[str, str, bytes], Recorder] = {}


def alone(model: LoadedModel, request: api.Generate) -> Recorder:
    """Returns the answer of a new engine that runs nothing else, with the whole prompt in one chunk.

    The answer is kept for equal requests, whatever their ids.
    """
    nameless = msgspec.structs.replace(request, request="", session="", resume=())
    key = (model.card.weights_hash, model.card.profile, msgspec.msgpack.encode(nameless))
    if key not in _answers:
        engine = Engine(model, engine_config(prefill_chunk=4096, optimization_level="off"), pages=96)
        (_answers[key],) = run(engine, msgspec.structs.replace(request, resume=()))
    return _answers[key]


class _Breaking:
    """A real runner whose results are spoiled, as broken hardware would."""

    def __init__(self, model: LoadedModel, spoil: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        self._runner = model.runner
        self._spoil = spoil
        self._calls = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._runner, name)

    def forward(self, batch: object, cache: object) -> object:
        self._calls += 1
        output = self._runner.forward(batch, cache)  # type: ignore[arg-type]
        return output._replace(logits=self._spoil(output.logits, self._calls))


def spoiled(model: LoadedModel, spoil: Callable[[torch.Tensor, int], torch.Tensor]) -> LoadedModel:
    """Returns the model with its logits passed through `spoil(logits, number of the forward pass)`."""
    return model._replace(runner=_Breaking(model, spoil))  # type: ignore[arg-type]
