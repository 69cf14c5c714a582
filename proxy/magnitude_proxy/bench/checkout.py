"""`magnitude bench decode|cache|grammar|gpu`: runs the benches that lie beside the tests of a checkout."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from magnitude_engine.config import default_data_dir
from magnitude_engine.errors import ConfigError
from magnitude_proxy.bench.part import Part
from magnitude_proxy.setup import hardware
from magnitude_proxy.setup.progress import Bar
from magnitude_proxy.setup.pull import resolve_model

ROOT = Path(__file__).resolve().parents[3]


class Script(NamedTuple):
    """A bench of its own: its file in the checkout, its words, and whether it is told the model."""

    path: str
    words: tuple[str, ...] = ()
    model: bool = True


class Bench(NamedTuple):
    """Scripts that are run one after the other."""

    name: str
    help: str
    scripts: tuple[Script, ...]


BENCHES = (
    Bench(
        "decode",
        "milliseconds of a step by context and rows; tokens per step of speculation",
        (Script("tests/bench/step.py"), Script("tests/bench/speculation.py")),
    ),
    Bench(
        "cache",
        "what the cache serves of recorded sessions; time to first token of later steps",
        (Script("tests/bench/replay.py"), Script("tests/bench/ttft.py")),
    ),
    Bench("grammar", "what grammars cost: compiling, masks, forced tokens", (Script("tests/bench/grammar.py"),)),
    Bench(
        "gpu",
        "the kernels and the model's steps, where there is a GPU",
        (Script("tests/gpu/run.py", model=False), Script("tests/bench/step.py", ("--profile", "native"))),
    ),
)


def command(script: Script, model: str) -> list[str]:
    """Returns the command line of a script, run from the checkout's root."""
    model_words = ("--model", model) if script.model else ()
    return [sys.executable, script.path, *model_words, *script.words]


def _run(bench: Bench, options: argparse.Namespace) -> int:
    if bench.name == "gpu" and not hardware.look().gpus:
        sys.stdout.write("no GPU: not measured\n")
        return 0
    absent = [script.path for script in bench.scripts if not (ROOT / script.path).is_file()]
    if absent:
        raise ConfigError(
            f"bench {bench.name}: runs from a checkout of the repository, which has {', '.join(absent)}; this is an "
            "installed package (pip install -e '.[engine,dev]' in a checkout, then again)"
        )
    model = _model(options.model) if any(script.model for script in bench.scripts) else ""
    for script in bench.scripts:
        sys.stdout.write(f"## {script.path}\n\n")
        sys.stdout.flush()
        status = subprocess.run(command(script, model), cwd=ROOT, check=False).returncode
        if status:
            return status
    return 0


def _model(name: str) -> str:
    bar = Bar(sys.stderr, name)
    try:
        return str(resolve_model(name, default_data_dir(), bar).path)
    finally:
        bar.close()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", metavar="NAME|PATH", help="a pulled name or a path")


def _part(bench: Bench) -> Part:
    paths = " and ".join(script.path for script in bench.scripts)
    return Part(
        name=bench.name,
        help=bench.help,
        description=f"Measures {bench.help}. Runs {paths} of a checkout of the repository with their defaults; by "
        "themselves they take further options.",
        add_arguments=_add_arguments,
        run=lambda options: _run(bench, options),
    )


PARTS = tuple(_part(bench) for bench in BENCHES)
