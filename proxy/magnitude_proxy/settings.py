"""Reads every setting of `magnitude serve`: flag > environment > one TOML file > default.

`TABLE` names each setting once; flags, environment variables, the help text and the file's keys follow from
it. The TOML file has the sections of `config.py` (`listen`, `worker`, `store`, `branches`, `deadlines`, `retry`,
`telemetry`, `limits`, the lists `upstreams` and `keys`). Whatever cannot be used raises `ConfigError` with the name
of the setting, where it was set and what is allowed.
"""

from __future__ import annotations

import argparse
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from magnitude_engine.config import default_data_dir
from magnitude_engine.errors import ConfigError
from magnitude_proxy.access import is_loopback
from magnitude_proxy.config import KV_DISK_MB, ProxyConfig
from magnitude_proxy.keyfile import configured_keys
from magnitude_proxy.toml_places import place, refuse_unknown
from magnitude_proxy.upstream.given import read_upstream

PREFIX = "MAGNITUDE_"


class Setting(NamedTuple):
    """One setting: its place in the file, what it means, and its flag where the place is too long a name."""

    path: str
    help: str
    short: str = ""
    also: str = ""

    @property
    def flag(self) -> str:
        """The command line flag; `--deadlines-idle-s` for `deadlines.idle_s`."""
        return "--" + (self.short or self.path.replace(".", "-").replace("_", "-"))

    @property
    def dest(self) -> str:
        """The attribute in argparse's namespace."""
        return "set_" + self.flag[2:].replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables, the first that is set counts."""
        return tuple(name for name in (PREFIX + self.flag[2:].replace("-", "_").upper(), self.also) if name)


TABLE: tuple[Setting, ...] = (
    Setting("listen.host", "address to listen on; other than loopback needs --key-file", "host"),
    Setting("listen.port", "port of the API; 0 takes a free one", "port"),
    Setting("listen.admin_host", "address of the second listener (metrics)", "admin-host"),
    Setting("listen.admin_port", "port of the second listener; default: port + 1, 0 takes a free one", "admin-port"),
    Setting("listen.max_body_bytes", "larger request bodies get 413", "max-body-bytes"),
    Setting("listen.max_refused_per_minute", "unknown keys of an address until 429; 0: any", "max-refused-per-minute"),
    Setting("data_dir", "folder of models, store and secret", "data-dir"),
    Setting("most_urgent", "lowest priority that a client may ask for (lower is sooner), 0 to -100", "most-urgent"),
    Setting("key_file", "file of API keys (`magnitude keys new` makes them), re-read when it changes", "key-file"),
    Setting("limits.max_iterations", "answered steps of a session; clients may lower these four for their sessions"),
    Setting("limits.max_tokens", "prompt and completion tokens of a session"),
    Setting("limits.max_seconds", "seconds since a session's first request"),
    Setting("limits.max_repeats", "how often one identical tool call may stand in a session's recent history"),
    Setting("limits.requests_per_minute", "requests of a key that begin, per proxy"),
    Setting("limits.concurrent_requests", "requests of a key at once, per proxy"),
    Setting("limits.tokens_per_day", "prompt and completion tokens of a key in a UTC day, over all proxies of a store"),
    Setting("insecure", "allow a public address without API keys (true or false)", "insecure"),
    Setting("worker.model", "a known name (see `magnitude pull`) or a path", "model"),
    Setting("worker.engine.model_name", "name under which the model is listed; default: the model's", "model-name"),
    Setting("worker.aliases", "further model names clients may use; * stands for any (repeatable)", "model-alias"),
    Setting("worker.mode", "spawn starts a worker, attach connects to --worker-socket, none uses upstreams", "worker"),
    Setting("worker.socket", "unix socket of the worker; default: a private one in the data folder"),
    Setting("worker.hang_s", "a worker without progress for this long is restarted, seconds"),
    Setting("worker.start_s", "a worker not ready after this long is restarted, seconds"),
    Setting("worker.engine.optimization_level", "off computes every prompt anew", "optimization-level"),
    Setting("worker.engine.speculation", "draft and verify tokens; changes no answer (true or false)", "speculation"),
    Setting("worker.engine.draft_model_path", "smaller model that drafts; a known name or a path", "draft"),
    Setting("worker.engine.profile", "numeric profile; default: packed on CPU, native on GPU", "profile"),
    Setting("worker.engine.context_length", "shorten the model's context, tokens", "context-length"),
    Setting("worker.engine.kv_memory_mb", "memory for keys and values, MiB", "kv-memory-mb"),
    Setting("worker.engine.kv_host_mb", "host memory for pages that left the device, MiB; 0: none", "kv-host-mb"),
    Setting("worker.engine.kv_disk_mb", "disk space for pages kept over restarts, MiB; 0: none", "kv-disk-mb"),
    Setting("worker.engine.kv_dir", "folder of these pages, for one worker at a time", "kv-dir"),
    Setting("worker.engine.max_batch_size", "sequences decoded together", "max-batch-size"),
    Setting("worker.engine.max_waiting", "requests queued before 429", "max-waiting"),
    Setting("worker.engine.prefill_chunk", "prompt tokens computed per step", "prefill-chunk"),
    Setting("worker.engine.threads", "CPU threads; 0 means all cores", "threads"),
    Setting("worker.engine.max_n", "choices per request", "max-n"),
    Setting(
        "store.url",
        "redis://, rediss:// or unix:// URL; unset: an embedded one; `none`: sessions in memory",
        "store",
        "MAGNITUDE_REDIS_URL",
    ),
    Setting("store.timeout_s", "no request waits longer than this for the store, seconds"),
    Setting("store.session_ttl_s", "an idle session is forgotten after this long, seconds"),
    Setting("branches.max_parallel", "open branches of a session", "max-parallel-branches"),
    Setting("deadlines.progress_s", "local limit without a prefill chunk while an upstream could answer, seconds"),
    Setting("deadlines.first_token_s", "local limit until the first content, seconds"),
    Setting("deadlines.idle_s", "limit between two pieces of output, seconds"),
    Setting("deadlines.hold_headers_s", "headers of a stream wait for content this long, seconds"),
    Setting("deadlines.worker_start_s", "a request that only the worker can answer waits this long for it, seconds"),
    Setting("deadlines.keepalive_s", "an SSE comment is sent after this long without an event, seconds"),
    Setting("retry.breaker_failures", "failures in a row that open a route's circuit breaker"),
    Setting("retry.breaker_open_s", "an open breaker lets one probe pass after this long, seconds"),
    Setting("retry.budget_ratio", "second attempts as a share of active requests"),
    Setting("retry.budget_min", "second attempts that are always allowed"),
    Setting("telemetry.log_level", "least severe log line that is written", "log-level"),
    Setting("telemetry.otlp_endpoint", "OTLP/HTTP endpoint for traces; default: no traces"),
    Setting("telemetry.trace_ratio", "share of requests that are traced"),
)

_CONFIG = Setting("config", "TOML file with any of these settings, each at the [section] key shown here", "config")
_UPSTREAM = Setting(
    "upstreams", "OpenAI-compatible server in order of preference: URL, NAME=URL or NAME=KIND+URL", "upstream"
)
_UPSTREAM_KEY = Setting(
    "upstreams.key_file", "file with the bearer token of an upstream: FILE or NAME=FILE", "upstream-key-file"
)
_UPSTREAM_MODEL = Setting(
    "upstreams.models",
    "model that an upstream is asked for whatever the client's name: MODEL or NAME=MODEL",
    "upstream-model",
)
SPECIAL = (_CONFIG, _UPSTREAM, _UPSTREAM_KEY, _UPSTREAM_MODEL)
_SHOWN_DEFAULTS = {
    "data_dir": "~/.local/share/magnitude",
    "worker.engine.model_name": "unset",
    "worker.engine.kv_disk_mb": str(KV_DISK_MB),
    "worker.engine.kv_dir": "kv/default in the data folder",
}
_REPEATED = ("worker.aliases", "upstreams", "upstreams.key_file", "upstreams.models")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for every setting; its help names the environment variable, the file's key and the default."""
    for setting in (*SPECIAL, *TABLE):
        variables = " or ".join(setting.variables)
        key = "" if setting is _CONFIG else f"; {place(setting.path)}"
        default = "" if setting in SPECIAL else f"; default {_shown_default(setting)}"
        text = f"{setting.help} ({variables}{key}{default})".replace("%", "%%")
        if setting.path == "insecure":
            parser.add_argument(setting.flag, dest=setting.dest, action="store_const", const="true", help=text)
            continue
        repeated = setting.path in _REPEATED
        metavar = "|".join(_choices(setting)) or setting.flag.rsplit("-", 1)[-1].upper()
        action = "append" if repeated else "store"
        parser.add_argument(setting.flag, dest=setting.dest, action=action, metavar=metavar, help=text)
    parser.add_argument(
        "--no-worker", dest="set_worker", action="store_const", const="none", help="the same as --worker none"
    )


