"""Streams of the Responses and Messages APIs, read strictly, and what is asked through them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from magnitude_engine import api
from magnitude_proxy.config import ProxyConfig, UpstreamConfig, WorkerConfig
from testkit.proxy import Reply, proxy_config
from testkit.routes import ScriptedRoute
from testkit.upstream import chunk, sse

# An answer of a model that thinks, whole and as a stream; servers differ in the name of the field.
THOUGHTFUL = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm. So."},
            "finish_reason": "stop",
        }
    ]
}
THOUGHTS = sse(chunk(reasoning="Hm. "), chunk(reasoning="So."), chunk("Yes."), chunk(finish="stop"), "[DONE]")


def worker_and_upstream(folder: Path, **changes: Any) -> ProxyConfig:
    """Returns settings of a proxy with a worker and one upstream, for scripted routes in their place."""
    upstreams = (UpstreamConfig(name="u0", url="http://127.0.0.1:9/v1"),)
    return proxy_config(folder, worker=WorkerConfig(mode="attach", socket="unused"), upstreams=upstreams, **changes)


def named_events(reply: Reply) -> list[dict[str, Any]]:
    """Returns the events of a stream; each frame must have a name, and its data the same as `type`."""
    assert reply.status == 200, reply.body
    assert str(reply.header("content-type")).startswith("text/event-stream")
    events = []
    *frames, rest = reply.body.decode().split("\n\n")
    assert rest == ""
    for frame in frames:
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def asked(route: ScriptedRoute) -> api.Generate:
    """Returns what a route was asked last, without what differs between any two requests."""
    request = route.seen[-1].request
    sampling = msgspec.structs.replace(request.sampling, seed=0)
    return msgspec.structs.replace(request, request="", epoch=0, step=0, session="", run="", sampling=sampling)
