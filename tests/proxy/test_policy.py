"""Which route comes next: the tables of `policy`, without any input or output."""

from __future__ import annotations

import pytest

from magnitude_engine import api
from magnitude_proxy import errors
from magnitude_proxy.routing.policy import (
    MAX_RESTARTS,
    CallState,
    Fail,
    RouteView,
    Take,
    Tried,
    Wait,
    blames_route,
    client_failure,
    first_action,
    first_taken,
    next_action,
    nothing_left,
    plan_routes,
)
from magnitude_proxy.routing.route import Taken
from testkit.routes import failed, make_step

LOCAL = RouteView("local")
A = RouteView("a")
B = RouteView("b")
STEP = make_step()
REFUSED = failed("context_length_exceeded", retryable=False)


def view(name: str, *, available: bool = True, admitted: bool = True, held_s: float = 0.0) -> RouteView:
    return RouteView(name, available, admitted, held_s)


def test_the_worker_comes_first_then_upstreams_as_configured() -> None:
    assert plan_routes(STEP, (B, A, LOCAL)) == ("local", "b", "a")


@pytest.mark.parametrize(
    "blocked",
    [view("b", available=False), view("b", admitted=False), view("b", held_s=3)],
)
def test_blocked_routes_are_left_out(blocked: RouteView) -> None:
    assert plan_routes(STEP, (LOCAL, blocked, A)) == ("local", "a")


def test_a_worker_that_is_the_last_one_is_used_despite_its_breaker() -> None:
    tripped = view("local", admitted=False)
    assert plan_routes(STEP, (tripped, A)) == ("a",)
    assert plan_routes(STEP, (tripped, view("a", held_s=9))) == ("local",)
    assert plan_routes(STEP, (view("a", admitted=False),)) == ()


def test_what_the_worker_refuses_goes_upstream_or_back() -> None:
    step = make_step()
    refused = type(step)(step.kind, step.request, step.body, step.stream, REFUSED)
    assert first_action(refused, (LOCAL, A)) == Take("a")
    assert first_action(refused, (LOCAL,)) == Fail(REFUSED)
    blocked = first_action(refused, (LOCAL, view("a", admitted=False)))
    assert isinstance(blocked, Fail)
    assert blocked.failed.code == "unavailable"
    assert first_taken(refused, (LOCAL, A), "a") == Taken("upstream:a", "context_length_exceeded")


def test_no_route_says_what_is_missing_or_when_to_come_back() -> None:
    nothing = first_action(STEP, ())
    assert isinstance(nothing, Fail)
    assert "--upstream" in nothing.failed.message
    held = first_action(STEP, (view("a", held_s=12), view("b", held_s=7)))
    assert isinstance(held, Fail)
    assert (held.failed.code, held.failed.retry_after_s) == ("overloaded", 7)
    starting = nothing_left(STEP, (view("local", available=False), view("a", admitted=False)))
    assert (starting.code, starting.retry_after_s) == ("unavailable", 5)
    assert "local: the model is being loaded, a: breaker open" in starting.message
    down = nothing_left(STEP, (RouteView("local", available=False, coming=False), view("a", available=False)))
    assert (down.code, down.retry_after_s) == ("unavailable", None)
    assert "local: not ready, a: not ready" in down.message


def test_a_request_waits_for_a_worker_that_starts_but_not_for_an_upstream_that_is_down() -> None:
    assert first_action(STEP, (view("local", available=False),)) == Wait()
    assert isinstance(first_action(STEP, (view("a", admitted=False),)), Fail)


@pytest.mark.parametrize(
    ("snapshot", "route", "taken"),
    [
        ((LOCAL, A), "local", Taken("local")),
        ((A, B), "a", Taken("upstream:a")),
        ((view("local", available=False), A), "a", Taken("fallback:a", "unavailable")),
        ((view("local", admitted=False), A), "a", Taken("fallback:a", "breaker_open")),
        ((view("a", held_s=5), B), "b", Taken("fallback:b", "overloaded")),
    ],
)
def test_labels(snapshot: tuple[RouteView, ...], route: str, taken: Taken) -> None:
    assert first_taken(STEP, snapshot, route) == taken