def load(options: argparse.Namespace, environ: Mapping[str, str]) -> ProxyConfig:
    """Returns the checked settings.

    `worker.engine` is filled for a spawned worker with `model_path` as the user named it: who starts the worker
    replaces it with the file it resolves to.

    Raises:
        ConfigError: a value, a file or a combination cannot be used.
    """
    given = Given(options, environ)
    tree = _read_file(given.one(_CONFIG))
    for setting in TABLE:
        found = given.value(setting)
        if found is not None:
            _put(tree, setting.path, found)
    _add_upstreams(tree, given)
    _finish(tree)
    config = _decode(tree)
    check(config)
    return config


def check(config: ProxyConfig) -> None:
    """Refuses combinations that could not serve or would serve everybody.

    Raises:
        ConfigError: names the settings and the fix.
    """
    listen, worker = config.listen, config.worker
    for name, host in (("host", listen.host), ("admin_host", listen.admin_host)):
        if not is_loopback(host) and not (config.keys or config.key_file) and not config.insecure:
            raise ConfigError(
                f"{name} {host!r} is reachable from other machines but no API keys are configured: "
                "pass --key-file FILE, listen on 127.0.0.1, or accept everybody with --insecure",
                param=f"listen.{name}",
            )
    if worker.mode == "none" and not config.upstreams:
        raise ConfigError(
            "nothing could answer a request: the worker is off and there is no upstream; pass --upstream URL",
            param="upstreams",
        )
    if worker.mode == "attach" and worker.socket is None:
        raise ConfigError("worker mode attach needs --worker-socket PATH", param="worker.socket")
    configured_keys(config.keys, config.key_file, config.upstreams)
    names = [upstream.name for upstream in config.upstreams]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two upstreams are named {name!r}: use NAME=URL to tell them apart", param="upstreams")


