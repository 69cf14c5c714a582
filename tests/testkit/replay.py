"""Replays traces on an engine, step by step, and compares what its cache served with what an oracle would have."""

from __future__ import annotations

import random
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.engine import Engine
from magnitude_engine.kv.radix import common_prefix
from testkit.engine import Recorder
from testkit.traces import Turn, request


class Oracle:
    """Unlimited memory: knows every sequence that a tenant has sent or been answered."""

    def __init__(self) -> None:
        self._known: list[tuple[int, ...]] = []

    def longest(self, prompt: tuple[int, ...]) -> int:
        """Returns how many leading tokens of `prompt` were computed before."""
        at = bisect_left(self._known, prompt)
        beside = self._known[max(0, at - 1) : at + 1]
        return max((common_prefix(each, prompt) for each in beside), default=0)

    def add(self, computed: tuple[int, ...]) -> None:
        """Takes in what a step has computed."""
        insort(self._known, computed)


class Served(NamedTuple):
    """What one step's prompt got from the cache, in tokens.

    Attributes:
        cached: in all, of which `host` and `disk` came from there.
        oracle: what unlimited memory would have served; `own`: from the same session alone.
    """

    trace: str
    group: str
    number: int
    prompt: int
    cached: int
    host: int
    disk: int
    oracle: int
    own: int

    @property
    def full(self) -> int:
        """What unlimited memory of full pages only would have served."""
        return self.oracle // PAGE_TOKENS * PAGE_TOKENS


@dataclass(slots=True)
class Replay:
    """Runs steps on an engine that does not run by itself.

    Attributes:
        ask: makes the request of a step.
        idle: called between steps, while the tools run.
    """

    engine: Engine
    oracle: Oracle
    sessions: dict[str, Oracle]
    ask: Callable[[Turn], api.Generate] = request
    idle: Callable[[Engine], None] = lambda engine: None

    @classmethod
    def on(cls, engine: Engine, before: Replay | None = None) -> Replay:
        """Returns a replay on `engine` that knows what was computed in `before`."""
        return cls(engine, before.oracle if before else Oracle(), before.sessions if before else {})

    def step(self, turn: Turn) -> Served:
        """Runs one step to its end."""
        own = self.sessions.setdefault(turn.trace.name, Oracle())
        recorder = Recorder()
        generate = self.ask(turn)
        computed = turn.prompt + (generate.resume[0].ids if generate.resume else ())
        # The last token known is always computed, since the next one is drawn from it.
        oracle, same = (min(each.longest(turn.prompt), len(computed) - 1) for each in (self.oracle, own))
        self.engine.submit(generate, recorder)
        while not recorder.done:
            if not self.engine.step() and not recorder.done:
                time.sleep(0.0005)
        if recorder.failed is not None:
            raise RuntimeError(f"step {turn.number} of {turn.trace.name} failed: {recorder.failed}")
        self.oracle.add(computed)
        own.add(computed)
        self.idle(self.engine)
        usage = recorder.usage
        tiers = (usage.cached_tokens, usage.cached_host_tokens, usage.cached_disk_tokens)
        return Served(turn.trace.name, turn.trace.group, turn.number, len(turn.prompt), *tiers, oracle, same)


def write_back(engine: Engine) -> None:
    """What an idle engine does: writes its pages to disk, as far as the disk keeps up."""
    for _ in range(10_000):
        if not engine.tidy():
            return


def interleaved(sessions: Iterable[Sequence[Turn]], active: int, seed: int = 0) -> Iterator[Turn]:
    """Yields the steps of all sessions, of `active` ones at a time in random order."""
    draw = random.Random(seed)
    waiting = [list(each) for each in sessions if each]
    waiting.reverse()
    running: list[list[Turn]] = []
    while waiting or running:
        while waiting and len(running) < active:
            running.append(waiting.pop())
        chosen = draw.choice(running)
        yield chosen.pop(0)
        if not chosen:
            running.remove(chosen)


def share(served: int, possible: int) -> float:
    """Returns served / possible; 1 where nothing was possible."""
    return served / possible if possible else 1.0


def by_trace(steps: Iterable[Served]) -> dict[str, list[Served]]:
    """Returns the steps of each trace."""
    found: dict[str, list[Served]] = {}
    for step in steps:
        found.setdefault(step.trace, []).append(step)
    return found
