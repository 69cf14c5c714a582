"""Which route answers a step, and what follows a failure: pure functions over what is known at that moment.

first_action ── Take ──► attempt ── Failed ──► next_action ── Take (another route, before content)
     │                                              ├──────── Wait (the worker restarts; go on there)
     └──────── Fail                                 └──────── Fail
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_proxy.routing.route import Step, Taken

LOCAL = "local"
MAX_RESTARTS = 3

REFUSALS = frozenset({"context_length_exceeded", "unsupported_feature"})
UPSTREAM_FINAL = frozenset({400, 404, 413, 422})
_MOVABLE = REFUSALS | {"worker_lost", "overloaded", "deadline_exceeded"}
_STATUS_CODE = "upstream_http_"
# What a client is told to wait for a worker that starts.
_STARTING_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class RouteView:
    """One route as it is now, in the order of preference that the configuration gives.

    Attributes:
        available, coming: the route's own words.
        admitted: its breaker lets an attempt through.
        held_s: seconds until its Retry-After has passed.
        failing: its last attempt failed.
    """

    name: str
    available: bool = True
    admitted: bool = True
    held_s: float = 0.0
    failing: bool = False
    coming: bool = True

    @property
    def usable(self) -> bool:
        """True when an attempt may start now."""
        return self.available and self.admitted and self.held_s <= 0


Snapshot = tuple[RouteView, ...]


class Take(NamedTuple):
    """Let `route` answer; `retry` says that the attempt counts against the retry budget."""

    route: str
    retry: bool = False


class Wait(NamedTuple):
    """Wait for the local worker's restart and continue there with what the client already has."""


class Fail(NamedTuple):
    """Tell the client."""

    failed: api.Failed
    denied: bool = False


Action = Take | Wait | Fail


class Tried(NamedTuple):
    """One attempt that failed: its route and the code of its failure."""

    route: str
    code: str


@dataclass(frozen=True, slots=True)
class CallState:
    """One request after an attempt has failed.

    Attributes:
        tried: the failed attempts in order, the present one last.
        committed, resumable: see `Transcript`.
        restarts: how often this request has waited for the worker.
        budget: the retry budget has room.
    """

    tried: tuple[Tried, ...]
    committed: bool = False
    resumable: bool = False
    restarts: int = 0
    budget: bool = True


def plan_routes(step: Step, snapshot: Snapshot) -> tuple[str, ...]:
    """Returns the routes that may answer `step` now, best first: the worker, then upstreams as configured.

    A worker that would be the only one left is used in spite of its open breaker: refusing would be worse.
    """
    fitting = [view for view in snapshot if not (view.name == LOCAL and step.local_refusal)]
    fitting.sort(key=lambda view: view.name != LOCAL)
    usable = tuple(view.name for view in fitting if view.usable)
    return usable or tuple(view.name for view in fitting if view.name == LOCAL and view.available)


def first_action(step: Step, snapshot: Snapshot) -> Action:
    """Returns the route to begin with; without one, Wait while the worker may come back, else the failure."""
    plan = plan_routes(step, snapshot)
    if plan:
        return Take(plan[0])
    if step.local_refusal and not upstreams(snapshot):
        return Fail(step.local_refusal)
    return Wait() if step.local_refusal is None and worker_coming(snapshot) else Fail(nothing_left(step, snapshot))


def next_action(step: Step, snapshot: Snapshot, state: CallState, failure: api.Failed) -> Action:
    """Returns what follows the failure of the last attempt in `state.tried`."""
    failed_route = state.tried[-1].route
    lost_worker = failed_route == LOCAL and failure.code == "worker_lost"
    worker_restarts = lost_worker and state.restarts < MAX_RESTARTS and worker_coming(snapshot)
    if state.committed:
        return Wait() if worker_restarts and state.resumable else Fail(client_failure(state, snapshot, failure))
    if failed_route == LOCAL and failure.code in REFUSALS and not upstreams(snapshot):
        return Fail(failure)
    if not (failure.retryable or failure.code in _MOVABLE):
        return Fail(failure)
    target = next_route(step, snapshot, state)
    if target is not None:
        if target.retry and not state.budget:
            return Fail(client_failure(state, snapshot, failure), denied=True)
        return target
    if worker_restarts or _worker_could(step, snapshot, state, failure):
        return Wait()
    return Fail(client_failure(state, snapshot, failure))


def _worker_could(step: Step, snapshot: Snapshot, state: CallState, failure: api.Failed) -> bool:
    """True when upstreams have no words for a request that the worker will answer once it is back."""
    away = step.local_refusal is None and worker_coming(snapshot) and all(one.route != LOCAL for one in state.tried)
    return away and failure.code in REFUSALS and state.restarts < MAX_RESTARTS


