"""`magnitude bench proxy`: what the proxy adds to an upstream that costs nothing, beside others that do the same.

Load, upstream and each server are processes of their own on this machine. All servers run at the same time and are
loaded in turns, so that whatever else the machine does hits all alike.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from magnitude_engine.errors import ConfigError, MagnitudeError
from magnitude_proxy.bench import latency, receipt, servers
from magnitude_proxy.bench.latency import Cell, ProxyReceipt, Sample, SessionMemory
from magnitude_proxy.bench.load import LIMIT_S, LoadResult, LoadSpec
from magnitude_proxy.bench.part import Part
from magnitude_proxy.bench.running import StartFailed, resident_mb
from magnitude_proxy.bench.servers import LITELLM_VARIABLE, Server

BODIES = (1024, 102_400)
CONNECTIONS = (1, 16, 128)
WARM_S = 0.5
Start = Callable[[Server, Path], contextlib.AbstractContextManager[Server]]
_DESCRIPTION = (
    "Measures the latency and the processor time that the proxy adds to a stub upstream, streamed and not, sessions in "
    "the embedded store, 1 % of the requests traced; beside it aiohttp's bare relay and, where it is installed, "
    "LiteLLM's proxy. Prints a table and writes one receipt."
)


class LoadFailed(MagnitudeError):
    """The load generator ended without a result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--connections", type=_positive, nargs="+", default=CONNECTIONS, metavar="N", help="default: 1 16 128")
    add("--body-bytes", type=_positive, nargs="+", default=BODIES, metavar="N", help="default: 1024 102400")
    add("--seconds", type=float, default=3.0, metavar="S", help="of each measurement; default 3")
    add("--rounds", type=_positive, default=3, metavar="N", help="rounds, with servers in turns; default 3")
    add("--server", action="append", default=[], choices=servers.NAMES[1:], help="repeatable; default: all")
    add(
        "--sessions", type=_positive, default=5000, metavar="N", help="idle sessions whose memory is told; default 5000"
    )
    add("--litellm", type=Path, metavar="PATH", help=f"litellm, or the environment that holds it [{LITELLM_VARIABLE}]")
    add("--out", type=Path, default=Path("magnitude-bench"), metavar="DIR", help="default: magnitude-bench")


