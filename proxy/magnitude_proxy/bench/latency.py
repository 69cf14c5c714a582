"""The receipt of `magnitude bench proxy`, and its tables: what each server adds to the bare upstream."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from magnitude_proxy.bench.load import LoadResult, Spread
from magnitude_proxy.bench.receipt import MachineEntry, SoftwareEntry

DIRECT = "direct"


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of load."""

    body_bytes: int
    stream: bool
    connections: int


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One server under one load in one round.

    Attributes:
        processor_us: of the server's processes per request, None where the system does not tell.
    """

    round: int
    server: str
    cell: Cell
    result: LoadResult
    processor_us: float | None


class SessionMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What `sessions` idle sessions take in a server and its store, in bytes each."""

    server: str
    sessions: int
    bytes_each: float


class ProxyReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """All of it; `versions` by server, `skipped` says why a server was not measured."""

    kind: Literal["magnitude bench proxy"] = "magnitude bench proxy"
    format: Literal[1] = 1
    made: str
    arguments: tuple[str, ...]
    machine: MachineEntry
    software: SoftwareEntry
    seconds: float
    rounds: int
    versions: dict[str, str] = {}
    skipped: dict[str, str] = {}
    samples: tuple[Sample, ...] = ()
    memory: SessionMemory | None = None


class Row(NamedTuple):
    """A server under one load: medians over the rounds, times in ms; `added` is the difference to `direct`.

    Attributes:
        per_core: requests per second of processor time of the server's processes.
        passed_on: p50 and p99 of the time from the upstream's writing of a stream's first event to its arrival.
    """

    cell: Cell
    server: str
    failed: int
    per_s: float
    whole: Spread
    added: Spread | None
    per_core: float | None
    passed_on: Spread | None


def rows(samples: Sequence[Sample]) -> Iterator[Row]:
    """Yields a row per load and server, in the order of the samples."""
    cells = list(dict.fromkeys(sample.cell for sample in samples))
    servers = list(dict.fromkeys(sample.server for sample in samples))
    for cell in cells:
        bare: Spread | None = None
        for server in servers:
            taken = [one for one in samples if one.cell == cell and one.server == server]
            whole = _median(taken, lambda one: one.whole)
            if whole is None:
                continue
            bare = whole if server == DIRECT else bare
            used = [one.processor_us for one in taken if one.processor_us]
            yield Row(
                cell=cell,
                server=server,
                failed=sum(one.result.failed for one in taken),
                per_s=statistics.median(one.result.answered / one.result.seconds for one in taken),
                whole=whole,
                added=None if bare is None or server == DIRECT else _less(whole, bare),
                per_core=1e6 / statistics.median(used) if used else None,
                passed_on=_median(taken, lambda one: one.first_passed_on),
            )


def table(receipt: ProxyReceipt) -> str:
    """Returns the tables as Markdown, with a line per server that was skipped."""
    lines = [
        "| body | streamed | connections | server | requests/s | per core | p50 ms | added p50 / p99 / p99.9 ms "
        "| first event passed on p50 / p99 ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows(receipt.samples):
        cell = row.cell
        failed = f" ({row.failed} failed)" if row.failed else ""
        per_core = "" if row.per_core is None else f"{row.per_core:,.0f}"
        lines.append(
            f"| {cell.body_bytes} | {'yes' if cell.stream else 'no'} | {cell.connections} | {row.server}{failed} "
            f"| {row.per_s:,.0f} | {per_core} | {row.whole.p50:.2f} "
            f"| {_shown(row.added, True)} | {_shown(row.passed_on, False)} |"
        )
    lines.append("")
    if receipt.memory is not None:
        held = receipt.memory
        lines.append(f"An idle session takes {held.bytes_each / 1024:.1f} KiB (of {held.sessions:,} sessions).")
    lines += [f"{name} was not measured: {why}" for name, why in receipt.skipped.items()]
    first, last = receipt.machine.load
    lines.append(
        f"`direct` is the load generator's own limit. Load average {first:g} at the start, {last:g} at the end."
    )
    return "\n".join(lines) + "\n"


def write(receipt: ProxyReceipt, path: Path) -> None:
    """Writes the receipt under a temporary name and renames it."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(receipt), indent=1) + b"\n")
    part.replace(path)


def _median(samples: Sequence[Sample], of: Callable[[LoadResult], Spread | None]) -> Spread | None:
    """Returns the median of each figure over the rounds; None when no round has any."""
    found = [spread for one in samples if (spread := of(one.result)) is not None]
    if not found:
        return None
    names = Spread.__struct_fields__
    return Spread(**{name: statistics.median(getattr(one, name) for one in found) for name in names})


def _less(one: Spread, other: Spread) -> Spread:
    return Spread(**{name: getattr(one, name) - getattr(other, name) for name in Spread.__struct_fields__})


def _shown(spread: Spread | None, tail: bool) -> str:
    if spread is None:
        return ""
    figures = (spread.p50, spread.p99, spread.p999) if tail else (spread.p50, spread.p99)
    return " / ".join(f"{figure:.2f}" for figure in figures)
