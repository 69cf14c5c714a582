"""Service per agent run, and that the scheduler keeps the runs together by it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnitude_engine.fairness import CREDIT_ROWS, RunKey, Service
from magnitude_engine.scheduler import QUANTUM, Order
from testkit.scheduling import Simulator, Task

A, B, C = (RunKey("t", name) for name in "abc")
PROMPT = 64


def test_service_is_rows_with_decoded_ones_at_their_cost() -> None:
    service = Service(decode_cost=4.0)
    service.enter(A, now=0.0)
    service.charge(A, 0.0, prompt_rows=100, decode_rows=3)
    assert service.of(A) == 112
    service.decode_cost = 2.0
    service.charge(A, 0.0, decode_rows=1)
    assert service.of(A) == 114


def test_a_newcomer_starts_at_the_least_service_of_the_active_runs() -> None:
    service = Service(decode_cost=1.0)
    service.enter(A, now=0.0)
    service.enter(B, now=0.0)
    service.charge(A, 0.0, 900)
    service.charge(B, 0.0, 500)
    assert service.of(C) == 500
    service.enter(C, now=0.0)
    assert service.of(C) == 500


def test_a_run_that_comes_back_has_what_it_had_but_little_saved_up() -> None:
    service = Service(decode_cost=1.0)
    service.enter(A, now=0.0)
    service.enter(B, now=0.0)
    service.charge(A, 0.0, 900)
    service.leave(A)
    service.charge(B, 0.0, 500)
    assert service.of(A) == 900
    service.charge(B, 0.0, 700)
    assert service.of(A) == 900
    service.charge(B, 0.0, 100_000)
    service.enter(A, now=0.0)
    assert service.of(A) == 101_200 - CREDIT_ROWS
    assert service.of(C) == 101_200


def test_the_floor_stays_when_nobody_is_active() -> None:
    service = Service(decode_cost=1.0)
    service.enter(A, now=0.0)
    service.charge(A, 0.0, 900)
    service.leave(A)
    assert service.of(B) == 900


def test_a_run_is_active_until_its_last_sequence_leaves() -> None:
    service = Service(decode_cost=1.0)
    service.enter(B, now=0.0)
    service.enter(A, now=0.0)
    service.enter(A, now=0.0)
    service.charge(A, 0.0, 10)
    service.leave(A)
    service.charge(B, 0.0, 50)
    service.enter(C, now=0.0)
    assert service.of(C) == 10


def test_what_is_computed_in_the_step_in_which_a_run_ends_counts() -> None:
    service = Service(decode_cost=1.0)
    service.enter(B, now=0.0)
    service.enter(A, now=0.0)
    service.leave(A)
    service.charge(A, 0.0, 70)
    assert service.of(A) == 70


def test_only_so_many_pausing_runs_are_remembered_the_latest_ones() -> None:
    service = Service(decode_cost=1.0, remembered=2)
    service.enter(RunKey("t", "quiet"), now=0.0)
    for run in (A, B, C):
        service.enter(run, now=0.0)
        service.charge(run, 0.0, 100)
        service.leave(run)
    assert [service.of(run) for run in (A, B, C)] == [0, 100, 100]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from("elc"), st.integers(0, 4), st.integers(0, 9000)), max_size=60))
def test_newcomers_start_ever_higher_and_nobody_who_comes_is_far_below(calls: list[tuple[str, int, int]]) -> None:
    service, newcomer, floor = Service(decode_cost=4.0, remembered=2), RunKey("t", "new"), 0.0
    for call, name, rows in calls:
        run = RunKey("t", str(name))
        before = service.of(run)
        match call:
            case "e":
                service.enter(run, now=0.0)
                assert service.of(run) == before >= floor - CREDIT_ROWS
            case "l":
                service.leave(run)
            case _:
                service.charge(run, 0.0, rows)
                assert service.of(run) == before + rows
        assert service.of(newcomer) >= floor
        floor = service.of(newcomer)


def test_a_run_waits_from_when_it_came_or_was_served_last() -> None:
    service = Service(decode_cost=1.0)
    service.enter(A, now=10.0)
    service.enter(A, now=12.0)
    assert service.waited(A, now=15.0) == 5.0
    service.charge(A, 16.0, decode_rows=1)
    assert service.waited(A, now=17.0) == 1.0
    assert service.waited(B, now=17.0) == 0.0


def turn(output: int) -> float:
    """Returns what one sequence costs: its prompt, and all but the first of its tokens decoded."""
    return PROMPT + 4.0 * (output - 1)


def contend(seats: int, output: int, steps: int, fair: bool) -> list[int]:
    """Returns how far a run of 16 branches leads over one that does one thing at a time, after each step.

    Both always have the next sequence ready; the branches were there first.
    """
    sim = Simulator(pages=200, seats=seats, budget=256, fair=fair)
    arrivals = itertools.count()

    def submit(run: RunKey) -> None:
        number = next(arrivals)
        own = tuple(range(1000 * number, 1000 * number + PROMPT))
        sim.submit(Task(Order(0, number, 0), own, output, run))

    sim.ended = lambda task: submit(task.run)
    for _ in range(16):
        submit(A)
    submit(B)
    leads: list[int] = []
    for _ in range(steps):
        sim.step()
        leads.append(sim.served[A] - sim.served[B])
    return leads


@pytest.mark.slow
@pytest.mark.parametrize(("seats", "output"), [(1, 20), (2, 20), (2, 100)])
def test_sixteen_branches_are_served_no_more_than_a_single_one(seats: int, output: int) -> None:
    """Within a quantum, which locality may decide, and one sequence on each seat, since seats are not taken away."""
    assert max(map(abs, contend(seats, output, 800, fair=True))) <= QUANTUM + seats * turn(output)


@pytest.mark.thorough
def test_by_arrival_alone_the_branches_would_leave_the_single_one_behind() -> None:
    assert contend(2, 20, 800, fair=False)[-1] > 3 * (QUANTUM + 2 * turn(20))
