"""Replays agent traces against the cache, and reports what share of their prompts it serves.

    python tests/bench/replay.py [--model PATH] [--traces public|own|all] [--parts memory,restart,retention,real]

Each message of an assistant is one step, as an agent would send it: all messages before it are the prompt, and the
recorded answer is forced, so that the next prompt of the trace goes on from what the engine has computed. The oracle
is a memory without limit: the longest prefix of a prompt that any session of the tenant has sent or been answered.

`memory`, `restart` and `retention` use the model's tokenizer and template but no arithmetic (`testkit/ledger.py`): its
cache holds token ids, and every step checks that it found its own. `real` runs some traces on the model itself.
`retention` lets tools take simulated time, some kinds seconds, others minutes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from magnitude_engine import api
from magnitude_engine.config import EngineConfig, default_data_dir
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel, load_model
from testkit.clock import ManualClock
from testkit.ledger import Ledger, fingerprint, ledger_of
from testkit.model import SMOLLM2
from testkit.replay import Replay, Served, by_trace, interleaved, share, write_back
from testkit.traces import Turn, own_traces, public_traces, request, turns

CHUNK = 2048
ACTIVE = 16
HOST_MB, DISK_MB = 64, 256
SHARES = (1.0, 0.25, 0.1)
REAL_TRACES, REAL_TOKENS = 6, 2500
FAST_S, SLOW_S, USER_S, STEP_S = 2.0, 120.0, 30.0, 1.0

Sessions = Sequence[Sequence[Turn]]


class Setting(NamedTuple):
    """An engine: pages of its cache, and the tiers below them."""

    name: str
    pages: int
    host_mb: int = 0
    disk: Path | None = None

    def config(self) -> EngineConfig:
        """Returns the engine's settings."""
        return EngineConfig(
            model_path="ledger",
            profile="reference",
            prefill_chunk=CHUNK,
            kv_host_mb=self.host_mb,
            kv_disk_mb=DISK_MB if self.disk else 0,
            kv_dir=None if self.disk is None else str(self.disk),
        )


class Totals(NamedTuple):
    """Sums over steps, in tokens."""

    name: str
    steps: int
    prompt: int
    cached: int
    host: int
    disk: int
    oracle: int
    own: int
    full: int
    worst: float

    def line(self) -> list[str]:
        """Returns the cells of a table."""
        shares = (self.cached, self.cached - self.host - self.disk, self.host, self.disk, self.oracle, self.own)
        cells = [f"{value / self.prompt:.1%}" for value in shares]
        return [self.name, str(self.steps), f"{self.prompt:,}", *cells, *_of(self), f"{self.worst:.1%}"]


TOKENS = ("steps", "prompt tokens", "served", "device", "host", "disk", "oracle", "same-session oracle")
HEADER = ("", *TOKENS, "of oracle", "of its full pages", "worst trace")


def _of(totals: Totals) -> tuple[str, str]:
    return f"{share(totals.cached, totals.oracle):.2%}", f"{share(totals.cached, totals.full):.2%}"


def totals(name: str, steps: Sequence[Served]) -> Totals:
    """Returns the sums of `steps`, with the worst trace's share of its oracle."""
    ratios = [share(sum(s.cached for s in t), sum(s.oracle for s in t)) for t in by_trace(steps).values()]
    return Totals(
        name,
        steps=len(steps),
        prompt=sum(s.prompt for s in steps),
        cached=sum(s.cached for s in steps),
        host=sum(s.host for s in steps),
        disk=sum(s.disk for s in steps),
        oracle=sum(s.oracle for s in steps),
        own=sum(s.own for s in steps),
        full=sum(s.full for s in steps),
        worst=min(ratios),
    )


def run(replay: Replay, ledger: Ledger | None, order: Iterable[Turn], name: str) -> list[Served]:
    """Runs steps with progress on stderr; where a ledger is there, checks that the cache served the right pages."""
    served: list[Served] = []
    told = time.monotonic()
    for turn in order:
        served.append(replay.step(turn))
        if ledger is not None and ledger.read[-1] != fingerprint(turn.computed):
            raise RuntimeError(f"the cache served wrong pages to step {turn.number} of {turn.trace.name}")
        if time.monotonic() - told > 2:
            told = time.monotonic()
            cached, prompt = sum(s.cached for s in served), sum(s.prompt for s in served)
            print(f"\r{name}: {len(served)} steps, {cached / prompt:.1%} served ", end="", file=sys.stderr)
    print(f"\r{name}: {len(served)} steps{'':20}", file=sys.stderr)
    return served