def run(options: argparse.Namespace) -> int:
    """Measures, prints the table and returns the exit status: 1 where a request failed.

    Raises:
        ConfigError, StartFailed, LoadFailed: it cannot run as asked.
    """
    starts, skipped = chosen(options.server, options.litellm, os.environ.get(LITELLM_VARIABLE))
    if not starts:
        raise ConfigError(f"nothing to measure: {'; '.join(skipped.values())}", param="server")
    options.out.mkdir(parents=True, exist_ok=True)
    began = receipt.machine()
    made = ProxyReceipt(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        arguments=tuple(Path(word).name if word.startswith("/") else word for word in sys.argv[1:]),
        machine=began,
        software=receipt.software(),
        seconds=options.seconds,
        rounds=options.rounds,
        skipped=skipped,
    )
    cells = tuple(loads(options.body_bytes, options.connections))
    with tempfile.TemporaryDirectory(prefix="magnitude-bench-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        upstream = stack.enter_context(servers.stub(folder))
        running = [upstream, *started(starts, upstream, folder, stack, skipped)]
        samples = tuple(measured(running, cells, options.rounds, options.seconds))
        held = next((server for server in running if server.name == "magnitude"), None)
        memory = None if held is None else session_memory(held, options.sessions)
    load = (began.load[0], receipt.machine().load[0])
    made = msgspec.structs.replace(
        made,
        machine=msgspec.structs.replace(began, load=load),
        versions={server.name: server.version for server in running if server.version},
        samples=samples,
        memory=memory,
    )
    latency.write(made, options.out / "proxy.json")
    sys.stdout.write(latency.table(made))
    return 1 if any(sample.result.failed for sample in samples) else 0


def started(
    starts: Mapping[str, Start], upstream: Server, folder: Path, stack: contextlib.ExitStack, skipped: dict[str, str]
) -> Iterator[Server]:
    """Yields the servers that start; why another product does not goes into `skipped`.

    Raises:
        StartFailed: this product does not start.
    """
    for name, start in starts.items():
        try:
            yield stack.enter_context(start(upstream, folder))
        except StartFailed as error:
            if name != "litellm":
                raise
            skipped[name] = error.message


def chosen(names: Sequence[str], place: Path | None, variable: str | None) -> tuple[dict[str, Start], dict[str, str]]:
    """Returns how the named servers are started, all without names, and why some cannot be."""
    program = servers.find_litellm(place or (Path(variable) if variable else None))
    known: dict[str, Start | None] = {
        "relay": servers.relay,
        "magnitude": servers.magnitude,
        "litellm": servers.litellm(program) if program else None,
    }
    starts = {name: start for name, start in known.items() if start is not None and (not names or name in names)}
    skipped = {}
    if program is None and (not names or "litellm" in names):
        why = "no litellm here: install 'litellm[proxy]' into an environment of its own and name it with --litellm"
        skipped["litellm"] = f"{why} or {LITELLM_VARIABLE}"
    return starts, skipped


def loads(bodies: Sequence[int], connections: Sequence[int]) -> Iterator[Cell]:
    """Yields the kinds of load: all bodies plain, the first one streamed too."""
    for stream, sizes in ((False, bodies), (True, bodies[:1])):
        for size in sizes:
            for count in connections:
                yield Cell(body_bytes=size, stream=stream, connections=count)


def measured(running: Sequence[Server], cells: Sequence[Cell], rounds: int, seconds: float) -> Iterator[Sample]:
    """Yields a sample of each server under each load in each round."""
    for turn in range(rounds):
        for cell in cells:
            for server in running:
                sample = taken(turn, cell, server, seconds)
                shown = f"{cell.body_bytes} bytes{', streamed' if cell.stream else ''}, {cell.connections} connections"
                rate = sample.result.answered / sample.result.seconds
                sys.stderr.write(f"round {turn + 1} of {rounds}, {shown}: {server.name} {rate:,.0f}/s\n")
                yield sample


def taken(turn: int, cell: Cell, server: Server, seconds: float) -> Sample:
    """Returns one sample."""
    spec = LoadSpec(
        host="127.0.0.1",
        port=server.port,
        connections=cell.connections,
        body_bytes=cell.body_bytes,
        stream=cell.stream,
        seconds=seconds,
        warm_s=WARM_S,
    )
    before = servers.processor_s(server.pid)
    result = loaded(spec)
    after = servers.processor_s(server.pid)
    used = None
    if before is not None and after is not None and result.answered:
        # The warm-up was worked for as well.
        used = (after - before) * 1e6 / (result.answered * (result.seconds + WARM_S) / result.seconds)
    return Sample(round=turn, server=server.name, cell=cell, result=result, processor_us=used)


def loaded(spec: LoadSpec) -> LoadResult:
    """Returns what a load generator of its own process measured; raises LoadFailed."""
    words = (sys.executable, "-m", "magnitude_proxy.bench.load", msgspec.json.encode(spec).decode())
    limit = spec.warm_s + max(spec.seconds, LIMIT_S) + LIMIT_S
    try:
        ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=limit)
        return msgspec.json.decode(ended.stdout, type=LoadResult)
    except subprocess.TimeoutExpired as error:
        raise LoadFailed(f"the load on port {spec.port} did not end within {limit:g} s") from error
    except msgspec.DecodeError as error:
        raise LoadFailed(f"the load on port {spec.port} gave no result: {ended.stderr.strip()[-500:]}") from error


def session_memory(server: Server, sessions: int) -> SessionMemory:
    """Returns what `sessions` sessions of one step each leave behind in a server and its store."""
    before = resident_mb(server.pid)
    loaded(
        LoadSpec(host="127.0.0.1", port=server.port, connections=16, requests=sessions, sessions=sessions, warm_s=0.0)
    )
    grown = max(0.0, resident_mb(server.pid) - before)
    return SessionMemory(server=server.name, sessions=sessions, bytes_each=grown * 1024 * 1024 / sessions)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


PART = Part("proxy", "latency and processor time that the proxy adds", _DESCRIPTION, add_arguments, run)
