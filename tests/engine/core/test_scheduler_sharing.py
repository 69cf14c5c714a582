"""Prefixes in common: what they cost, who waits for whom, who goes together; and who is overtaken by whom."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnitude_engine.kv.manager import pages_for
from magnitude_engine.scheduler import (
    DECODE_COST,
    MAX_DECODE_COST,
    MIN_PREFILL_ROWS,
    PATIENCE_S,
    QUANTUM,
    Measured,
    Order,
    Running,
    Seats,
    Snapshot,
    Waiting,
    Warm,
    WarmShare,
    decode_cost,
    plan_rows,
    plan_seats,
    plan_warm,
    seat_limit,
)


def order(arrival: int, priority: int = 0) -> Order:
    return Order(priority, arrival, 0)


def prefilling(arrival: int, tokens: int = 160, priority: int = 0, **fields: object) -> Running:
    return replace(Running(order(arrival, priority), tokens, 0, held=0), **fields)  # type: ignore[arg-type]


def decoding(arrival: int, **fields: object) -> Running:
    return replace(Running(order(arrival), 33, 32, held=3, recoverable=3), **fields)  # type: ignore[arg-type]


def waiting(arrival: int, priority: int = 0, **fields: object) -> Waiting:
    return replace(Waiting(order(arrival, priority), 16), **fields)  # type: ignore[arg-type]


def seats(running: list[Running], candidates: list[Waiting], available: int = 999, batch: int = 99) -> Seats:
    return plan_seats(Snapshot(tuple(running), tuple(candidates), available, batch))


def admitted(running: list[Running], candidates: list[Waiting], available: int = 999, batch: int = 99) -> list[int]:
    return [each.arrival for each in seats(running, candidates, available, batch).admit]


def test_pages_that_running_sequences_hold_cost_nothing() -> None:
    candidate = waiting(1, tokens=160, cached=144, shared=7)
    assert admitted([decoding(0)], [candidate], available=3) == []
    assert admitted([decoding(0)], [candidate], available=4) == [1]


def test_whoever_needs_a_page_that_is_being_computed_is_held_and_others_pass() -> None:
    running = [prefilling(0, computing=frozenset((b"x", b"y")))]
    assert admitted(running, [waiting(1, next_page=b"y"), waiting(2, next_page=b"z"), waiting(3)]) == [2, 3]


def test_of_those_that_need_the_same_page_the_first_one_goes() -> None:
    candidates = [waiting(2, next_page=b"x"), waiting(1, next_page=b"x"), waiting(3, next_page=b"y")]
    assert admitted([], candidates) == [1, 3]


def test_whoever_is_held_and_overdue_keeps_its_seat_and_pages() -> None:
    running = [prefilling(0, computing=frozenset((b"x",)))]
    late = waiting(1, next_page=b"x", waited_s=PATIENCE_S)
    assert admitted(running, [late, waiting(2)], batch=2) == []
    assert admitted(running, [late, waiting(2)], batch=3) == [2]
    assert admitted(running, [late, waiting(2)], available=13) == []
    assert admitted(running, [late, waiting(2)], available=14) == [2]


def test_a_prompt_goes_as_early_as_the_first_that_waits_for_it() -> None:
    carrier, other = prefilling(0, priority=5, computing=frozenset((b"x",))), prefilling(1, priority=3)
    assert plan_rows([carrier, other], 16)[0].order == other.order
    urgent, lazy = waiting(2, priority=1, next_page=b"x"), waiting(3, priority=7, next_page=b"x")
    assert plan_rows([carrier, other], 16, [urgent, lazy])[0].order == carrier.order
    assert plan_rows([carrier, other], 16, [lazy])[0].order == other.order
    assert plan_rows([carrier, other], 16, [replace(urgent, next_page=b"y")])[0].order == other.order


def test_those_that_share_with_what_runs_come_first_then_group_by_group() -> None:
    candidates = [waiting(i, group=group) for i, group in enumerate((None, b"p", b"q", b"r", b"p", b"q", b"r", None))]
    assert admitted([decoding(9, group=b"r")], candidates) == [3, 6, 0, 1, 4, 2, 5, 7]


def test_groups_do_not_reach_over_priorities_nor_past_the_overdue() -> None:
    candidates = [waiting(1, group=b"p"), waiting(2, priority=-1), waiting(3, waited_s=PATIENCE_S), waiting(4)]
    assert admitted([decoding(9, group=b"p")], [waiting(0), *candidates]) == [2, 3, 1, 0, 4]
    overdue = [waiting(1, waited_s=PATIENCE_S), waiting(2, waited_s=PATIENCE_S, group=b"p")]
    assert admitted([decoding(9, group=b"p")], overdue) == [1, 2]


def test_the_least_served_run_goes_first_and_within_a_quantum_arrival_decides() -> None:
    candidates = [
        waiting(0, run="a", service=5 * QUANTUM),
        waiting(1, run="b", service=QUANTUM - 1),
        waiting(2, run="c", service=0.0),
    ]
    assert admitted([], candidates) == [1, 2, 0]


def test_what_a_run_has_in_hand_counts_so_that_runs_take_turns() -> None:
    branches = [waiting(i, run="a") for i in range(4)]
    assert admitted([], [*branches, waiting(4, run="b"), waiting(5, run="b")]) == [0, 4, 1, 5, 2, 3]
    assert admitted([decoding(9, run="a")], [branches[0], waiting(4, run="b")]) == [4, 0]


def test_a_long_prompt_in_hand_counts_for_what_is_not_cached_of_it() -> None:
    long = waiting(0, run="a", tokens=int(5 * QUANTUM))
    others = [waiting(1, run="a"), waiting(2, run="b"), waiting(3, run="b"), waiting(4, run="b")]
    assert admitted([], [long, *others]) == [0, 2, 3, 4, 1]
    assert admitted([], [replace(long, cached=int(5 * QUANTUM) - 1), *others]) == [0, 2, 1, 3, 4]


def test_whose_run_had_nothing_for_too_long_goes_by_arrival_with_its_first_sequence() -> None:
    starved = [waiting(i, run="a", service=9 * QUANTUM, waited_s=PATIENCE_S) for i in (3, 4)]
    assert admitted([], [waiting(0, run="b"), *starved, waiting(2, waited_s=PATIENCE_S)]) == [2, 3, 0, 4]


def test_the_run_that_was_served_most_loses_its_seat_first_but_never_the_first_one() -> None:
    served = (9 * QUANTUM, 5 * QUANTUM, 0.0, 0.0)
    running = [decoding(i, held=2, recoverable=0, service=service) for i, service in enumerate(served)]
    assert seats(running, [], available=2).preempt == (order(1), order(3))
    lazy = prefilling(4, tokens=16, priority=1)
    assert seats([*running[:3], lazy], [], available=2).preempt == (order(4, 1), order(1))


def test_prompts_are_computed_by_service_then_arrival() -> None:
    running = [prefilling(0, service=QUANTUM), prefilling(1), prefilling(2, waited_s=PATIENCE_S, service=9 * QUANTUM)]
    assert [share.order.arrival for share in plan_rows(running, 400)] == [2, 1, 0]


def test_the_seat_limit_is_the_smallest_wish() -> None:
    assert seat_limit([], 8) == 8
    assert seat_limit([decoding(0), decoding(1, batch_limit=3), decoding(2, batch_limit=5)], 8) == 3


@pytest.mark.parametrize(
    ("few", "many", "cost"),
    [
        (None, Measured(200, 0.2), DECODE_COST),
        (Measured(1, 0.1), None, DECODE_COST),
        (Measured(2, 0.02), Measured(200, 0.4), 5.0),
        (Measured(8, 0.001), Measured(200, 0.4), 1.0),
        (Measured(1, 1.0), Measured(200, 0.2), MAX_DECODE_COST),
    ],
)
def test_the_cost_of_a_decoded_row_follows_what_steps_cost(
    few: Measured | None, many: Measured | None, cost: float
) -> None:
    assert decode_cost(few, many) == cost


def warm(name: str, due_s: float = math.inf, tokens: int = 100, computed: int = 0, held: int = 0) -> Warm:
    return Warm(name, due_s, tokens, computed, held)


@pytest.mark.parametrize(
    ("items", "free", "expected"),
    [
        ([], 99, None),
        ([warm("a"), warm("b")], 99, WarmShare("a", 32)),
        ([warm("a"), warm("b", due_s=9.0), warm("c", due_s=8.0)], 99, WarmShare("c", 32)),
        ([warm("a", computed=100, held=7), warm("b", computed=90, held=6)], 99, WarmShare("b", 10)),
        ([warm("a")], 1, WarmShare("a", 16)),
        ([warm("a", computed=16, held=1), warm("b", computed=20, held=2)], 0, WarmShare("b", 12)),
        ([warm("a")], 0, None),
    ],
)
def test_background_work_goes_by_date_then_arrival_where_there_is_room(
    items: list[Warm], free: int, expected: WarmShare | None
) -> None:
    assert plan_warm(0, items, free, chunk=32) == expected


def test_background_work_stands_still_while_anybody_runs_or_waits() -> None:
    assert plan_warm(1, [warm("a")], free=99, chunk=32) is None


def running_one(draw: Random, arrival: int) -> Running:
    tokens = draw.randint(1, 200)
    computed = tokens - 1 if draw.random() < 0.3 else draw.randrange(tokens)
    held = pages_for(computed) + draw.randint(0, 2)
    return Running(
        order(arrival, draw.randint(0, 1)),
        tokens,
        computed,
        held,
        recoverable=draw.randint(0, held),
        width=draw.randint(1, 3),
        batch_limit=draw.choice((None, None, None, None, None, 9)),
        run=draw.choice((None, "a", "b")),
        service=draw.uniform(0, 1e4),
        waited_s=draw.choice((0.0, PATIENCE_S)),
        group=draw.choice((None, b"x", b"y")),
        computing=frozenset(draw.sample((b"x", b"y", b"z"), draw.choice((0, 0, 1)))),
    )


def waiting_one(draw: Random, arrival: int) -> Waiting:
    tokens = draw.randint(1, 200)
    cached = draw.randrange(tokens)
    return Waiting(
        order(arrival, draw.randint(0, 1)),
        tokens,
        width=draw.randint(1, 3),
        batch_limit=draw.choice((None, None, None, None, None, 9)),
        run=draw.choice((None, "a", "b")),
        service=draw.uniform(0, 1e4),
        waited_s=draw.choice((0.0, PATIENCE_S)),
        group=draw.choice((None, b"x", b"y")),
        cached=cached,
        shared=draw.randint(0, cached // 16),
        next_page=draw.choice((None, b"x", b"y", b"z")),
    )


def snapshot_of(seed: int) -> Snapshot:
    """Returns a random snapshot; drawing each field by itself would take Hypothesis seconds."""
    draw = Random(seed)
    arrivals = draw.sample(range(12), 12)
    running = tuple(running_one(draw, arrival) for arrival in arrivals[: draw.randint(0, 5)])
    candidates = tuple(waiting_one(draw, arrival) for arrival in arrivals[5 : 5 + draw.randint(0, 7)])
    return Snapshot(running, candidates, draw.choice((5, 30, 60, 150)), draw.randint(4, 24))


snapshots = st.integers(0, 2**32).map(snapshot_of)


@pytest.mark.thorough
@given(snapshots)
def test_what_is_admitted_never_needs_more_pages_or_seats_than_there_are(snapshot: Snapshot) -> None:
    """Reserved is what running sequences lack, a page for each choice to come, and all of a prompt not shared."""
    plan = plan_seats(snapshot)
    by_order = {w.order: w for w in snapshot.waiting}
    chosen = [by_order[each] for each in plan.admit]
    if not chosen or (not snapshot.running and len(chosen) == 1):
        return
    assert not plan.preempt
    need = sum(max(0, pages_for(r.tokens) - r.held) + r.width - 1 for r in snapshot.running)
    need += sum(pages_for(w.tokens) - w.shared + w.width for w in chosen)
    assert need <= snapshot.available
    limits = [each.batch_limit for each in (*snapshot.running, *chosen) if each.batch_limit is not None]
    assert sum(each.width for each in (*snapshot.running, *chosen)) <= min([snapshot.max_batch_size, *limits])


@pytest.mark.thorough
@given(snapshots)
def test_no_page_is_computed_by_two(snapshot: Snapshot) -> None:
    by_order = {w.order: w for w in snapshot.waiting}
    wanted = [by_order[each].next_page for each in plan_seats(snapshot).admit]
    wanted = [page for page in wanted if page is not None]
    assert len(set(wanted)) == len(wanted)
    assert not set(wanted) & {page for r in snapshot.running for page in r.computing}


@pytest.mark.thorough
@given(snapshots)
def test_the_first_never_leaves_and_nobody_leaves_without_need(snapshot: Snapshot) -> None:
    plan = plan_seats(snapshot)
    lack = sum(max(0, pages_for(r.tokens) - r.held) for r in snapshot.running) - snapshot.available
    assert bool(plan.preempt) == (lack > 0 and len(snapshot.running) > 1)
    if plan.preempt:
        assert min(r.order for r in snapshot.running) not in plan.preempt
        by_order = {r.order: r for r in snapshot.running}
        spared = [by_order[each] for each in plan.preempt[:-1]]
        gained = sum(max(0, pages_for(r.tokens) - r.held) + r.recoverable for r in spared)
        assert gained < lack, "one more left than had to"


@pytest.mark.thorough
@given(snapshots, st.integers(0, 99))
def test_decisions_do_not_depend_on_the_order_of_the_snapshot(snapshot: Snapshot, seed: int) -> None:
    draw = Random(seed)
    running = draw.sample(snapshot.running, len(snapshot.running))
    candidates = draw.sample(snapshot.waiting, len(snapshot.waiting))
    shuffled = replace(snapshot, running=tuple(running), waiting=tuple(candidates))
    assert plan_seats(shuffled) == plan_seats(snapshot)
    assert plan_rows(running, 64, candidates) == plan_rows(snapshot.running, 64, snapshot.waiting)


@pytest.mark.thorough
@given(snapshots, st.integers(1, 300))
def test_rows_keep_to_the_budget_and_somebody_advances(snapshot: Snapshot, budget: int) -> None:
    missing = {r.order: r.tokens - r.computed for r in snapshot.running}
    shares = plan_rows(snapshot.running, budget, snapshot.waiting)
    assert all(0 < rows <= missing[each] for each, rows in shares)
    assert {each for each, count in missing.items() if count == 1} <= {each for each, _ in shares}
    prompts = sum(rows for each, rows in shares if missing[each] > 1)
    assert prompts <= max(budget - sum(1 for count in missing.values() if count == 1), MIN_PREFILL_ROWS)
    assert bool(shares) == bool(snapshot.running)
