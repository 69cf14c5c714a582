"""What a route is: something that turns one step of an agent into a stream of answer events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from magnitude_engine import api

Kind = Literal["chat", "completions"]


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a session, in both forms that a route may need.

    Attributes:
        kind: which endpoint the client called.
        request: the neutral form, for the worker. `request.epoch` is the session's lease epoch.
        body: the client's own JSON body, for an upstream; unknown fields included, `magnitude` removed.
        stream: whether the client asked for a stream.
        local_refusal: why the worker cannot serve this request, when it cannot (an upstream may).
        upstreams: names of the upstreams that take the model it asks for; None for any.
    """

    kind: Kind
    request: api.Generate
    body: dict[str, Any]
    stream: bool
    local_refusal: api.Failed | None = None
    upstreams: frozenset[str] | None = None


class Route(Protocol):
    """The local worker or one upstream."""

    @property
    def name(self) -> str:
        """`local`, or the upstream's configured name."""

    def available(self) -> bool:
        """True when an attempt has a chance: connected and ready, breaker not open. Costs nothing."""

    def coming(self) -> bool:
        """True when a route that is not available is expected to be so soon without anybody's help."""

    def answer(self, step: Step, attempt: int) -> AsyncGenerator[api.AnswerEvent, None]:
        """Yields the events of `step`, ending with Completed or Failed.

        Closing the generator cancels the work behind it before it returns. Problems of the route (connection,
        HTTP status, broken stream) are reported as a Failed event with `retryable` set, never raised.
        `attempt` counts up over the attempts of one request and is sent as the frames' fence.
        """


class Taken(NamedTuple):
    """Which route answers now.

    Attributes:
        label: value of the `x-magnitude-route` header: `local`, `upstream:NAME` or `fallback:NAME`.
        reason: why the first route was left, as a code such as `worker_lost` or `deadline_exceeded`.
    """

    label: str
    reason: str | None = None
