"""Metrics in Prometheus's text form, and spans of sampled requests only, against a collector on a real socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from magnitude_proxy.config import TelemetryConfig
from magnitude_proxy.telemetry import (
    REQUEST_SECONDS,
    REQUESTS,
    SPAN_ATTEMPT,
    SPAN_REQUEST,
    SPAN_STORE,
    STORE_UP,
    WORKER_VALUE,
    Telemetry,
)


class Collector(HTTPServer):
    """Keeps the spans that are sent to it: name, parent's id and id."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taker)
        self.spans: list[tuple[str, bytes, bytes]] = []
        self.attributes: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class Taker(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        told = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        if isinstance(self.server, Collector):
            for span in (s for r in told.resource_spans for scope in r.scope_spans for s in scope.spans):
                self.server.spans.append((span.name, span.parent_span_id, span.span_id))
                self.server.attributes |= {each.key: each.value.int_value for each in span.attributes}
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def collecting() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            thread.join()


@pytest.mark.thorough
async def test_only_the_spans_of_sampled_requests_are_made_and_sent() -> None:
    chances = iter((0.3, 0.1))
    with collecting() as collector:
        telemetry = Telemetry(TelemetryConfig(otlp_endpoint=collector.endpoint, trace_ratio=0.2), lambda: next(chances))
        left, sampled = asyncio.Event(), asyncio.Event()

        async def unsampled() -> None:
            with telemetry.span(SPAN_REQUEST) as request:
                # The other request's span is open in its own task, and no parent of this one's.
                await sampled.wait()
                with telemetry.span(SPAN_STORE) as child:
                    assert (request, child) == (None, None)
                telemetry.explain({"unsampled": 1})
            left.set()

        async def traced() -> None:
            with telemetry.span(SPAN_REQUEST, path="/x"):
                sampled.set()
                await left.wait()
                with telemetry.span(SPAN_ATTEMPT, route="u0"):
                    pass
                telemetry.explain({"speculation.suffix.drafted": 7})

        await asyncio.gather(unsampled(), traced())
        await asyncio.to_thread(telemetry.close)
        (attempt, parent, _), (request, root, own) = sorted(collector.spans)
    assert (attempt, request, root) == (SPAN_ATTEMPT, SPAN_REQUEST, b"")
    assert parent == own
    assert collector.attributes["speculation.suffix.drafted"] == 7
    assert "unsampled" not in collector.attributes


def test_what_is_counted_is_shown_by_its_labels() -> None:
    telemetry = Telemetry(TelemetryConfig())
    for status in ("200", "200", "503"):
        telemetry.count(REQUESTS, endpoint="/x", route="local", status=status)
    telemetry.observe(REQUEST_SECONDS, 0.03, endpoint="/x", route="local")
    telemetry.gauge(STORE_UP, lambda: [(1.0, {})])
    telemetry.gauge(WORKER_VALUE, lambda: [(2.0, {"name": "waiting"}), (3.0, {"name": "running"})])
    lines = telemetry.exposition().decode().splitlines()
    assert 'magnitude_requests_total{endpoint="/x",route="local",status="200"} 2.0' in lines
    assert 'magnitude_requests_total{endpoint="/x",route="local",status="503"} 1.0' in lines
    assert 'magnitude_request_seconds_bucket{endpoint="/x",le="0.025",route="local"} 0.0' in lines
    assert 'magnitude_request_seconds_bucket{endpoint="/x",le="0.05",route="local"} 1.0' in lines
    assert "magnitude_store_up 1.0" in lines
    assert [line for line in lines if line.startswith("magnitude_worker{")] == [
        'magnitude_worker{name="waiting"} 2.0',
        'magnitude_worker{name="running"} 3.0',
    ]
    assert not any("_created" in line for line in lines)


def test_without_an_endpoint_nothing_is_traced() -> None:
    with Telemetry(TelemetryConfig(trace_ratio=1.0)).span(SPAN_REQUEST) as span:
        assert span is None
