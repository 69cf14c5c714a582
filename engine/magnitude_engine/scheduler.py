"""Decides who runs: which waiting sequences get a seat, who gives one up, and how many rows each computes.

Pure functions of snapshots; the engine carries the decisions out. Order is by `Order`: a lower priority number
first (as in vLLM), then arrival, then choice. Nobody overtakes the head of the queue, so nothing starves; the
first running sequence is never preempted, so it always ends, and with it every sequence that fits the pool alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magnitude_engine.kv.lease import pages_for

STEP_SECONDS = 0.25
MIN_PREFILL_ROWS = 16
SMOOTHING = 0.3


class Order(NamedTuple):
    """Place of a sequence among all, and its name: no two have the same. Smaller goes first."""

    priority: int
    arrival: int
    choice: int


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence that holds a lease.

    Attributes:
        tokens: ids known, prompt and output.
        computed: of these, in the cache.
        held: pages it holds.
        recoverable: pages that become available when it is preempted; read only when pages are short.
        width: seats it needs: itself and the choices that will be forked from its prompt.
        batch_limit: most sequences its client wants to run beside (and with) it; None for no wish.
    """

    order: Order
    tokens: int
    computed: int
    held: int
    recoverable: int = 0
    width: int = 1
    batch_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence without a lease; fields as in `Running`."""

    order: Order
    tokens: int
    width: int = 1
    batch_limit: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the decision is made from; `available` counts free pages and those that may be evicted."""

    running: tuple[Running, ...]
    waiting: tuple[Waiting, ...]
    available: int
    max_batch_size: int


class Seats(NamedTuple):
    """The sequences that lose and get their lease in this step."""

    preempt: tuple[Order, ...]
    admit: tuple[Order, ...]


class Share(NamedTuple):
    """How many rows a sequence computes in this step."""

    order: Order
    rows: int


def plan_seats(snapshot: Snapshot) -> Seats:
    """Returns who leaves and who enters.

    Sequences keep their pages for all their known tokens reserved, so that admitted prompts always get through.
    When pages are short the youngest leaves, and nobody enters in that step.
    """
    running = sorted(snapshot.running, key=lambda r: r.order)
    available = snapshot.available - sum(_need(r) for r in running)
    preempt: list[Order] = []
    while available < 0 and len(running) > 1:
        victim = running.pop()
        available += _need(victim) + victim.recoverable
        preempt.append(victim.order)
    admit = () if preempt else _admissions(running, snapshot, available)
    return Seats(tuple(preempt), admit)


def _need(sequence: Running) -> int:
    return max(0, pages_for(sequence.tokens) - sequence.held)


def _admissions(running: Sequence[Running], snapshot: Snapshot, available: int) -> tuple[Order, ...]:
    limits = [snapshot.max_batch_size, *(r.batch_limit for r in running if r.batch_limit is not None)]
    limit, seated = min(limits), sum(r.width for r in running)
    available -= seated - len(running)
    admit: list[Order] = []
    for candidate in sorted(snapshot.waiting, key=lambda w: w.order):
        limit = min(limit, candidate.batch_limit or limit)
        # One page more for the first token of each choice, so that nobody is preempted right after it entered.
        cost = pages_for(candidate.tokens) + candidate.width
        if seated and (seated + candidate.width > limit or cost > available):
            break
        admit.append(candidate.order)
        seated += candidate.width
        available -= cost
    return tuple(admit)


def plan_rows(running: Sequence[Running], budget: int) -> tuple[Share, ...]:
    """Returns how many rows each sequence computes, in order.

    Whoever lacks one token only (decoding) computes it; the rest of `budget` goes to prompts, first come first
    served, but at least `MIN_PREFILL_ROWS` so that prompts advance beside any number of decoders.
    """
    ordered = sorted(running, key=lambda r: r.order)
    decoding = sum(1 for r in ordered if r.tokens - r.computed == 1)
    left = max(budget - decoding, MIN_PREFILL_ROWS)
    shares: list[Share] = []
    for sequence in ordered:
        missing = sequence.tokens - sequence.computed
        rows = missing if missing == 1 else min(missing, left)
        if missing > 1:
            left -= rows
        if rows:
            shares.append(Share(sequence.order, rows))
    return tuple(shares)


class Measured(NamedTuple):
    """Smoothed size and time of a kind of steps."""

    rows: float
    seconds: float


def smooth(before: Measured | None, rows: int, seconds: float) -> Measured:
    """Returns the measurement with one more step in it."""
    if before is None:
        return Measured(rows, seconds)
    return Measured(
        before.rows + SMOOTHING * (rows - before.rows), before.seconds + SMOOTHING * (seconds - before.seconds)
    )


def row_budget(few: Measured | None, many: Measured | None, chunk: int) -> int:
    """Returns the rows that a step of about `STEP_SECONDS` computes, at most `chunk`.

    A step costs a fixed time (reading the weights) and a time per row; both follow from the measured steps of few
    and of many rows. Where the fixed time alone is long, smaller steps would only waste more of it: then as many
    rows are computed as cost the fixed time once more. Without measurements (`many` is None) it is `chunk`.
    """
    if many is None or many.seconds <= 0:
        return chunk
    fixed_s, row_s = 0.0, many.seconds / many.rows
    if few is not None and few.seconds < many.seconds:
        row_s = (many.seconds - few.seconds) / (many.rows - few.rows)
        fixed_s = max(0.0, few.seconds - few.rows * row_s)
    rows = int(max(STEP_SECONDS - fixed_s, fixed_s) / row_s) // MIN_PREFILL_ROWS * MIN_PREFILL_ROWS
    return min(chunk, max(rows, MIN_PREFILL_ROWS))


def retry_after(waiting: int, seats: int, request_seconds: float) -> float:
    """Returns seconds until a full queue has probably moved on: `waiting` requests through `seats` seats."""
    return min(600.0, max(1.0, (waiting + 1) / max(1, seats) * request_seconds))
