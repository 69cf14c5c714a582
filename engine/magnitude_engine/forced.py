"""Replays recorded answers: the engine as it is, with a model that is made to say what was recorded.

    python -m magnitude_engine.forced --model PATH [--optimization-level off] [--profile NAME] [--threads N]

Every forward pass is computed as ever; only then the logits of each row are replaced, so that the next token is the
recorded one. So cache, drafts and scheduling meet the words of a real agent, which a small model would never say by
itself. `ForcedStep`s come in as lines of JSON, `ForcedFigures` go out; the first line out is a `ForcedReady`.
"""

from __future__ import annotations

import argparse
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from magnitude_engine import api
from magnitude_engine.api.forced import ForcedFigures, ForcedReady, ForcedStep
from magnitude_engine.config import EngineConfig
from magnitude_engine.engine import Engine
from magnitude_engine.errors import MagnitudeError
from magnitude_engine.model.batch import KeyValueCache, StepBatch, StepOutput
from magnitude_engine.model.loader import LoadedModel, load_model
from magnitude_engine.model.runner import Runner

_CERTAIN = 100.0
_POLL_S = 0.0005


class ForcedRunner(Runner):
    """A runner whose logits at position p say the token that `script` has at p + 1; for one sequence at a time.

    Attributes:
        script: prompt and answer of the sequence that runs; beyond it, logits are the model's.
        passes, rows: forward passes so far, and their rows; where some layers only are computed, a part of them.
    """

    def __init__(self, inner: Runner) -> None:
        # Not `super().__init__`: what the runner has is its own, this one only shows it.
        self.shape = inner.shape
        self.profile = inner.profile
        self.device = inner.device
        self.cache_dtype = inner.cache_dtype
        self.description = inner.description
        self.script: tuple[int, ...] = ()
        self.passes = 0
        self.rows = 0
        self._inner = inner

    def allocate_cache(self, pages: int) -> KeyValueCache:
        """See `Runner`."""
        return self._inner.allocate_cache(pages)

    def forward(self, batch: StepBatch, cache: KeyValueCache, layers: Sequence[int] | None = None) -> StepOutput:
        """Computes the step, and then replaces its logits; those of some layers only stay the guess that they are."""
        output = self._inner.forward(batch, cache, layers)
        self.passes += 1
        part = 1.0 if layers is None else len(layers) / self.shape.layers
        self.rows += math.ceil(part * batch.ids.numel())
        if layers is not None or not batch.logit_rows.numel():
            return output
        logits = output.logits.clone()
        for row, position in enumerate(batch.positions[batch.logit_rows].tolist()):
            if position + 1 < len(self.script):
                logits[row] = 0.0
                logits[row, self.script[position + 1]] = _CERTAIN
        return output._replace(logits=logits)

    def recapture(self) -> bool:
        """See `Runner`."""
        return self._inner.recapture()


class ForcedEngine:
    """An engine that says recorded answers.

    Args:
        threaded: the engine runs by itself, with drafts as long as is measured to pay; otherwise `step` runs it and
            what is computed depends on nothing but the steps.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        threaded: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner = ForcedRunner(model.runner)
        self._model = model._replace(runner=self._runner)
        self._engine = Engine(self._model, config, clock)
        self._threaded = threaded
        self._clock = clock
        if threaded:
            self._engine.start()

    def close(self) -> None:
        """Ends the engine."""
        self._engine.close()

    def step(self, asked: ForcedStep) -> ForcedFigures:
        """Runs one step to its end."""
        try:
            prompt = tuple(self._model.prompts.encode(asked.chat))
        except MagnitudeError as problem:
            return ForcedFigures(error=problem.message)
        answer = tuple(self._model.tokenizer.encode(asked.answer))
        self._runner.script = prompt + answer
        passes, rows = self._runner.passes, self._runner.rows
        generate = api.Generate(
            request=f"{asked.session}/{asked.step}",
            epoch=1,
            tenant="forced",
            session=asked.session,
            step=asked.step,
            input=asked.chat,
            sampling=api.Sampling(temperature=0.0),
            max_tokens=max(1, len(answer)),
            ignore_eos=True,
        )
        told = _Told(self._clock)
        self._engine.submit(generate, told)
        self._wait(told)
        computed = self._runner.passes - passes, self._runner.rows - rows
        if told.failed:
            return ForcedFigures(error=told.failed)
        first, wall = told.times()
        return ForcedFigures(first_s=first, wall_s=wall, usage=told.usage, passes=computed[0], rows=computed[1])

    def _wait(self, told: _Told) -> None:
        if self._threaded:
            told.done.wait()
        while not told.done.is_set():
            if not self._engine.step():
                time.sleep(_POLL_S)


class _Told:
    """A sink that notes when what came."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.done = threading.Event()
        self.usage = api.Usage()
        self.failed = ""
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._ended = self._began

    def __call__(self, event: api.AnswerEvent) -> None:
        match event:
            case api.Delta() if self._first is None:
                self._first = self._clock()
            case api.Completed(usage=usage):
                self.usage, self._ended = usage, self._clock()
                self.done.set()
            case api.Failed(message=message):
                self.failed = message
                self.done.set()

    def times(self) -> tuple[float, float]:
        """Returns seconds until the first token and until the end."""
        first = self._ended if self._first is None else self._first
        return first - self._began, self._ended - self._began


def serve(engine: ForcedEngine, lines: Sequence[bytes] | None = None) -> None:
    """Answers each line of standard input with one of standard output."""
    output = sys.stdout.buffer
    for line in sys.stdin.buffer if lines is None else lines:
        figures = engine.step(msgspec.json.decode(line, type=ForcedStep))
        output.write(msgspec.json.encode(figures) + b"\n")
        output.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the replay; returns the exit status, 2 with one line on stderr where it cannot run."""
    parser = argparse.ArgumentParser(prog="python -m magnitude_engine.forced", description="Replays recorded answers.")
    parser.add_argument("--model", type=Path, required=True, metavar="PATH", help="GGUF file or model folder")
    parser.add_argument("--optimization-level", choices=("off", "balanced", "aggressive"), default="balanced")
    parser.add_argument("--profile", choices=("reference", "packed", "native"))
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 means all cores")
    options = parser.parse_args(arguments)
    config = EngineConfig(
        model_path=str(options.model),
        model_name=options.model.stem,
        profile=options.profile,
        optimization_level=options.optimization_level,
        threads=options.threads,
    )
    try:
        model = load_model(config)
        engine = ForcedEngine(model, config)
    except MagnitudeError as problem:
        sys.stderr.write(f"forced: {problem.message}\n")
        return 2
    ready = ForcedReady(profile=model.card.profile, context_length=model.card.context_length)
    sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
    sys.stdout.flush()
    try:
        serve(engine)
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
