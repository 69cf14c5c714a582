"""Names of the worker's counters and gauges, and the object that holds their values.

The values travel in `api.Status`; the proxy shows them as `magnitude_worker{name="..."}`. Logger:
`magnitude.worker`. Prompts and tokens are never logged.
"""

from __future__ import annotations

import logging
import threading
from typing import Literal, NamedTuple

worker_log = logging.getLogger("magnitude.worker")


class Metric(NamedTuple):
    """One row of the table."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str


REQUESTS_COMPLETED = Metric("requests_completed", "counter", "requests answered in full")
REQUESTS_FAILED = Metric("requests_failed", "counter", "requests ended by an error, refused ones included")
REQUESTS_CANCELLED = Metric("requests_cancelled", "counter", "requests stopped by their client")
PROMPT_TOKENS = Metric("prompt_tokens", "counter", "prompt tokens of admitted requests")
CACHED_TOKENS = Metric("cached_tokens", "counter", "of these, found in the cache")
CACHED_HOST_TOKENS = Metric("cached_host_tokens", "counter", "of these, brought back from host memory")
CACHED_DISK_TOKENS = Metric("cached_disk_tokens", "counter", "of these, brought back from disk")
PREFILL_ROWS = Metric("prefill_rows", "counter", "rows computed in chunks: prompts, and what preemption lost")
DECODE_ROWS = Metric("decode_rows", "counter", "rows computed one per sequence and step")
COMPLETION_TOKENS = Metric("completion_tokens", "counter", "tokens generated")
DRAFTED_TOKENS = Metric("drafted_tokens", "counter", "tokens proposed and verified")
ACCEPTED_TOKENS = Metric("accepted_tokens", "counter", "of these, what the model said too")
PREEMPTIONS = Metric("preemptions", "counter", "sequences that lost their pages and were computed again")
EVICTED_PRESSURE = Metric("pages_evicted_pressure", "counter", "retained pages dropped because others needed room")
EVICTED_DEAD = Metric("pages_evicted_dead", "counter", "dropped pages of sessions and branches that had ended")
PAGES_SPILLED = Metric("pages_spilled", "counter", "dropped pages that a lower tier took")
WARM_ROWS = Metric("warm_rows", "counter", "prompt tokens computed ahead of their request")
WARM_USED = Metric("warm_used_tokens", "counter", "of these, used by the session's next request")
SLOW_READS = Metric("slow_reads", "counter", "prompts computed because reading them from disk would take longer")
HOST_EVICTED = Metric("host_evicted", "counter", "blocks dropped from host memory")
HOST_REJECTED = Metric("host_rejected", "counter", "blocks in host memory that were damaged")
DISK_EVICTED = Metric("disk_evicted", "counter", "blocks deleted from disk for room")
DISK_REJECTED = Metric("disk_rejected", "counter", "blocks on disk that were damaged or foreign")
DISK_FAILED_WRITES = Metric("disk_failed_writes", "counter", "blocks that could not be written to disk")
NUMERIC_FAILURES = Metric("numeric_failures", "counter", "requests whose logits were not finite")
STEP_FAILURES = Metric("step_failures", "counter", "steps that raised an error")
INTEGRITY_FAILURES = Metric("integrity_failures", "counter", "idle checks that found the page accounts wrong")
STEP_SECONDS_TOTAL = Metric("step_seconds", "counter", "seconds spent in steps")

HIT_RATE_DEVICE = Metric("hit_rate_device", "gauge", "share of prompt tokens found in the device's pages")
HIT_RATE_HOST = Metric("hit_rate_host", "gauge", "share of prompt tokens brought back from host memory")
HIT_RATE_DISK = Metric("hit_rate_disk", "gauge", "share of prompt tokens brought back from disk")
LEARNED_HIT_RATE = Metric("retention_learned_hit_rate", "gauge", "share that learned retention finds, simulated")
LRU_HIT_RATE = Metric("retention_lru_hit_rate", "gauge", "share that least-recently-used finds, simulated")
LRU_IN_FORCE = Metric("retention_lru_in_force", "gauge", "1 while least-recently-used chooses what is evicted")
HOST_BLOCKS = Metric("host_blocks", "gauge", "blocks in host memory")
HOST_BYTES = Metric("host_bytes", "gauge", "their size")
DISK_BLOCKS = Metric("disk_blocks", "gauge", "blocks on disk")
DISK_BYTES = Metric("disk_bytes", "gauge", "their size")
PAGES_TOTAL = Metric("pages_total", "gauge", "pages of the block table")
PAGES_FREE = Metric("pages_free", "gauge", "pages that nobody holds")
PAGES_IN_USE = Metric("pages_in_use", "gauge", "pages that running sequences hold")
PAGES_RETAINED = Metric("pages_retained", "gauge", "pages kept for later steps only")
PREFILL_RATE = Metric("prefill_tokens_per_s", "gauge", "speed of the last step that computed a chunk")
ROW_BUDGET = Metric("row_budget", "gauge", "rows per step at present")

TABLE: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


class WorkerTelemetry:
    """Running totals and present values; any thread."""

    def __init__(self) -> None:
        self._values = {metric.name: 0.0 for metric in TABLE}
        self._lock = threading.Lock()

    def count(self, metric: Metric, amount: float = 1) -> None:
        """Adds to a counter; any thread."""
        with self._lock:
            self._values[metric.name] += amount

    def set(self, metric: Metric, value: float) -> None:
        """Sets a gauge, or a counter that is kept elsewhere."""
        self._values[metric.name] = value

    def value(self, metric: Metric) -> float:
        """Returns the present value."""
        return self._values[metric.name]

    def values(self, kind: Literal["counter", "gauge"]) -> dict[str, float]:
        """Returns name → value of all metrics of a kind."""
        return {metric.name: self._values[metric.name] for metric in TABLE if metric.kind == kind}
