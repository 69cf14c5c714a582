"""What a receipt says: medians and spreads per contender, and the tables that show them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from magnitude_proxy.bench.receipt import Mode, Receipt, Sample

LONG = 4000
PRODUCT = "magnitude"


class Spread(NamedTuple):
    """A median over rounds, with the least and the most."""

    median: float
    least: float
    most: float


class Summary(NamedTuple):
    """One contender in one mode; times in seconds, None where nothing could be measured.

    Attributes:
        wall: of the whole replay, over rounds.
        first_prompt: time to first token of sessions' first steps.
        first_later: of all further steps.
        first_long, wall_long: of steps whose prompt has `LONG` tokens or more.
        per_token: between output tokens of a step, the first left out.
        prompt, cached, output: tokens of the whole replay in one round.
        accepted: of drafted tokens.
        valid, invalid, cut: tool calls.
        failed: steps without a complete answer, in all rounds.
        rows, passes: computed for the whole replay.
    """

    contender: str
    steps: int
    wall: Spread | None
    first_prompt: float | None
    first_later: float | None
    first_long: float | None
    wall_long: float | None
    per_token: float | None
    prompt: int
    cached: int | None
    output: int
    accepted: float | None
    valid: int
    invalid: int
    cut: int
    failed: int
    rows: int | None
    passes: int | None


def summarise(receipt: Receipt, mode: Mode) -> list[Summary]:
    """Returns the contenders that have samples in `mode`, in the receipt's order."""
    by_contender: dict[str, list[Sample]] = defaultdict(list)
    for sample in receipt.samples:
        if sample.mode == mode:
            by_contender[sample.contender].append(sample)
    prompts = prompt_lengths(receipt.samples)
    names = [entry.name for entry in receipt.contenders if entry.name in by_contender]
    return [_one(name, by_contender[name], prompts) for name in dict.fromkeys(names)]


def prompt_lengths(samples: Iterable[Sample]) -> dict[tuple[str, int], int]:
    """Returns the prompt's tokens of each step, the median of what servers count."""
    counted: dict[tuple[str, int], list[int]] = defaultdict(list)
    for sample in samples:
        if sample.prompt is not None:
            counted[sample.session, sample.step].append(sample.prompt)
    return {step: round(statistics.median(values)) for step, values in counted.items()}


def _one(name: str, samples: Sequence[Sample], prompts: dict[tuple[str, int], int]) -> Summary:
    good = [s for s in samples if not s.error]
    rounds: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        rounds[sample.round].append(sample)
    whole = [each for each in rounds.values() if not any(s.error for s in each)]
    long = [s for s in good if prompts.get((s.session, s.step), 0) >= LONG]
    one = whole[0] if whole else good

    def total(value: Callable[[Sample], int | None]) -> int | None:
        values = [value(s) for s in one]
        known = [v for v in values if v is not None]
        return sum(known) if known else None

    drafted, accepted = total(lambda s: s.drafted), total(lambda s: s.accepted)
    return Summary(
        contender=name,
        steps=len({(s.session, s.step) for s in samples}),
        wall=spread([sum(s.wall_s for s in each) for each in whole]),
        first_prompt=_median([s.first_s for s in good if s.step == 0]),
        first_later=_median([s.first_s for s in good if s.step]),
        first_long=_median([s.first_s for s in long]),
        wall_long=_median([s.wall_s for s in long]),
        per_token=_median([per_token(s) for s in good]),
        prompt=total(lambda s: s.prompt) or 0,
        cached=total(lambda s: s.cached),
        output=total(lambda s: s.output) or 0,
        accepted=accepted / drafted if drafted and accepted is not None else None,
        valid=sum(s.valid for s in one),
        invalid=sum(s.invalid for s in one),
        cut=sum(s.cut for s in one),
        failed=len(samples) - len(good),
        rows=total(lambda s: s.rows),
        passes=total(lambda s: s.passes),
    )


