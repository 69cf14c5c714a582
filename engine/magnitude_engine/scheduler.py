"""Decides who runs: which waiting sequences get a seat, who gives one up, and how many rows each computes.

Pure functions of snapshots; the engine carries the decisions out. Who goes first is decided by, in this order:

    priority   a lower number first, strictly (as in vLLM)
    overdue    the first sequence of an agent run for which nothing was computed for `PATIENCE_S` seconds, by
               arrival: no run is overtaken for longer, and one of many sequences gains no more by it than others
    level      what the run was served and has in hand, in steps of `QUANTUM` rows above the least served
    group      for seats only: who shares a prefix with what runs, then group by group
    order      arrival, then choice

Within a level locality is free to decide, so runs differ by a quantum and no more: least attained service over a
whole program is Autellix's (arXiv 2502.13965), the quantum within which shared prefixes go together is that of
deficit longest prefix match (arXiv 2501.14312), counting work in hand is start-time fair queueing.

A prefix is computed once: whoever needs a page that another is computing is held back until it is there (SGLang
defers such requests within a batch), lends that other its place, and is passed by others meanwhile. Apart from
that nobody passes the first in line, even where its pages are not free yet.

The running sequence that is first by `Order` is never preempted, so it always ends, and with it every sequence
that fits the pool alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.lease import pages_for
from magnitude_engine.kv.retention import SessionKey

STEP_SECONDS = 0.25
# A step that computes one prompt alone keeps nobody else waiting; with the half on top it stays below a second.
ALONE_STEP_SECONDS = 0.5
MIN_PREFILL_ROWS = 16
SMOOTHING = 0.3
# Long against the time after which a contended seat or chunk is free again, so that service decides before it does.
PATIENCE_S = 30.0
# Rows. Large against a chunk, so that prompts of one level are computed one after the other rather than in turns.
QUANTUM = 2048.0
DECODE_COST = 4.0
MAX_DECODE_COST = 64.0


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
        run: the agent run it belongs to; None for one of its own.
        service: what that run has been served so far, in rows (`fairness.Service.of`).
        waited_s: seconds since anything was computed for that run, or since it came (`fairness.Service.waited`).
        group: names a prefix that it shares with others; None for none.
        computing: names of the full pages of its prompt that others cannot find in the cache yet.
    """

    order: Order
    tokens: int
    computed: int
    held: int
    recoverable: int = 0
    width: int = 1
    batch_limit: int | None = None
    run: Hashable = None
    service: float = 0.0
    waited_s: float = 0.0
    group: Hashable = None
    computing: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence without a lease; fields as in `Running`, and

    Attributes:
        cached: of its tokens, those that would be found in the cache.
        shared: full pages of these that running sequences hold; idle pages do not count, since leasing them takes
            them from what is available.
        next_page: name of the first full page that it would have to compute; None where that is not a full one.
    """

    order: Order
    tokens: int
    width: int = 1
    batch_limit: int | None = None
    run: Hashable = None
    service: float = 0.0
    waited_s: float = 0.0
    group: Hashable = None
    cached: int = 0
    shared: int = 0
    next_page: bytes | None = None


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


class _Rank(NamedTuple):
    """Who goes first, groups aside; see the module."""

    priority: int
    punctual: bool
    level: int
    order: Order


def _rank(view: Running | Waiting, service: float, least: float, first: bool = True) -> _Rank:
    punctual = view.waited_s < PATIENCE_S or not first
    level = int((service - least) // QUANTUM) if punctual else 0
    return _Rank(view.order.priority, punctual, level, view.order)


def _least(*views: Iterable[Running | Waiting]) -> float:
    return min((view.service for each in views for view in each), default=0.0)


def plan_seats(snapshot: Snapshot) -> Seats:
    """Returns who leaves and who enters.

    Sequences keep their pages for all their known tokens reserved, so that admitted prompts always get through.
    When pages are short the youngest of the run that was served most leaves, and nobody enters in that step.
    """
    least = _least(snapshot.running)
    first = min((r.order for r in snapshot.running), default=None)
    running = sorted(snapshot.running, key=lambda r: (r.order != first, _rank(r, r.service, least)))
    available = snapshot.available - sum(_need(r) for r in running)
    preempt: list[Order] = []
    while available < 0 and len(running) > 1:
        victim = running.pop()
        available += _need(victim) + victim.recoverable
        preempt.append(victim.order)
    admit = () if preempt else _admissions(snapshot, available)
    return Seats(tuple(preempt), admit)


def seat_limit(running: Iterable[Running], max_batch_size: int) -> int:
    """Returns how many seats there are; where those that run fill them, nobody who waits needs to be looked at."""
    return min([max_batch_size, *(r.batch_limit for r in running if r.batch_limit is not None)])


def _need(sequence: Running) -> int:
    return max(0, pages_for(sequence.tokens) - sequence.held)


def _admissions(snapshot: Snapshot, available: int) -> tuple[Order, ...]:
    running = snapshot.running
    limit, seated = seat_limit(running, snapshot.max_batch_size), sum(r.width for r in running)
    available -= seated - len(running)
    admit: list[Order] = []
    computing = set().union(*(r.computing for r in running))
    for candidate, rank in _queue(snapshot) if seated < limit else ():
        held = candidate.next_page in computing
        if held and rank.punctual:
            continue
        limit = min(limit, candidate.batch_limit or limit)
        # One page more for the first token of each choice, so that nobody is preempted right after it entered.
        cost = max(0, pages_for(candidate.tokens) - candidate.shared) + candidate.width
        if seated and (seated + candidate.width > limit or cost > available):
            break
        seated += candidate.width
        available -= cost
        # Whoever is overdue and held is not admitted either, but its seat and pages are kept for it.
        if not held:
            admit.append(candidate.order)
            if candidate.next_page is not None:
                computing.add(candidate.next_page)
    return tuple(admit)


def _queue(snapshot: Snapshot) -> list[tuple[Waiting, _Rank]]:
    """Returns the waiting sequences, first come first."""
    ranked = _ranked(snapshot.running, sorted(snapshot.waiting, key=lambda w: w.order))
    present = {r.group for r in snapshot.running if r.group is not None}
    leaders: dict[tuple[_Rank, Hashable], Order] = {}

    def key(entry: tuple[Waiting, _Rank]) -> tuple[_Rank, bool, Order, Order]:
        order, group, rank = entry[0].order, entry[0].group, entry[1]
        # The rank without its order names the class within which groups go together.
        peers = rank._replace(order=Order(0, 0, 0))
        if group is None or not rank.punctual:
            return peers, True, order, order
        return peers, group not in present, leaders.setdefault((peers, group), order), order

    return sorted(ranked, key=key)


def _ranked(running: Sequence[Running], waiting: Sequence[Waiting]) -> list[tuple[Waiting, _Rank]]:
    """Returns the waiting sequences, which come in order of arrival, with their ranks.

    The level is that of what the run will have been served when its turn comes: what it was served so far and what
    it has in hand, which is its running sequences and those that wait before this one, each with its missing rows
    or a quantum for the output that nobody knows yet. So many sequences of one run do not take all seats at once
    from a run that has few.
    """
    least = _least(running, waiting)
    in_hand: defaultdict[Hashable, float] = defaultdict(float)
    for r in running:
        in_hand[r.run] += max(QUANTUM, r.tokens - r.computed)
    ranked: list[tuple[Waiting, _Rank]] = []
    earlier: set[Hashable] = set()
    for w in waiting:
        alone = w.run is None
        rank = _rank(w, w.service + (0.0 if alone else in_hand[w.run]), least, first=alone or w.run not in earlier)
        ranked.append((w, rank))
        earlier.add(w.run)
        in_hand[w.run] += max(QUANTUM, w.tokens - w.cached)
    return ranked


def plan_rows(running: Sequence[Running], budget: int, waiting: Sequence[Waiting] = ()) -> tuple[Share, ...]:
    """Returns how many rows each sequence computes, first come first.

    Whoever lacks one token only (decoding) computes it; the rest of `budget` goes to prompts one after the other,
    but at least `MIN_PREFILL_ROWS` so that prompts advance beside any number of decoders. A prompt goes as early
    as the first of those in `waiting` that are held back until it is computed.
    """
    ordered = _by_urgency(running, waiting)
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


def _by_urgency(running: Sequence[Running], waiting: Sequence[Waiting]) -> list[Running]:
    least = _least(running, waiting)
    wanted: dict[bytes, _Rank] = {}
    for w in waiting:
        if w.next_page is not None:
            rank = _rank(w, w.service, least)
            wanted[w.next_page] = min(wanted.get(w.next_page, rank), rank)

    def urgency(sequence: Running) -> tuple[_Rank, Order]:
        lent = [wanted[page] for page in sequence.computing & wanted.keys()]
        return min([_rank(sequence, sequence.service, least), *lent]), sequence.order

    return sorted(running, key=urgency)


@dataclass(frozen=True, slots=True)
class Warm:
    """Tokens that nobody asked for yet and that somebody probably will: background work.

    Attributes:
        due_s: when they are probably needed, seconds of the engine's clock; infinite where unknown.
        tokens, computed, held: as in `Running`.
    """

    name: SessionKey
    due_s: float
    tokens: int
    computed: int
    held: int


class WarmShare(NamedTuple):
    """How many rows of which background work are computed in this step."""

    name: SessionKey
    rows: int


def plan_warm(live: int, items: Sequence[Warm], free: int, chunk: int) -> WarmShare | None:
    """Returns the background work of this step, None for none.

    Args:
        live: sequences that run or wait; there is background work only where there are none.
        items: in the order they came. The one due first is computed, then the one that came first.
        free: pages that background work may take; one that has no room left is passed over.
        chunk: most rows, few enough that a request which comes meanwhile is not kept waiting.
    """
    if live:
        return None
    for item in sorted(items, key=lambda i: i.due_s):
        rows = min(item.tokens, (item.held + free) * PAGE_TOKENS) - item.computed
        if rows > 0:
            return WarmShare(item.name, min(rows, chunk))
    return None


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


def row_budget(few: Measured | None, many: Measured | None, chunk: int, alone: int = 0) -> int:
    """Returns the rows that a step of about `STEP_SECONDS` computes, at most `chunk`.

    `alone` are the missing rows of the only sequence that runs or waits, 0 where there are others: its steps are of
    `ALONE_STEP_SECONDS`, and the last one takes a rest of up to half a step along instead of leaving it to another.

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
    seconds = ALONE_STEP_SECONDS if alone else STEP_SECONDS
    rows = max(int(max(seconds - fixed_s, fixed_s) / row_s), MIN_PREFILL_ROWS)
    if not alone:
        rows -= rows % MIN_PREFILL_ROWS
    return min(chunk, alone if rows < alone <= rows * 3 // 2 else rows)


def decode_cost(few: Measured | None, many: Measured | None) -> float:
    """Returns how many prompt rows cost as much as one decoded row, from measured steps of few and of many rows.

    Between 1 and `MAX_DECODE_COST`, so that a bad measurement distorts fairness within bounds; `DECODE_COST` without
    measurements.
    """
    if few is None or many is None or many.seconds <= 0:
        return DECODE_COST
    return min(MAX_DECODE_COST, max(1.0, few.seconds / few.rows * many.rows / many.seconds))


def retry_after(waiting: int, seats: int, request_seconds: float) -> float:
    """Returns seconds until a full queue has probably moved on: `waiting` requests through `seats` seats."""
    return min(600.0, max(1.0, (waiting + 1) / max(1, seats) * request_seconds))
