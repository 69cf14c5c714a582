"""The cache's figures as metrics."""

from __future__ import annotations

from magnitude_engine import api
from magnitude_engine import telemetry as names
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.telemetry import WorkerTelemetry
from magnitude_engine.warm import WarmQueue


def record(telemetry: WorkerTelemetry, cache: PagedCache, warm: WarmQueue) -> None:
    """Sets everything that is counted elsewhere."""
    manager, retention = cache.manager, cache.manager.retention
    values: dict[names.Metric, float] = {
        names.PAGES_TOTAL: manager.total,
        names.PAGES_FREE: manager.free,
        names.PAGES_RETAINED: manager.retained,
        names.PAGES_IN_USE: manager.total - manager.free - manager.retained,
        names.EVICTED_PRESSURE: manager.evicted.pressure,
        names.EVICTED_DEAD: manager.evicted.dead,
        names.PAGES_SPILLED: manager.evicted.spilled,
        names.LEARNED_HIT_RATE: retention.learned_hit_rate,
        names.LRU_HIT_RATE: retention.lru_hit_rate,
        names.LRU_IN_FORCE: float(retention.policy == "lru"),
        names.WARM_ROWS: warm.computed,
        names.WARM_USED: warm.used,
        names.SLOW_READS: cache.tiers.slow_reads,
    }
    for metric, value in values.items():
        telemetry.set(metric, value)
    for use in cache.tiers.use():
        if use.name == "host":
            _record_host(telemetry, use)
        else:
            _record_disk(telemetry, use)
    prompt = telemetry.value(names.PROMPT_TOKENS)
    if prompt:
        host, disk = telemetry.value(names.CACHED_HOST_TOKENS), telemetry.value(names.CACHED_DISK_TOKENS)
        telemetry.set(names.HIT_RATE_DEVICE, (telemetry.value(names.CACHED_TOKENS) - host - disk) / prompt)
        telemetry.set(names.HIT_RATE_HOST, host / prompt)
        telemetry.set(names.HIT_RATE_DISK, disk / prompt)


def _record_host(telemetry: WorkerTelemetry, use: api.TierUse) -> None:
    telemetry.set(names.HOST_BLOCKS, use.blocks)
    telemetry.set(names.HOST_BYTES, use.bytes)
    telemetry.set(names.HOST_EVICTED, use.evicted)
    telemetry.set(names.HOST_REJECTED, use.rejected)


def _record_disk(telemetry: WorkerTelemetry, use: api.TierUse) -> None:
    telemetry.set(names.DISK_BLOCKS, use.blocks)
    telemetry.set(names.DISK_BYTES, use.bytes)
    telemetry.set(names.DISK_EVICTED, use.evicted)
    telemetry.set(names.DISK_REJECTED, use.rejected)
    telemetry.set(names.DISK_FAILED_WRITES, use.failed_writes)
