"""The scheduler over many steps, with the product's own page accounts: everything ends, nothing is computed twice."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.fairness import RunKey
from magnitude_engine.kv.manager import pages_for
from magnitude_engine.scheduler import PATIENCE_S, Order
from testkit.scheduling import Simulator, Task

POOL = 12


class Plan(NamedTuple):
    """A sequence to come: its page contents, further tokens, output, run, priority, and steps since the last one."""

    pages: tuple[int, ...]
    rest: int
    output: int
    run: int
    priority: int
    pause: int


def task(arrival: int, prompt: tuple[int, ...], output: int = 2, run: str = "", priority: int = 0) -> Task:
    return Task(Order(priority, arrival, 0), prompt, output, RunKey("t", run or str(arrival)))


def pages(*contents: int) -> tuple[int, ...]:
    return tuple(content for content in contents for _ in range(16))


plans = st.builds(
    Plan,
    pages=st.lists(st.integers(0, 2), max_size=6).map(tuple),
    rest=st.integers(1, 16),
    output=st.integers(1, 40),
    run=st.integers(0, 2),
    priority=st.integers(0, 1),
    pause=st.integers(0, 9),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(plans, min_size=1, max_size=12), st.integers(1, 5), st.sampled_from([8, 40, 200]))
def test_everything_ends_and_never_needs_more_pages_than_there_are(
    arrivals: list[Plan], seats: int, budget: int
) -> None:
    """The simulator checks at every step that what was admitted fits and that somebody advances."""
    sim = Simulator(POOL, seats, budget)
    ended: list[Task] = []
    sim.ended = ended.append
    for number, plan in enumerate(arrivals):
        for _ in range(plan.pause):
            sim.step()
            sim.manager.check_integrity()
        prompt = pages(*plan.pages) + tuple(range(100, 100 + plan.rest))
        assert pages_for(len(prompt) + plan.output) <= POOL
        sim.submit(task(number, prompt, plan.output, str(plan.run), plan.priority))
    sim.finish()
    assert len(ended) == len(arrivals)
    assert sim.manager.available == POOL
    assert not len(sim.prefixes)


@pytest.mark.thorough
@pytest.mark.parametrize("seats", [1, 3, 8])
@pytest.mark.parametrize("budget", [24, 100, 1000])
def test_a_prefix_is_computed_once_for_all_its_members(seats: int, budget: int) -> None:
    groups, members, prefix, suffix = 4, 5, 7 * 16, 11
    sim = Simulator(pages=400, seats=seats, budget=budget)
    # Members of the groups arrive in turn, one a step.
    for number in range(groups * members):
        own = tuple(range(1000 * number + 1000, 1000 * number + 1000 + suffix))
        sim.submit(task(number, pages(*[50 + number % groups] * 7) + own, output=9))
        sim.step()
    sim.finish()
    assert sim.prompt_rows == groups * prefix + groups * members * suffix


def test_without_the_names_of_pages_the_same_prefix_is_computed_again_and_again() -> None:
    sim = Simulator(pages=400, seats=8, budget=24, together=False)
    for number in range(4):
        sim.submit(task(number, (*pages(*[50] * 7), 1000 + number)))
    sim.finish()
    assert sim.prompt_rows > 2 * 7 * 16


def test_a_tree_of_prefixes_is_computed_node_by_node_once() -> None:
    """Three levels of two: 2 + 4 + 8 pages, and one token for each of the eight leaves."""
    sim = Simulator(pages=400, seats=8, budget=64)
    for number, path in enumerate(itertools.product((1, 2), repeat=3)):
        contents = (path[0], 10 * path[0] + path[1], 100 * path[0] + 10 * path[1] + path[2])
        sim.submit(task(number, (*pages(*contents), 7)))
    sim.finish()
    assert sim.prompt_rows == (2 + 4 + 8) * 16 + 8


def test_members_of_a_group_fit_together_where_their_own_prompts_would_not() -> None:
    sim = Simulator(pages=40, seats=8, budget=1000)
    for number in range(8):
        sim.submit(task(number, (*pages(*[50] * 20), 1000 + number), output=8))
    sim.step()
    sim.step()
    assert len(sim.running) == 8
    sim.finish()
    assert not sim.preemptions


def test_whoever_needs_a_prefix_lends_its_priority_to_the_one_that_computes_it() -> None:
    """An urgent request needs what a lazy one is computing, while prompts of middling priority keep coming."""
    sim = Simulator(pages=4000, seats=64, budget=16)
    sim.submit(task(0, (*pages(*[50] * 20), 1), priority=9))
    sim.step()
    urgent = task(1, (*pages(*[50] * 20), 2), output=1, priority=0)
    sim.submit(urgent)
    for number in range(2, 42):
        sim.submit(task(number, (*pages(*range(1000 + 20 * number, 1020 + 20 * number)), 3), priority=5))
        sim.step()
    assert urgent.done
    assert sim.prompt_rows <= 41 * 16 + 41


def test_a_long_served_run_gets_its_turn_beside_a_flood_of_newcomers() -> None:
    """Each newcomer is a run of its own and starts at the floor, so by service alone it would always go first."""
    sim = Simulator(pages=400, seats=2, budget=64)
    # A quiet run, active all the time, keeps the floor low.
    sim.submit(task(0, (1,), output=4000, run="quiet"))
    sim.service.charge(RunKey("t", "busy"), 0.0, prompt_rows=100_000)
    late = task(1, (5,), output=1, run="busy")
    sim.submit(late)
    number = 2
    while not late.done:
        for _ in range(2):
            sim.submit(task(number, (number,), output=3))
            number += 1
        sim.step()
    assert late.admitted_s is not None
    assert 10 < late.admitted_s <= PATIENCE_S + 3


@pytest.mark.thorough
def test_no_prompt_that_runs_is_starved_of_rows_by_newcomers() -> None:
    """Newcomers whose run was served less fill every chunk; the old one still advances when its patience is over."""
    sim = Simulator(pages=2000, seats=50, budget=16)
    sim.submit(task(0, (1,), output=10_000, run="quiet"))
    sim.service.charge(RunKey("t", "busy"), 0.0, prompt_rows=100_000)
    old = task(1, pages(*range(100, 110)), output=1, run="busy")
    sim.submit(old)
    for number in range(2, 400):
        if old.done:
            break
        sim.submit(task(number, (number,) * 16, output=1))
        sim.step()
    assert old.done
