"""Draws a receipt: wall time over the steps of a session, and time to first token against the prompt's length."""

from __future__ import annotations

import importlib.util
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from magnitude_proxy.bench.receipt import Mode, Receipt, Sample
from magnitude_proxy.bench.summary import prompt_lengths

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MISSING = "no chart: matplotlib is not installed (pip install 'magnitude-runtime[bench]')"


def available() -> bool:
    """Whether charts can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(receipt: Receipt, path: Path) -> None:
    """Writes a PNG with a row of two charts for each mode that has samples; ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    modes = [mode for mode in receipt.settings.modes if any(s.mode == mode for s in receipt.samples)]
    figure = Figure(figsize=(13, 4.5 * max(1, len(modes))), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(max(1, len(modes)), 2, squeeze=False)
    names = list(dict.fromkeys(entry.name for entry in receipt.contenders))
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    for row, mode in zip(grid, modes, strict=False):
        _cumulative(row[0], receipt, mode, colours)
        _first_tokens(row[1], receipt, mode, colours)
    figure.suptitle(
        f"{receipt.model.name}, {receipt.machine.cpu}, {receipt.machine.cores:g} cores, {receipt.made[:10]}"
    )
    figure.savefig(path, dpi=110)


def longest_session(samples: Sequence[Sample]) -> str:
    """Returns the session with the most steps, of those the one with the longest prompt."""
    steps: dict[str, int] = defaultdict(int)
    tokens: dict[str, int] = defaultdict(int)
    for sample in samples:
        steps[sample.session] = max(steps[sample.session], sample.step + 1)
        tokens[sample.session] = max(tokens[sample.session], sample.prompt or 0)
    return max(steps, key=lambda session: (steps[session], tokens[session]))


def cumulative(samples: Sequence[Sample], session: str) -> dict[str, list[float]]:
    """Returns for each contender the seconds that had passed after each step of `session`, medians over rounds."""
    taken: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if sample.session == session and not sample.error:
            taken[sample.contender][sample.step].append(sample.wall_s)
    found: dict[str, list[float]] = {}
    for name, steps in taken.items():
        passed, total = [0.0], 0.0
        for step in sorted(steps):
            total += statistics.median(steps[step])
            passed.append(total)
        found[name] = passed
    return found


def _cumulative(axes: Axes, receipt: Receipt, mode: Mode, colours: dict[str, str]) -> None:
    samples = [s for s in receipt.samples if s.mode == mode]
    session = longest_session(samples)
    for name, passed in cumulative(samples, session).items():
        axes.plot(range(len(passed)), passed, marker="o", markersize=3, label=name, color=colours[name])
    axes.set_title(f"{mode}: cumulative wall time, session {session}")
    axes.set_xlabel("steps answered")
    axes.set_ylabel("seconds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _first_tokens(axes: Axes, receipt: Receipt, mode: Mode, colours: dict[str, str]) -> None:
    samples = [s for s in receipt.samples if s.mode == mode and s.first_s is not None and not s.error]
    prompts = prompt_lengths(samples)
    for name in dict.fromkeys(s.contender for s in samples):
        own = [s for s in samples if s.contender == name]
        lengths = [prompts.get((s.session, s.step), 0) for s in own]
        axes.scatter(lengths, [s.first_s or 0.0 for s in own], s=12, alpha=0.6, label=name, color=colours[name])
    axes.set_yscale("log")
    axes.set_title(f"{mode}: time to first token")
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("seconds (log)")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small")
