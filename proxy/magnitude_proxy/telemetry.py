"""Names of every metric, span and logger of the product, and the one object that records them.

Labels never carry session or tenant ids. Loggers: `magnitude.access` (one line per request),
`magnitude.proxy`, `magnitude.worker`, `magnitude.store`. Prompts and tokens are never logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span
from prometheus_client import CollectorRegistry, generate_latest

from magnitude_proxy.config import TelemetryConfig

access_log = logging.getLogger("magnitude.access")
proxy_log = logging.getLogger("magnitude.proxy")
worker_log = logging.getLogger("magnitude.worker")
store_log = logging.getLogger("magnitude.store")

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metric(NamedTuple):
    """One row of the table; Prometheus shows `name` with the prefix `magnitude_`."""

    name: str
    kind: Literal["counter", "histogram", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


REQUESTS = Metric("requests", "counter", "requests by endpoint, route and HTTP status", ("endpoint", "route", "status"))
REQUEST_SECONDS = Metric("request_seconds", "histogram", "time to the last byte", ("endpoint", "route"), LATENCY_S)
FIRST_TOKEN_SECONDS = Metric("first_token_seconds", "histogram", "time to the first content", ("route",), LATENCY_S)
PROMPT_TOKENS = Metric("prompt_tokens", "counter", "prompt tokens", ("route",))
CACHED_TOKENS = Metric("cached_tokens", "counter", "prompt tokens served from cache", ("route",))
COMPLETION_TOKENS = Metric("completion_tokens", "counter", "generated tokens", ("route",))
FALLBACKS = Metric("fallbacks", "counter", "requests that left their first route", ("source", "target", "reason"))
RETRIES_DENIED = Metric("retries_denied", "counter", "second attempts refused by the retry budget")
BREAKER_OPENED = Metric("breaker_opened", "counter", "circuit breakers opened", ("route",))
RESUMES = Metric("resumes", "counter", "streams resumed on a restarted worker")
STREAMS_BROKEN = Metric("streams_broken", "counter", "streams ended with an error event", ("route", "reason"))
CLIENT_GONE = Metric("client_disconnects", "counter", "clients that left before the end")
STORE_ERRORS = Metric("store_errors", "counter", "session store operations that failed", ("operation",))
STORE_SECONDS = Metric("store_seconds", "histogram", "session store operations", ("operation",), LATENCY_S)
STALE_COMMITS = Metric("session_stale_commits", "counter", "session commits refused by compare-and-set")
WORKER_STARTS = Metric("worker_starts", "counter", "worker processes started")
WORKER_HANGS = Metric("worker_hangs", "counter", "workers killed because their step counter stood still")
FRAMES_FENCED = Metric("frames_fenced", "counter", "late frames dropped by epoch")

TABLE: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

# Gauges that are read when scraped; see `Telemetry.gauge`.
STORE_UP = Metric("store_up", "gauge", "1 when the session store answers")
WORKER_UP = Metric("worker_up", "gauge", "1 when the worker is connected and ready")
WORKER_VALUE = Metric("worker", "gauge", "the worker's own figures by name", ("name",))
GAUGES = (STORE_UP, WORKER_UP, WORKER_VALUE)

SPAN_REQUEST = "magnitude.request"
SPAN_ATTEMPT = "magnitude.attempt"
SPAN_STORE = "magnitude.store"


class Telemetry:
    """Records metrics and spans; one per process, closed by its owner."""

    def __init__(self, config: TelemetryConfig) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(registry=self._registry, prefix="magnitude", scope_info_enabled=False)
        resource = Resource.create({"service.name": "magnitude-proxy"})
        self._meters = MeterProvider(metric_readers=[reader], resource=resource)
        self._meter = self._meters.get_meter("magnitude")
        sampler = ParentBased(TraceIdRatioBased(config.trace_ratio))
        self._traces = TracerProvider(sampler=sampler, resource=resource) if config.otlp_endpoint else None
        if self._traces is not None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporter = OTLPSpanExporter(endpoint=config.otlp_endpoint)
            self._traces.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._traces.get_tracer("magnitude") if self._traces else None
        self._counters = {
            m.name: self._meter.create_counter(m.name, description=m.help) for m in TABLE if m.kind == "counter"
        }
        self._histograms = {
            m.name: self._meter.create_histogram(
                m.name, description=m.help, explicit_bucket_boundaries_advisory=list(m.buckets)
            )
            for m in TABLE
            if m.kind == "histogram"
        }

    def count(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Adds `amount` to a counter."""
        self._counters[metric.name].add(amount, labels)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Records one value of a histogram."""
        self._histograms[metric.name].record(value, labels)

    def gauge(self, metric: Metric, read: Callable[[], Iterable[tuple[float, dict[str, str]]]]) -> None:
        """Registers a gauge; `read` returns its present values with labels whenever it is scraped."""

        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(value, labels) for value, labels in read()]

        self._meter.create_observable_gauge(metric.name, callbacks=[callback], description=metric.help)

    def span(self, name: str, **attributes: str | int | float) -> AbstractContextManager[Span | None]:
        """Returns a context manager for a span; nothing is recorded without an OTLP endpoint."""
        if self._tracer is None:
            return _NO_SPAN
        return self._tracer.start_as_current_span(name, attributes=attributes)

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus text form."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Flushes what is pending."""
        self._meters.shutdown()
        if self._traces is not None:
            self._traces.shutdown()


class _NoSpan(AbstractContextManager[None]):
    """Stands in where tracing is off."""

    def __exit__(self, *_: object) -> None:
        return None


_NO_SPAN = _NoSpan()
