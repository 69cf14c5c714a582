"""The scheduler's decisions on snapshots."""

from __future__ import annotations

import pytest

from magnitude_engine.scheduler import (
    Measured,
    Order,
    Running,
    Seats,
    Share,
    Snapshot,
    Waiting,
    plan_rows,
    plan_seats,
    retry_after,
    row_budget,
    smooth,
)


def order(arrival: int, priority: int = 0, choice: int = 0) -> Order:
    return Order(priority, arrival, choice)


def decoding(arrival: int, tokens: int = 33, recoverable: int = 3) -> Running:
    return Running(order(arrival), tokens, tokens - 1, held=-(-(tokens - 1) // 16), recoverable=recoverable)


def seats(running: list[Running], waiting: list[Waiting], available: int, batch: int = 8) -> Seats:
    return plan_seats(Snapshot(tuple(running), tuple(waiting), available, batch))


def test_waiting_requests_enter_in_order_of_priority_then_arrival() -> None:
    waiting = [Waiting(order(1), 16), Waiting(order(2, priority=-1), 16), Waiting(order(0), 16)]
    assert seats([], waiting, available=99).admit == (order(2, priority=-1), order(0), order(1))


def test_the_batch_size_bounds_the_seats() -> None:
    waiting = [Waiting(order(i), 16) for i in range(5)]
    assert len(seats([decoding(9)], waiting, available=99, batch=3).admit) == 2


def test_choices_to_come_need_seats_and_pages() -> None:
    wide = Waiting(order(0), 16, width=3)
    assert seats([decoding(9, tokens=32)], [wide], available=99, batch=3).admit == ()
    assert seats([decoding(9, tokens=32)], [wide], available=3, batch=8).admit == ()
    assert seats([decoding(9, tokens=32)], [wide], available=4, batch=8).admit == (order(0),)
    unforked = Running(order(9), 16, 0, held=1, width=3)
    assert seats([unforked], [Waiting(order(10), 16)], available=3, batch=8).admit == ()


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    waiting = [Waiting(order(0), 1600), Waiting(order(1), 16)]
    assert seats([decoding(9)], waiting, available=50).admit == ()


def test_a_wish_for_a_smaller_batch_binds_both_ways() -> None:
    shy = Waiting(order(0), 16, batch_limit=1)
    assert seats([decoding(9)], [shy], available=99).admit == ()
    assert seats([], [shy, Waiting(order(1), 16)], available=99).admit == (order(0),)
    running = Running(order(9), 17, 16, held=1, batch_limit=2)
    assert seats([running], [Waiting(order(0), 16), Waiting(order(1), 16)], available=99).admit == (order(0),)


def test_the_pages_of_admitted_prompts_stay_reserved() -> None:
    prefilling = Running(order(0), tokens=160, computed=16, held=1)
    assert seats([prefilling], [Waiting(order(1), 16)], available=10).admit == ()
    assert seats([prefilling], [Waiting(order(1), 16)], available=11).admit == (order(1),)


def test_the_youngest_leaves_when_pages_run_out_and_nobody_enters() -> None:
    running = [decoding(2), decoding(0), decoding(1)]
    assert seats(running, [Waiting(order(9), 1)], available=1) == Seats((order(2),), ())
    assert seats([decoding(i, recoverable=0) for i in range(3)], [], available=0) == Seats((order(2), order(1)), ())


def test_the_last_one_running_never_leaves() -> None:
    assert seats([decoding(0, recoverable=0)], [], available=0).preempt == ()


def test_the_head_enters_an_empty_engine_whatever_it_needs() -> None:
    assert seats([], [Waiting(order(0), 64, width=9)], available=4).admit == (order(0),)


def test_decoders_get_one_row_and_prompts_share_the_rest_in_order() -> None:
    running = [
        Running(order(2), 500, 0, 0),
        decoding(1),
        Running(order(0), 40, 0, 0),
        decoding(3),
    ]
    assert plan_rows(running, budget=102) == (
        Share(order(0), 40),
        Share(order(1), 1),
        Share(order(2), 60),
        Share(order(3), 1),
    )


def test_prompts_advance_beside_any_number_of_decoders() -> None:
    running = [decoding(i) for i in range(20)] + [Running(order(20), 100, 0, 0), Running(order(21), 100, 0, 0)]
    assert plan_rows(running, budget=8)[-1] == Share(order(20), 16)


@pytest.mark.parametrize(
    ("few", "many", "rows"),
    [
        (None, None, 256),
        (None, Measured(200, 0.2), 240),
        (None, Measured(200, 0.001), 256),
        (None, Measured(16, 16.0), 16),
        (Measured(1, 0.101), Measured(100, 0.2), 144),
        (Measured(1, 0.5), Measured(101, 1.0), 96),
        (Measured(8, 0.3), Measured(200, 0.25), 192),
    ],
)
def test_the_row_budget_follows_what_steps_cost(few: Measured | None, many: Measured | None, rows: int) -> None:
    assert row_budget(few, many, chunk=256) == rows


@pytest.mark.parametrize(
    ("many", "alone", "rows"),
    [
        (None, 300, 256),
        (Measured(100, 1.25), 40, 40),
        (Measured(100, 1.25), 60, 60),
        (Measured(100, 1.25), 61, 40),
        (Measured(100, 1.25), 1000, 40),
        (Measured(100, 0.25), 280, 256),
        (Measured(16, 16.0), 24, 24),
    ],
)
def test_a_prompt_alone_goes_in_longer_steps_and_without_a_short_last_one(
    many: Measured | None, alone: int, rows: int
) -> None:
    assert row_budget(None, many, 256, alone) == rows


def test_the_row_budget_finds_its_way_back_from_small_steps() -> None:
    """A step costs 0.1 s and 1 ms per row; a slow spell has left steps of 16 rows behind."""
    few, many = Measured(1, 0.9), Measured(16, 1.5)
    budget = 16
    for _ in range(40):
        few = smooth(few, 1, 0.101)
        many = smooth(many, budget, 0.1 + budget / 1000)
        budget = row_budget(few, many, chunk=256)
    assert budget == 144


@pytest.mark.parametrize(
    ("waiting", "seats_", "seconds", "expected"), [(0, 8, 0.1, 1.0), (15, 8, 5.0, 10.0), (10**6, 1, 60.0, 600.0)]
)
def test_retry_after(waiting: int, seats_: int, seconds: float, expected: float) -> None:
    assert retry_after(waiting, seats_, seconds) == expected
