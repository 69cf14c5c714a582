"""Names of every metric, span and logger of the product, and the one object that records them.

Labels never carry session or tenant ids. Loggers: `magnitude.access` (one line per request),
`magnitude.proxy`, `magnitude.worker`, `magnitude.store`. Prompts and tokens are never logged.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from magnitude_proxy.config import TelemetryConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

access_log = logging.getLogger("magnitude.access")
proxy_log = logging.getLogger("magnitude.proxy")
worker_log = logging.getLogger("magnitude.worker")
store_log = logging.getLogger("magnitude.store")

PREFIX = "magnitude"
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
PRUNED_TOKENS = Metric("pruned_tokens", "counter", "tokens that prompts were shorter by, pruned on request", ("route",))
CACHE_MISSES = Metric("cache_misses", "counter", "prompts that were not found in the worker's cache", ("cause",))
WASTED_TOKENS = Metric("cache_wasted_tokens", "counter", "prompt tokens computed again by these", ("cause",))
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
UNSTABLE_IDS = Metric("session_ids_unstable", "counter", "requests whose session id is new every time", ("source",))
WORKER_STARTS = Metric("worker_starts", "counter", "worker processes started")
WORKER_HANGS = Metric("worker_hangs", "counter", "workers killed because their step counter stood still")
TOOLS_REGISTERED = Metric("tools_registered", "counter", "registrations of tools by what became of them", ("status",))
SESSION_EVENTS = Metric("session_events", "counter", "events that agents told of their sessions", ("type",))
FEEDBACK = Metric("feedback", "counter", "feedback on sessions by what became of it", ("outcome",))
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
    """Records metrics and spans; one per process, closed by its owner.

    Metrics go straight to Prometheus's own client, which takes a tenth of what OpenTelemetry's SDK takes for one. The
    decision to trace is made once per request, so that the others make no spans at all.
    """

    def __init__(self, config: TelemetryConfig, chance: Callable[[], float] = random.random) -> None:
        """`chance` gives numbers in [0, 1) that choose the requests that are traced."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._counters = {
            m.name: _Children(Counter(*_described(m), registry=self._registry)) for m in TABLE if m.kind == "counter"
        }
        self._histograms = {
            m.name: _Children(Histogram(*_described(m), buckets=m.buckets, registry=self._registry))
            for m in TABLE
            if m.kind == "histogram"
        }
        self._gauges: dict[str, _Gauge] = {}
        self._traces = _tracing(config.otlp_endpoint) if config.otlp_endpoint else None
        self._tracer = self._traces.get_tracer("magnitude") if self._traces else None
        self._ratio = config.trace_ratio
        self._chance = chance
        self._open_spans = 0

    def count(self, metric: Metric, amount: float = 1, **labels: str) -> None:
        """Adds `amount` to a counter."""
        series = self._counters[metric.name].of(labels)
        if amount:
            series.inc(amount)

    def observe(self, metric: Metric, value: float, **labels: str) -> None:
        """Records one value of a histogram."""
        self._histograms[metric.name].of(labels).observe(value)

    def gauge(self, metric: Metric, read: Callable[[], Iterable[tuple[float, dict[str, str]]]]) -> None:
        """Registers a gauge; `read` returns its present values with labels whenever it is scraped."""
        known = self._gauges.get(metric.name)
        if known is None:
            known = self._gauges[metric.name] = _Gauge(metric)
            self._registry.register(known)
        known.readers.append(read)

    def span(self, name: str, **attributes: str | int | float) -> AbstractContextManager[Span | None]:
        """Returns a context manager for a span; nothing is recorded without an OTLP endpoint, or for most requests."""
        if self._tracer is None:
            return _NO_SPAN
        if name == SPAN_REQUEST:
            return self._recorded(name, attributes) if self._chance() < self._ratio else _NO_SPAN
        return self._recorded(name, attributes) if self._open_spans and _traced() else _NO_SPAN

    def explain(self, attributes: Mapping[str, str | int | float]) -> None:
        """Adds attributes to the span that is open here; nothing where none is recorded."""
        if self._open_spans:
            from opentelemetry.trace import get_current_span

            get_current_span().set_attributes(attributes)

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus text form."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Flushes what is pending."""
        if self._traces is not None:
            self._traces.shutdown()

    @contextmanager
    def _recorded(self, name: str, attributes: dict[str, str | int | float]) -> Iterator[Span | None]:
        if self._tracer is None:
            yield None
            return
        self._open_spans += 1
        try:
            with self._tracer.start_as_current_span(name, attributes=attributes) as span:
                yield span
        finally:
            self._open_spans -= 1


Family = TypeVar("Family", Counter, Histogram)


class _Children(Generic[Family]):
    """The time series of one metric; looking them up here is several times cheaper than asking its family."""

    def __init__(self, family: Family) -> None:
        self._family: Family = family
        self._known: dict[tuple[str, ...], Family] = {}

    def of(self, labels: dict[str, str]) -> Family:
        """Returns the series of these labels, which the metric's table row names, all of them."""
        key = (*labels, *labels.values())
        child = self._known.get(key)
        if child is None:
            child = self._known[key] = self._family.labels(**labels) if labels else self._family
        return child


class _Gauge(Collector):
    """A gauge that is read when scraped."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric
        self.readers: list[Callable[[], Iterable[tuple[float, dict[str, str]]]]] = []

    def describe(self) -> list[GaugeMetricFamily]:
        """Returns the gauge without values, so that nothing is read before somebody asks."""
        return [self._family()]

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """See prometheus_client."""
        family = self._family()
        for value, labels in chain.from_iterable(read() for read in self.readers):
            family.add_metric([labels[name] for name in self._metric.labels], value)
        yield family

    def _family(self) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"{PREFIX}_{self._metric.name}", self._metric.help, labels=self._metric.labels)


# Stands in where nothing is traced.
_NO_SPAN: AbstractContextManager[None] = nullcontext()


def _described(metric: Metric) -> tuple[str, str, tuple[str, ...]]:
    """Returns what Prometheus's client wants to know of a metric first."""
    return f"{PREFIX}_{metric.name}", metric.help, metric.labels


def _traced() -> bool:
    """True inside a span that is recorded."""
    from opentelemetry.trace import get_current_span

    return get_current_span().is_recording()


def _tracing(endpoint: str) -> TracerProvider:
    """Returns what makes spans and sends them to `endpoint`; imported only where somebody wants it."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": "magnitude-proxy"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
