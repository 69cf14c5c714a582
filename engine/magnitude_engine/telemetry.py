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
PREFILL_ROWS = Metric("prefill_rows", "counter", "rows computed in chunks: prompts, and what preemption lost")
DECODE_ROWS = Metric("decode_rows", "counter", "rows computed one per sequence and step")
COMPLETION_TOKENS = Metric("completion_tokens", "counter", "tokens generated")
PREEMPTIONS = Metric("preemptions", "counter", "sequences that lost their pages and were computed again")
PAGES_EVICTED = Metric("pages_evicted", "counter", "retained pages dropped for running sequences")
NUMERIC_FAILURES = Metric("numeric_failures", "counter", "requests whose logits were not finite")
STEP_FAILURES = Metric("step_failures", "counter", "steps that raised an error")
INTEGRITY_FAILURES = Metric("integrity_failures", "counter", "idle checks that found the page accounts wrong")
STEP_SECONDS_TOTAL = Metric("step_seconds", "counter", "seconds spent in steps")

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

    def values(self, kind: Literal["counter", "gauge"]) -> dict[str, float]:
        """Returns name → value of all metrics of a kind."""
        return {metric.name: self._values[metric.name] for metric in TABLE if metric.kind == kind}