def next_route(step: Step, snapshot: Snapshot, state: CallState) -> Take | None:
    """Returns the best route that this request has not tried, or None.

    The budget counts what could multiply load: attempts after an upstream has been asked. A request that leaves
    the worker for its first upstream puts no more load there than it would without a worker. A connection
    that an upstream closed before answering (a kept-alive one, as a rule) is tried once more on that upstream.
    A worker that was left for being slow gets the request back when nothing else answered.
    """
    before = [one.route for one in state.tried]
    asked_upstream = any(name != LOCAL for name in before)
    plan = plan_routes(step, snapshot)
    for name in plan:
        if name not in before:
            return Take(name, retry=asked_upstream or (name == LOCAL and bool(before)))
    if not state.tried:
        return None
    last = state.tried[-1]
    if last.code == "upstream_disconnected" and last.route in plan and before.count(last.route) < 2:
        return Take(last.route, retry=True)
    slow = Tried(LOCAL, "deadline_exceeded") in state.tried and before.count(LOCAL) == 1
    if slow and last.route != LOCAL and LOCAL in plan:
        return Take(LOCAL, retry=True)
    return None


def client_failure(state: CallState, snapshot: Snapshot, failure: api.Failed) -> api.Failed:
    """Returns `failure` as the client is told: a busy upstream is 429, the operator's mistakes are 503."""
    message = failure.message
    if len(state.tried) > 1:
        before = ", ".join(f"{one.route} ({one.code})" for one in state.tried[:-1])
        message = f"{message}; tried before: {before}"
    status = upstream_status(failure.code)
    # A worker that starts is not busy.
    if status == 429 or (failure.retry_after_s is not None and failure.code != "unavailable"):
        held = [view.held_s for view in snapshot if view.held_s > 0]
        wait = min([*held, *([failure.retry_after_s] if failure.retry_after_s is not None else [])], default=1.0)
        return msgspec.structs.replace(
            failure, code="overloaded", message=message, retryable=True, retry_after_s=wait, upstream_code=None
        )
    if status is not None and operators_fault(status):
        return msgspec.structs.replace(failure, code="unavailable", message=message, upstream_code=None)
    return msgspec.structs.replace(failure, message=message)


def first_taken(step: Step, snapshot: Snapshot, route: str) -> Taken:
    """Returns the label of a request's first route; `fallback:` when a better one had to be passed over."""
    wanted = [view for view in snapshot if not (view.name == LOCAL and step.local_refusal)]
    best = min(wanted, key=lambda view: view.name != LOCAL)
    if best.name != route:
        reason = "overloaded" if best.held_s > 0 else "unavailable" if not best.available else "breaker_open"
        return Taken(f"fallback:{route}", reason)
    if route == LOCAL:
        return Taken(LOCAL)
    refusal = step.local_refusal.code if step.local_refusal else None
    return Taken(f"upstream:{route}", refusal if refusal in REFUSALS else None)


def blames_route(failure: api.Failed) -> bool:
    """True when `failure` should count against its route's breaker: it could not answer a fair request."""
    if failure.code in REFUSALS or failure.code in ("overloaded", "answer_invalid"):
        return False
    status = upstream_status(failure.code)
    if status is not None:
        return status not in UPSTREAM_FINAL and not (status == 429 and failure.retry_after_s is not None)
    return failure.retryable or failure.code in ("worker_lost", "deadline_exceeded")


def upstream_status(code: str) -> int | None:
    """Returns the HTTP status inside an `upstream_http_STATUS` code, else None."""
    return int(code.removeprefix(_STATUS_CODE)) if code.startswith(_STATUS_CODE) else None


def status_code(status: int) -> str:
    """Returns the failure code of an upstream's HTTP status."""
    return f"{_STATUS_CODE}{status}"


def operators_fault(status: int) -> bool:
    """True for statuses that say the upstream is set up wrongly (key, URL, redirect), not that the request is."""
    return status < 500 and status not in UPSTREAM_FINAL and status not in (408, 409, 425, 429)


def worker_coming(snapshot: Snapshot) -> bool:
    """True when there is a worker that will answer soon, if it does not now."""
    return any(view.name == LOCAL and (view.available or view.coming) for view in snapshot)


def upstreams(snapshot: Snapshot) -> bool:
    """True when at least one upstream is configured."""
    return any(view.name != LOCAL for view in snapshot)


def nothing_left(step: Step, snapshot: Snapshot) -> api.Failed:
    """Returns the failure of a step that no route can take now."""
    request, epoch = step.request.request, step.request.epoch
    held = [view.held_s for view in snapshot if view.held_s > 0]
    if held:
        return api.Failed(
            request=request,
            epoch=epoch,
            code="overloaded",
            message=f"every upstream asked for a pause; try again in {max(1, round(min(held)))} s",
            retryable=True,
            retry_after_s=min(held),
        )
    states = ", ".join(f"{view.name}: {_state(view)}" for view in snapshot)
    hint = f"no route can answer now ({states}); try again shortly" if states else _NO_ROUTES
    again = _STARTING_PAUSE_S if worker_coming(snapshot) else None
    return api.Failed(
        request=request, epoch=epoch, code="unavailable", message=hint, retryable=True, retry_after_s=again
    )


def _state(view: RouteView) -> str:
    if view.available:
        return "breaker open"
    return "the model is being loaded" if view.name == LOCAL and view.coming else "not ready"


_NO_ROUTES = "neither a worker nor an upstream is configured; start the worker or name a server with --upstream URL"
