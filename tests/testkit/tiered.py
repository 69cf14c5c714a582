"""Engines on a tiny model with tiers below the device's pages, and ways to have the tiers used."""

from __future__ import annotations

from pathlib import Path

from magnitude_engine import api
from magnitude_engine.engine import Engine
from magnitude_engine.kv.disk import DiskStats
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import engine_config

PATIENCE_S = 20.0
SPOILED = 77.0


def tiered(model: LoadedModel, folder: Path | None = None, pages: int = 128, **settings: object) -> Engine:
    """Returns an engine that keeps blocks in `folder`, where there is one, in up to 8 MiB unless told otherwise."""
    if folder is not None:
        settings = {"kv_disk_mb": 8, "kv_dir": str(folder), **settings}
    return Engine(model, engine_config(**settings), pages=pages)


def save(engine: Engine) -> None:
    """Writes what is retained to disk, as an engine does when idle, and waits until it is there."""
    while engine.tidy():
        pass
    assert engine._stepper.cache.tiers.flush(PATIENCE_S)


def evict(engine: Engine, spoil: bool = True) -> None:
    """Takes all retained pages off the device, as an engine under pressure does.

    Unless told otherwise it then spoils what lies on the pages, so that nothing is right there by luck.
    """
    manager, cache = engine._stepper.manager, engine._stepper.cache
    manager.evict(manager.total)
    cache.apply()
    assert (manager.retained, manager.free) == (0, manager.total)
    if spoil:
        cache._pages.fill_(SPOILED)


def disk_stats(engine: Engine) -> DiskStats:
    """Returns the disk tier's figures."""
    disk = engine._stepper.cache.tiers._disk
    assert disk is not None
    return disk.stats


def tier_use(engine: Engine, name: str) -> api.TierUse:
    """Returns what the engine reports of a tier."""
    (use,) = [use for use in engine._stepper.report().tiers if use.name == name]
    return use


def counter(engine: Engine, name: str) -> float:
    """Returns one of the engine's counters, 0 where it never counted."""
    return engine.status().counters.get(name, 0.0)
