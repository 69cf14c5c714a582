"""The receipt of `magnitude bench agent`: one JSON file with everything that was measured, and on what."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from magnitude_engine.errors import ConfigError
from magnitude_proxy.setup import hardware

Mode = Literal["fixed", "natural", "forced"]
MODES: tuple[Mode, ...] = ("fixed", "natural", "forced")
FORMAT = 1
_PACKAGES = ("magnitude-runtime", "torch", "tokenizers", "llguidance", "httpx", "aiohttp", "uvloop", "numpy")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what stands in a receipt."""


class MachineEntry(Entry, frozen=True, kw_only=True):
    """The machine; memory in MiB, `load` the one-minute load average when the run began and when it ended."""

    cpu: str
    cores: float
    instructions: tuple[str, ...]
    memory_mb: int
    gpus: tuple[str, ...]
    system: str
    load: tuple[float, float]


class SoftwareEntry(Entry, frozen=True, kw_only=True):
    """This product: its commit, where it runs from a checkout, and the packages beside it."""

    commit: str
    changed: bool
    python: str
    packages: dict[str, str]


class ModelEntry(Entry, frozen=True, kw_only=True):
    """The model: its file or folder by name, and the file's SHA-256 (empty for a folder)."""

    name: str
    sha256: str


class TraceEntry(Entry, frozen=True, kw_only=True):
    """The recorded sessions; `sha256` is over the whole files, whose first sessions and steps were taken."""

    files: tuple[str, ...]
    sha256: str
    sessions: int
    steps: int


class SettingsEntry(Entry, frozen=True, kw_only=True):
    """How they were replayed.

    Attributes:
        tokens: length of each answer with `fixed`.
        limit: most tokens of an answer with `natural`.
        tools: `text` for tools, calls and results written into messages, `native` for OpenAI's fields.
    """

    modes: tuple[Mode, ...]
    rounds: int
    tokens: int
    limit: int
    tools: Literal["text", "native"]


class ContenderEntry(Entry, frozen=True, kw_only=True):
    """A contender; with `missing` it was not measured, and that says why."""

    name: str
    family: str
    about: str
    command: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    url: str = ""
    version: str = ""
    missing: str = ""


class Sample(Entry, frozen=True, kw_only=True):
    """One step, as one contender answered it in one round; times in seconds, None where a server does not say.

    Attributes:
        prompt, cached, output: tokens, as the server counts them.
        drafted, accepted: tokens of its speculation.
        valid, invalid, cut: tool calls in the answer; `cut` by its length limit.
        answer: first 16 hex digits of the SHA-256 of what it said.
        rows, passes: rows and forward passes that were computed; only where the model runs in process.
        error: why there is no complete answer.
    """

    mode: Mode
    round: int
    contender: str
    group: str
    session: str
    step: int
    first_s: float | None
    wall_s: float
    prompt: int | None = None
    cached: int | None = None
    output: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    valid: int = 0
    invalid: int = 0
    cut: int = 0
    finish: str = ""
    answer: str = ""
    rows: int | None = None
    passes: int | None = None
    error: str = ""


class RunEntry(Entry, frozen=True, kw_only=True):
    """One contender's turn in one round; `error` says why it has no samples, `resident_mb` is its memory at the end."""

    mode: Mode
    round: int
    contender: str
    start_s: float = 0.0
    resident_mb: float = 0.0
    error: str = ""


class Receipt(Entry, frozen=True, kw_only=True):
    """All of it."""

    kind: Literal["magnitude bench agent"] = "magnitude bench agent"
    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    made: str
    arguments: tuple[str, ...]
    machine: MachineEntry
    software: SoftwareEntry
    model: ModelEntry
    traces: TraceEntry
    settings: SettingsEntry
    contenders: tuple[ContenderEntry, ...]
    notes: tuple[str, ...] = ()
    runs: tuple[RunEntry, ...] = ()
    samples: tuple[Sample, ...] = ()


def machine() -> MachineEntry:
    """Returns this machine, with the present load as both of its values."""
    found = hardware.look()
    return MachineEntry(
        cpu=found.cpu,
        cores=found.cores,
        instructions=found.instructions,
        memory_mb=found.memory_total,
        gpus=found.gpus,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        load=(load(), load()),
    )


def load() -> float:
    """Returns the load average of the last minute."""
    return round(os.getloadavg()[0], 2)


def software() -> SoftwareEntry:
    """Returns what this product is."""
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    commit = _git("rev-parse", "HEAD")
    changed = bool(commit and _git("status", "--porcelain", "--untracked-files=no"))
    return SoftwareEntry(commit=commit, changed=changed, python=platform.python_version(), packages=found)


def write(receipt: Receipt, path: Path) -> None:
    """Writes the receipt under a temporary name and renames it."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(receipt), indent=1) + b"\n")
    part.replace(path)


def read(path: Path) -> Receipt:
    """Returns a receipt.

    Raises:
        ConfigError: there is none at `path`.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Receipt)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})", param="receipt") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path}: not a receipt of `magnitude bench agent` of this release ({error})", param="receipt"
        ) from error


def _git(*words: str) -> str:
    """Returns what git says of the checkout that this file lies in; empty where there is none."""
    here = Path(__file__).resolve()
    if not (here.parents[3] / ".git").exists():
        return ""
    try:
        ended = subprocess.run(
            ("git", *words), cwd=here.parent, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