class Bench:
    """The traces and the model; each part returns rows for the receipt and prints its table."""

    def __init__(self, model: LoadedModel, sessions: Sessions) -> None:
        self._real = model
        self._model, self._ledger = ledger_of(model)
        self._sessions = sessions
        self._everything = sum(len(turn.computed) for session in sessions for turn in session[-1:]) // 16 + 512
        self._working_set = 0

    def _engine(self, setting: Setting) -> Engine:
        return Engine(self._model, setting.config(), pages=setting.pages)

    def memory(self) -> list[Totals]:
        """Replays with ample memory, per group of traces; then with less, with and without tiers."""
        everything = Setting("ample", self._everything)
        engine = self._engine(everything)
        steps = run(Replay.on(engine), self._ledger, interleaved(self._sessions, ACTIVE), "ample")
        self._working_set = everything.pages - engine.status().pages_free + _retained(engine)
        engine.close()
        groups = sorted({step.group for step in steps})
        rows = [totals(group, [s for s in steps if s.group == group]) for group in groups]
        rows.append(totals("all, ample memory", steps))
        rows += [totals(each.name, self._short_of(each)) for each in self._settings()]
        table(f"working set {self._working_set} pages; {ACTIVE} sessions at a time", HEADER, [r.line() for r in rows])
        return rows

    def _settings(self) -> Iterator[Setting]:
        for part in SHARES[1:]:
            pages = max(768, round(part * self._working_set))
            with tempfile.TemporaryDirectory() as folder:
                yield Setting(f"{part:.0%}", pages)
                yield Setting(f"{part:.0%} + host", pages, HOST_MB)
                yield Setting(f"{part:.0%} + disk", pages, 0, Path(folder) / "a")
                yield Setting(f"{part:.0%} + host + disk", pages, HOST_MB, Path(folder) / "b")

    def _short_of(self, setting: Setting) -> list[Served]:
        engine = self._engine(setting)
        replay = Replay.on(engine)
        replay.idle = write_back
        try:
            return run(replay, self._ledger, interleaved(self._sessions, ACTIVE), setting.name)
        finally:
            engine.close()

    def restart(self) -> list[Totals]:
        """Runs half of each session, restarts on the same folder, and runs the rest."""
        halves = [(s[: (len(s) + 1) // 2], s[(len(s) + 1) // 2 :]) for s in self._sessions]
        with tempfile.TemporaryDirectory() as folder:
            setting = Setting("disk", self._everything, 0, Path(folder) / "kv")
            before = Replay.on(self._engine(setting))
            before.idle = write_back
            run(before, self._ledger, interleaved([half for half, _ in halves], ACTIVE), "before the restart")
            before.engine.close()
            after = Replay.on(self._engine(setting), before)
            after.idle = write_back
            steps = run(after, self._ledger, interleaved([half for _, half in halves], ACTIVE), "after the restart")
            after.engine.close()
        first = [each[0] for each in by_trace(steps).values()]
        rows = [totals("first step of each session", first), totals("all steps after it", steps)]
        table("after a restart on the same folder", HEADER, [row.line() for row in rows])
        return rows

    def retention(self) -> list[dict[str, object]]:
        """Replays with tools that take time, once with their names known to the engine and once without."""
        found: list[dict[str, object]] = []
        working_set = self._working_set or self._everything
        for part in SHARES[1:]:
            for known in (True, False):
                clock = ManualClock()
                pages = max(768, round(part * working_set))
                engine = Engine(self._model, Setting("", pages).config(), clock, pages)
                replay = Replay.on(engine)
                replay.ask = request if known else without_names
                name = f"{part:.0%}, tools {'named' if known else 'hidden'}"
                steps = run(replay, self._ledger, timed(self._sessions, clock), name)
                report = _report(engine)
                engine.close()
                found.append(
                    {
                        "name": name,
                        "served": sum(s.cached for s in steps) / sum(s.prompt for s in steps),
                        "of_oracle": share(sum(s.cached for s in steps), sum(s.oracle for s in steps)),
                        "learned": report.learned_hit_rate,
                        "lru": report.lru_hit_rate,
                        "policy": report.policy,
                    }
                )
        cells = [
            [str(r["name"]), *(f"{r[k]:.1%}" for k in ("served", "of_oracle", "learned", "lru")), str(r["policy"])]
            for r in found
        ]
        header = ("memory", "served", "of oracle", "learned, simulated", "LRU, simulated", "in force at the end")
        table("retention with slow and fast tools (hit rates of the last prompts)", header, cells)
        return found

    def real(self) -> list[Totals]:
        """Runs the shortest traces with several steps on the model itself."""
        fitting = [s for s in self._sessions if len(s) >= 4 and len(s[-1].computed) <= REAL_TOKENS]
        config = EngineConfig(model_path="smollm2", kv_memory_mb=1024)
        engine = Engine(self._real, config)
        replay = Replay.on(engine)
        chosen = fitting[:: max(1, len(fitting) // REAL_TRACES)][:REAL_TRACES]
        steps = run(replay, None, interleaved(chosen, 3), "real model")
        engine.check_integrity()
        engine.close()
        rows = [totals(name, each) for name, each in by_trace(steps).items()]
        rows.append(totals("all", steps))
        table(f"{self._real.card.name}, {self._real.card.profile}, computed", HEADER, [row.line() for row in rows])
        return rows


def without_names(turn: Turn) -> api.Generate:
    """Returns the request of a step as plain ids: the engine sees no tools in it."""
    generate = request(turn)
    return api.Generate(
        request=generate.request,
        epoch=1,
        tenant=generate.tenant,
        session=generate.session,
        input=api.TokenInput(ids=turn.prompt),
        sampling=generate.sampling,
        max_tokens=generate.max_tokens,
        ignore_eos=True,
        resume=generate.resume,
    )


def timed(sessions: Sessions, clock: ManualClock) -> Iterator[Turn]:
    """Yields steps in the order of simulated time: a session comes back when its tools, or its user, are done."""
    draw = random.Random(1)
    due = [(clock.now + 3 * number, number, 0) for number, _ in enumerate(sessions)]
    heapq.heapify(due)
    while due:
        at, number, step = heapq.heappop(due)
        clock.now = max(clock.now, at)
        turn = sessions[number][step]
        yield turn
        clock.advance(STEP_S)
        if step + 1 < len(sessions[number]):
            heapq.heappush(due, (clock.now + pause(turn, draw), number, step + 1))


def pause(turn: Turn, draw: random.Random) -> float:
    """Returns seconds until the session's next step: one kind of tool in three is slow."""
    calls = turn.trace.messages[len(turn.chat.messages)].tool_calls
    typical = [SLOW_S if zlib.crc32(call.name.encode()) % 3 == 0 else FAST_S for call in calls]
    return max(typical, default=USER_S) * draw.lognormvariate(0, 0.3)


def _report(engine: Engine) -> api.CacheReport:
    found: list[api.CacheReport] = []
    engine.inspect(found.append)
    engine.step()
    return found[0]


def _retained(engine: Engine) -> int:
    return _report(engine).pages_idle


def table(title: str, header: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Prints a Markdown table."""
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for line in lines:
        print(f"| {' | '.join(line)} |", flush=True)


def main() -> None:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_data_dir() / "models" / "smollm2" / SMOLLM2)
    parser.add_argument("--traces", choices=["public", "own", "all"], default="all")
    parser.add_argument("--parts", default="memory,restart,retention,real")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(EngineConfig(model_path=str(options.model), model_name=options.model.stem))
    traces = [
        *(own_traces() if options.traces != "public" else ()),
        *(public_traces() if options.traces != "own" else ()),
    ]
    bench = Bench(model, [turns(trace, model) for trace in traces])
    print(f"{len(traces)} traces, tokenizer of {options.model.name}")
    parts: dict[str, Callable[[], Sequence[object]]] = {name: getattr(bench, name) for name in options.parts.split(",")}
    receipt = {name: [r._asdict() if isinstance(r, Totals) else r for r in part()] for name, part in parts.items()}
    if options.json:
        options.json.write_text(json.dumps(receipt, indent=1), "utf-8")


if __name__ == "__main__":
    main()
