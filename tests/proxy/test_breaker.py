"""Circuit breaker and retry budget over a clock moved by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnitude_proxy.routing.breaker import Breaker, RetryBudget
from testkit.clock import ManualClock


def opened(clock: ManualClock) -> Breaker:
    breaker = Breaker(5, 30.0, clock)
    for turn in range(5):
        breaker.begin()
        assert breaker.fail() is (turn == 4)
    return breaker


def test_opens_after_consecutive_failures_only() -> None:
    breaker = Breaker(3, 30.0, ManualClock())
    for _ in range(10):
        breaker.begin()
        assert not breaker.fail()
        breaker.begin()
        assert not breaker.fail()
        breaker.succeed()
        assert breaker.allows()


def test_one_probe_after_the_pause() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(29.9)
    assert not breaker.allows()
    clock.advance(0.1)
    assert breaker.allows()
    breaker.begin()
    assert not breaker.allows()
    breaker.succeed()
    assert breaker.allows()


def test_a_failed_probe_opens_for_another_pause() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(30)
    breaker.begin()
    assert not breaker.fail()
    clock.advance(29)
    assert not breaker.allows()
    clock.advance(1)
    assert breaker.allows()


def test_an_abandoned_probe_lets_the_next_one_in() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(30)
    breaker.begin()
    breaker.abandon()
    assert breaker.allows()


def test_content_of_the_probe_closes_on_probation() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(30)
    breaker.begin()
    breaker.alive()
    assert breaker.allows()
    assert breaker.fail()
    assert not breaker.allows()


def test_old_attempts_neither_lengthen_the_pause_nor_count() -> None:
    clock = ManualClock()
    breaker = opened(clock)
    clock.advance(20)
    assert not breaker.fail()
    clock.advance(10)
    assert breaker.allows()


def test_holds_count_down_and_never_shorten() -> None:
    clock = ManualClock()
    breaker = Breaker(5, 30.0, clock)
    assert breaker.held_s() == 0
    breaker.hold(10)
    breaker.hold(2)
    clock.advance(4)
    assert breaker.held_s() == 6
    clock.advance(7)
    assert breaker.held_s() == 0


def test_the_budget_is_a_fifth_of_the_active_but_at_least_three() -> None:
    budget = RetryBudget(0.2, 3)
    tickets = [budget.ticket() for _ in range(20)]
    for ticket in tickets[:2]:
        ticket.__enter__()
    for _ in range(3):
        assert budget.available()
        tickets[0].spend()
    assert not budget.available()
    for ticket in tickets[2:]:
        ticket.__enter__()
    assert budget.available()
    tickets[1].spend()
    assert not budget.available()
    tickets[0].__exit__(None, None, None)
    assert budget.available()


@pytest.mark.thorough
@given(st.lists(st.integers(0, 4), max_size=30))
def test_the_budget_is_whole_again_when_nothing_is_active(spent: list[int]) -> None:
    budget = RetryBudget(0.2, 3)
    for count in spent:
        with budget.ticket() as ticket:
            for _ in range(count):
                ticket.spend()
            assert budget.available() is (count < 3)
    assert budget.available()


def test_no_retries_when_none_are_configured() -> None:
    budget = RetryBudget(0.0, 0)
    with budget.ticket():
        assert not budget.available()