class Given:
    """What flags and environment say, flags first."""

    def __init__(self, options: argparse.Namespace, environ: Mapping[str, str]) -> None:
        self._options = options
        self._environ = environ

    def many(self, setting: Setting) -> list[str]:
        """Returns the values of a repeatable setting; in the environment they are separated by commas."""
        flagged = getattr(self._options, setting.dest, None)
        if flagged is not None:
            return [str(value) for value in (flagged if isinstance(flagged, list) else [flagged])]
        for name in setting.variables:
            if self._environ.get(name):
                return [part.strip() for part in self._environ[name].split(",") if part.strip()]
        return []

    def one(self, setting: Setting) -> str | None:
        """Returns the value of a setting as text, None when it is not given."""
        found = self.origin(setting)
        return found[0] if found else None

    def origin(self, setting: Setting) -> tuple[str, str] | None:
        """Returns the text of a setting and the flag or variable it came from."""
        flagged = getattr(self._options, setting.dest, None)
        if flagged is not None:
            return str(flagged), setting.flag
        for name in setting.variables:
            if self._environ.get(name):
                return self._environ[name], name
        return None

    def value(self, setting: Setting) -> Any:
        """Returns the setting's value in its own type, None when it is not given.

        Raises:
            ConfigError: the text does not fit the type or its bounds.
        """
        if setting.path in _REPEATED:
            return self.many(setting) or None
        found = self.origin(setting)
        if found is None:
            return None
        text, origin = found
        try:
            return msgspec.convert(text, _field(setting.path).type, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{origin} {text!r}: {_explain(error, setting)}", param=setting.path) from error


def _field(path: str) -> msgspec.structs.FieldInfo:
    """Returns the struct field behind a dotted path."""
    owner: Any = ProxyConfig
    *parents, last = path.split(".")
    for name in parents:
        owner = next(f.type for f in msgspec.structs.fields(owner) if f.name == name)
        if isinstance(owner, types.UnionType):
            owner = next(part for part in typing.get_args(owner) if part is not type(None))
    return next(f for f in msgspec.structs.fields(owner) if f.name == last)


def _choices(setting: Setting) -> tuple[str, ...]:
    """Returns the permitted words of a setting that is one of a few, else nothing."""
    if setting in SPECIAL:
        return ()
    pending: list[Any] = [_field(setting.path).type]
    while pending:
        part = pending.pop()
        if typing.get_origin(part) is Literal:
            return tuple(str(word) for word in typing.get_args(part))
        pending.extend(arg for arg in typing.get_args(part) if not isinstance(arg, str | msgspec.Meta))
    return ()


def _shown_default(setting: Setting) -> str:
    """Returns the default as the help shows it."""
    if setting.path in _SHOWN_DEFAULTS:
        return _SHOWN_DEFAULTS[setting.path]
    default = _field(setting.path).default
    if default in (None, ()):
        return "unset"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _explain(error: msgspec.ValidationError, setting: Setting) -> str:
    """Returns what is allowed, in words."""
    choices = _choices(setting)
    if choices:
        return f"must be one of {', '.join(choices)}"
    words = str(error).split(" - at ")[0]
    for name, meaning in (("int", "a whole number"), ("float", "a number")):
        words = words.replace(f"`{name} | null`", meaning).replace(f"`{name}`", meaning)
    return words.replace("Expected", "must be").replace(", got `str`", "")


def _read_file(name: str | None) -> dict[str, Any]:
    """Returns the TOML file as a tree, empty without a file."""
    if name is None:
        return {}
    try:
        tree = tomllib.loads(Path(name).expanduser().read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {name}: cannot be read ({error.strerror})", param="config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {name}: is not TOML: {error}", param="config") from error
    refuse_unknown(tree, ProxyConfig, name, [setting.path for setting in TABLE])
    return tree


def _put(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        branch = tree.setdefault(name, {})
        if not isinstance(branch, dict):
            raise ConfigError(f"{name} must be a section ([{name}]) in the file", param=name)
        tree = branch
    tree[last] = value


def _add_upstreams(tree: dict[str, Any], given: Given) -> None:
    """Upstreams from flags or environment replace those of the file; key files and models go to theirs by name."""
    named = given.many(_UPSTREAM)
    if named:
        tree["upstreams"] = [read_upstream(text) for text in named]
    upstreams = tree.get("upstreams", [])
    for upstream, file in _addressed(upstreams, given, _UPSTREAM_KEY):
        upstream.setdefault("key_file", file)
    for upstream, model in _addressed(upstreams, given, _UPSTREAM_MODEL):
        upstream.setdefault("models", {}).setdefault("*", model)


def _addressed(upstreams: list[Any], given: Given, setting: Setting) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each value of `VALUE` or `NAME=VALUE` with the upstreams it is for: the named one, or all."""
    for text in given.many(setting):
        name, _, value = text.rpartition("=")
        chosen = [u for u in upstreams if isinstance(u, dict) and name in ("", u.get("name"))]
        if not chosen:
            raise ConfigError(f"{setting.flag} {text!r}: no upstream has that name", param="upstreams")
        for upstream in chosen:
            yield upstream, value


def _finish(tree: dict[str, Any]) -> None:
    """Fills what follows from other settings."""
    tree["data_dir"] = str(Path(str(tree.get("data_dir") or default_data_dir())).expanduser().absolute())
    worker = tree.setdefault("worker", {})
    if isinstance(worker, dict):
        engine, mode = worker.pop("engine", {}), worker.get("mode", "spawn")
        if mode == "spawn" and isinstance(engine, dict):
            model = str(worker.get("model", _field("worker.model").default))
            folder = engine.get("kv_dir", f"{tree['data_dir']}/kv/default")
            if isinstance(folder, str) and folder:
                folder = str(Path(folder).expanduser().absolute())
            worker["engine"] = {"model_path": model, "kv_disk_mb": KV_DISK_MB, **engine, "kv_dir": folder}
        elif engine:
            raise ConfigError(
                f"worker.engine ({', '.join(engine)}) is for a worker that this process starts; with worker.mode "
                f"{mode!r} give these settings to the worker itself",
                param="worker.engine",
            )


def _decode(tree: dict[str, Any]) -> ProxyConfig:
    try:
        return msgspec.convert(tree, ProxyConfig)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        path = place.rstrip("`").lstrip(".")
        known = {setting.path: setting for setting in TABLE}.get(path)
        words = _explain(error, known) if known else problem
        where = path or "the top level"
        raise ConfigError(
            f"setting {where}: {words}; `magnitude serve --help` lists all settings", param=path or None
        ) from error
