"""From an `AgentConfig` to a running engine: the model's file, the settings, the cache's folder, progress."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from magnitude_engine.config import AgentConfig, EngineConfig, default_data_dir
from magnitude_engine.errors import ConfigError, ModelNotFound
from magnitude_engine.telemetry import worker_log

if TYPE_CHECKING:
    from magnitude_engine.engine import Engine
    from magnitude_engine.model.loader import LoadedModel

MAX_WAITING = 256


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Space for keys and values, MiB: on the device, in host memory below it, and on disk below that (0: none).

    Raises:
        ConfigError: a figure is not a whole number, or too small; `param` names it.
    """

    kv_memory_mb: int = 2048
    kv_host_mb: int = 0
    kv_disk_mb: int = 2048

    def __post_init__(self) -> None:
        for name, least in (("kv_memory_mb", 1), ("kv_host_mb", 0), ("kv_disk_mb", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a whole number of at least {least}, not {value!r}", param=name)


def find_model(name: str, data_dir: Path) -> Path:
    """Returns the file or folder of a model: a path, or the name of one that was pulled into `data_dir`.

    Raises:
        ModelNotFound: neither; says what to do.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path.absolute()
    pulled = sorted((data_dir / "models" / name).glob("*.gguf")) if os.sep not in name else []
    if pulled:
        return pulled[0]
    raise ModelNotFound(
        f"model {name!r} is not on this machine: it is no file or folder, and {data_dir / 'models'} has none of that "
        "name. Run `magnitude pull smollm2`, and set MAGNITUDE_MODEL (or AgentConfig.model) to smollm2 or a path"
    )


def engine_settings(config: AgentConfig, memory: Memory, speculation: bool) -> EngineConfig:
    """Returns the settings that `config` and the environment select.

    Raises:
        ModelNotFound: see `find_model`.
    """
    name = os.environ.get("MAGNITUDE_MODEL") or config.model
    data_dir = default_data_dir()
    tiers = config.enable_hierarchical_cache
    return EngineConfig(
        model_path=str(find_model(name, data_dir)),
        model_name=name,
        optimization_level=config.optimization_level,
        speculation=speculation,
        kv_memory_mb=memory.kv_memory_mb,
        kv_host_mb=memory.kv_host_mb if tiers else 0,
        kv_disk_mb=memory.kv_disk_mb if tiers else 0,
        kv_dir=str(data_dir / "kv" / "inprocess"),
        max_n=config.max_parallel_branches,
        max_waiting=max(MAX_WAITING, config.max_parallel_branches),
    )


def start_engine(config: AgentConfig, memory: Memory, speculation: bool, on_fatal: Callable[[], None]) -> Engine:
    """Returns a running engine for `config`; `on_fatal` is called, on its thread, when it gives up.

    Raises:
        ConfigError: PyTorch is not installed, or a setting cannot be used.
        ModelError: the model is not there, not supported or too large.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the in-process engine needs PyTorch, which is not installed: pip install 'magnitude-runtime[engine]'"
        )
    settings = engine_settings(config, memory, speculation)
    from magnitude_engine.model.loader import load_model

    terminal = sys.stderr.isatty()
    model = load_model(settings, _show_loading if terminal else None)
    if terminal:
        sys.stderr.write("\n")
    engine = _with_cache(model, settings)
    engine.start(on_fatal)
    return engine


def _with_cache(model: LoadedModel, settings: EngineConfig) -> Engine:
    """Returns an engine, without the disk tier where its folder cannot be had: that costs cache, never an answer."""
    from magnitude_engine.engine import Engine

    try:
        return Engine(model, settings)
    except ConfigError as problem:
        if problem.param != "kv_dir":
            raise
        worker_log.warning("this engine keeps no cache on disk, all else works: %s", problem)
        return Engine(model, msgspec.structs.replace(settings, kv_disk_mb=0))


def _show_loading(share: float) -> None:
    sys.stderr.write(f"\rloading the model {round(share * 100):3d} % ")
    sys.stderr.flush()
