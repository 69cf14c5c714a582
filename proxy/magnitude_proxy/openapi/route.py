"""One route of a listener: its handler, and what it takes and gives, for the router and for the document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, NamedTuple

from magnitude_proxy.errors import ErrorBody
from magnitude_proxy.middleware import Handler
from magnitude_proxy.wire.events import STREAMS

JSON = "application/json"
EVENT_STREAM = "text/event-stream"
# The data of the last event of OpenAI's older streams.
Done = Literal["[DONE]"]

# Media types with the types of which the body, an event's data or a line is one.
Content = dict[str, tuple[Any, ...]]


class Parameter(NamedTuple):
    """A field of the query or a header that a route reads; `schema` is JSON Schema."""

    name: str
    place: Literal["query", "header"]
    schema: Mapping[str, Any]
    description: str


@dataclass(frozen=True, slots=True)
class Route:
    """One route.

    Attributes:
        path: as the router has it.
        gives, takes: the bodies of a 200 and of the request; see `json`, `streamed` and `lines`.
        optional: the request's body may be left out.
        refuses: statuses of errors besides those that every route can give.
        error: the struct of its errors.
        unwell: the struct of its 503, where that is no error.
        upstreams: an upstream may answer; its refusals are passed on.
        parameters: what it reads besides the path and the body.
        headers: those of its answers, by their names in `document.HEADERS`.
        open: it needs no key.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Handler
    _: KW_ONLY
    gives: Content
    takes: Content = field(default_factory=dict)
    optional: bool = False
    refuses: tuple[int, ...] = ()
    error: type = ErrorBody
    unwell: type | None = None
    parameters: tuple[Parameter, ...] = ()
    headers: tuple[str, ...] = ()
    upstreams: bool = False
    open: bool = False


def json(*kinds: Any) -> Content:
    """Returns a JSON body that is one of these."""
    return {JSON: kinds}


def streamed(*kinds: Any) -> Content:
    """Returns a stream of server-sent events whose data is one of these each."""
    return {EVENT_STREAM: kinds}


def lines(*kinds: Any) -> Content:
    """Returns a body of lines that are JSON of one of these each."""
    return dict.fromkeys(STREAMS, kinds)