def state(*tried: tuple[str, str], **fields: object) -> CallState:
    return CallState(tuple(Tried(*one) for one in tried), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("status", [400, 404, 413, 422])
def test_client_errors_of_an_upstream_are_final(status: int) -> None:
    failure = failed(f"upstream_http_{status}", retryable=False)
    assert next_action(STEP, (A, B), state(("a", failure.code)), failure) == Fail(failure)


@pytest.mark.parametrize("status", [301, 401, 402, 403, 405, 408, 409, 429, 500, 502, 503, 504])
def test_other_statuses_try_the_next_upstream(status: int) -> None:
    failure = failed(f"upstream_http_{status}")
    assert next_action(STEP, (A, B), state(("a", failure.code)), failure) == Take("b", retry=True)


@pytest.mark.parametrize("status", [302, 401, 403, 405])
def test_the_operators_mistakes_are_not_told_as_the_clients(status: int) -> None:
    failure = failed(f"upstream_http_{status}")
    action = next_action(STEP, (A,), state(("a", failure.code)), failure)
    assert isinstance(action, Fail)
    assert action.failed.code == "unavailable"
    assert errors.from_failed(action.failed).http_status == 503


def test_the_last_busy_upstream_is_a_429_with_its_pause() -> None:
    failure = failed("upstream_http_503", retry_after_s=20.0)
    action = next_action(STEP, (view("a", held_s=20.0),), state(("a", failure.code)), failure)
    assert isinstance(action, Fail)
    error = errors.from_failed(action.failed)
    assert (error.http_status, error.headers) == (429, {"Retry-After": "20"})
    plain = client_failure(state(("a", "upstream_http_429")), (A,), failed("upstream_http_429"))
    assert (plain.code, plain.retry_after_s) == ("overloaded", 1.0)


def test_upstream_refusals_keep_message_param_and_code() -> None:
    failure = failed("upstream_http_400", retryable=False, param="messages", upstream_code="string_too_long")
    error = errors.from_failed(failure)
    assert (error.http_status, error.param, error.code) == (400, "messages", "string_too_long")


def test_an_answer_that_failed_twice_is_not_asked_for_again() -> None:
    error = errors.from_failed(failed("answer_invalid"))
    assert (error.http_status, error.headers) == (503, {"x-should-retry": "false"})


@pytest.mark.parametrize("code", ["worker_lost", "deadline_exceeded", "numeric_failure", "overloaded"])
def test_leaving_the_worker_for_a_first_upstream_costs_no_budget(code: str) -> None:
    failure = failed(code)
    assert next_action(STEP, (LOCAL, A), state(("local", code), budget=False), failure) == Take("a")


def test_an_empty_budget_ends_with_the_failure() -> None:
    failure = failed("upstream_http_500")
    action = next_action(STEP, (A, B), state(("a", failure.code), budget=False), failure)
    assert action == Fail(failure, denied=True)


def test_the_client_hears_what_was_tried() -> None:
    failure = failed("upstream_unreachable")
    tried = state(("local", "worker_lost"), ("a", "upstream_http_500"), ("b", failure.code))
    action = next_action(STEP, (A, B), tried, failure)
    assert isinstance(action, Fail)
    assert action.failed.message.endswith("tried before: local (worker_lost), a (upstream_http_500)")


def test_the_workers_refusal_moves_or_returns() -> None:
    tried = state(("local", REFUSED.code))
    assert next_action(STEP, (LOCAL, A), tried, REFUSED) == Take("a")
    assert next_action(STEP, (LOCAL,), tried, REFUSED) == Fail(REFUSED)
    invalid = failed("invalid_value", retryable=False)
    assert next_action(STEP, (LOCAL, A), state(("local", "invalid_value")), invalid) == Fail(invalid)


def test_a_closed_connection_is_tried_once_more_on_the_only_upstream() -> None:
    failure = failed("upstream_disconnected")
    once = state(("a", failure.code))
    assert next_action(STEP, (A,), once, failure) == Take("a", retry=True)
    assert next_action(STEP, (A, B), once, failure) == Take("b", retry=True)
    twice = next_action(STEP, (A,), state(("a", failure.code), ("a", failure.code)), failure)
    assert isinstance(twice, Fail)


def test_a_lost_worker_is_waited_for_when_nothing_else_can_answer() -> None:
    lost = failed("worker_lost")
    down = view("local", available=False)
    tried = state(("local", "worker_lost"))
    assert next_action(STEP, (down,), tried, lost) == Wait()
    worn = state(("local", "worker_lost"), restarts=MAX_RESTARTS)
    assert isinstance(next_action(STEP, (down,), worn, lost), Fail)


@pytest.mark.parametrize(
    ("route", "code", "resumable", "waits"),
    [
        ("local", "worker_lost", True, True),
        ("local", "worker_lost", False, False),
        ("local", "deadline_exceeded", True, False),
        ("a", "upstream_stream_broken", True, False),
    ],
)
def test_after_content_only_a_lost_worker_is_resumed(route: str, code: str, resumable: bool, waits: bool) -> None:
    tried = state((route, code), committed=True, resumable=resumable)
    action = next_action(STEP, (LOCAL, A, B), tried, failed(code))
    assert isinstance(action, Wait if waits else Fail)


@pytest.mark.parametrize(
    ("failure", "blamed"),
    [
        (failed("worker_lost"), True),
        (failed("deadline_exceeded"), True),
        (failed("upstream_http_500"), True),
        (failed("upstream_http_401"), True),
        (failed("upstream_http_429"), True),
        (failed("upstream_http_429", retry_after_s=1.0), False),
        (failed("upstream_http_400", retryable=False), False),
        (failed("overloaded"), False),
        (failed("answer_invalid"), False),
        (REFUSED, False),
        (failed("invalid_value", retryable=False), False),
    ],
)
def test_who_is_to_blame(failure: api.Failed, blamed: bool) -> None:
    assert blames_route(failure) is blamed