def per_token(sample: Sample) -> float | None:
    """Returns seconds between output tokens, None for answers of fewer than two."""
    if sample.first_s is None or sample.output is None or sample.output < 2:
        return None
    return (sample.wall_s - sample.first_s) / (sample.output - 1)


def spread(values: Sequence[float]) -> Spread | None:
    """Returns the spread, None without values."""
    return Spread(statistics.median(values), min(values), max(values)) if values else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def render(receipt: Receipt) -> str:
    """Returns the receipt as text: what was measured on what, a table per mode, what was skipped, and the notes."""
    machine, traces, settings = receipt.machine, receipt.traces, receipt.settings
    gib = machine.memory_mb / 1024
    lines = [
        f"{receipt.kind}, {receipt.made}, commit {receipt.software.commit[:12] or 'unknown'}"
        + (" with changes" if receipt.software.changed else ""),
        f"{machine.cpu}, {machine.cores:g} cores ({', '.join(machine.instructions)}), {gib:.0f} GiB; load "
        f"{machine.load[0]:g} at the beginning, {machine.load[1]:g} at the end",
        f"{receipt.model.name}; {traces.sessions} sessions, {traces.steps} steps of {', '.join(traces.files)}; "
        f"tools as {settings.tools}; rounds: {settings.rounds}",
    ]
    for mode in settings.modes:
        rows = summarise(receipt, mode)
        if rows:
            lines += ["", _title(mode, receipt), "", *table(rows)]
    absent = [entry for entry in receipt.contenders if entry.missing]
    failed = [run for run in receipt.runs if run.error]
    lines += ["", *(f"not measured: {entry.name}: {entry.missing}" for entry in absent)] if absent else []
    lines += ["", *(f"failed: {run.contender}, {run.mode}, round {run.round + 1}: {run.error}" for run in failed)]
    lines += [f"note: {note}" for note in receipt.notes]
    return "\n".join(lines).rstrip() + "\n"


def _title(mode: Mode, receipt: Receipt) -> str:
    words = {
        "fixed": f"fixed length: {receipt.settings.tokens} tokens a step",
        "natural": f"natural stop, at most {receipt.settings.limit} tokens a step",
        "forced": "teacher-forced: the recorded answers, in process",
    }
    return f"### {words[mode]}"


HEADS = (
    "contender", "wall s", "range", "x", "first token: first step", "later", f"from {LONG:,}", f"wall from {LONG:,}",
    "ms per token", "cached", "output", "drafts kept", "calls", "failed",
)  # fmt: skip


def table(rows: Sequence[Summary]) -> list[str]:
    """Returns a Markdown table; `x` is the wall time as a multiple of the product's own."""
    computed = any(row.rows is not None for row in rows)
    heads = (*HEADS, "rows computed", "passes") if computed else HEADS
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    base = next((row for row in rows if row.contender == PRODUCT), rows[0])
    for row in rows:
        cells = _cells(row, base)
        if computed:
            cells += [_whole(row.rows), _whole(row.passes)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cells(row: Summary, base: Summary) -> list[str]:
    wall = row.wall
    times = f"{wall.median / base.wall.median:.2f}" if wall and base.wall and base.wall.median else "-"
    calls = row.valid + row.invalid
    return [
        row.contender,
        _seconds(wall.median if wall else None, 1),
        f"{wall.least:.1f} to {wall.most:.1f}" if wall else "-",
        times,
        *(_seconds(value) for value in (row.first_prompt, row.first_later, row.first_long, row.wall_long)),
        "-" if row.per_token is None else f"{row.per_token * 1000:.1f}",
        "-" if row.cached is None or not row.prompt else f"{row.cached / row.prompt:.1%}",
        _whole(row.output),
        "-" if row.accepted is None else f"{row.accepted:.0%}",
        f"{row.valid} of {calls} valid" + (f", {row.cut} cut" if row.cut else ""),
        str(row.failed),
    ]


def _seconds(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _whole(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
