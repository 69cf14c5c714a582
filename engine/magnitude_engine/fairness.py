"""What each agent run has been served, so that the scheduler can let the least served go first.

A run is a session with its sub-agents and branches, so sixteen branches weigh no more than one answer. Service is
counted in rows: a prompt row is one, a decoded row `decode_cost`, since it reads all weights for a single token.

A new run starts at the floor, which is what the least served active run had (CFS's min_vruntime; the lift of the
virtual token counter, arXiv 2401.00588) and never falls: so it is not served for as long as the others were before.
One that returns, after a tool for instance, has what it had, but at most `CREDIT_ROWS` less than the floor: it has
not saved up more than that while it wanted nothing.

    service   |      A ──────────╮ tool     ╭── A returns with what it had, or a little under the floor
              |   floor ────────────────────────
              |                     ╰ B, new, starts here
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

REMEMBERED_RUNS = 4096
CREDIT_ROWS = 8192.0


class RunKey(NamedTuple):
    """A tenant's agent run; for requests that name none, their session."""

    tenant: str
    run: str


@dataclass(slots=True)
class _Active:
    """An active run: its sequences in the engine, its service, and when it was served last or came."""

    sequences: int
    service: float
    served_s: float


class Service:
    """Service per run. Not thread-safe.

    Memory is bounded: active runs by the engine's queue, others to `remembered`; those forgotten come back as
    newcomers.

    Attributes:
        decode_cost: rows that one decoded row counts as; may be set anew at any time as it is measured.
    """

    def __init__(self, decode_cost: float, remembered: int = REMEMBERED_RUNS) -> None:
        self.decode_cost = decode_cost
        self._remembered = remembered
        self._active: dict[RunKey, _Active] = {}
        self._paused: OrderedDict[RunKey, float] = OrderedDict()
        self._floor = 0.0

    def of(self, run: RunKey) -> float:
        """Returns the run's service in rows; for one that is not active, what it would start with."""
        active = self._active.get(run)
        return self._start(run) if active is None else active.service

    def waited(self, run: RunKey, now: float) -> float:
        """Returns the seconds for which nothing was computed for the run; 0 for one that is not active."""
        active = self._active.get(run)
        return 0.0 if active is None else now - active.served_s

    def enter(self, run: RunKey, now: float) -> None:
        """Notes that one more sequence of the run waits or runs; `now` in seconds of the engine's clock."""
        active = self._active.get(run)
        if active is not None:
            active.sequences += 1
            return
        self._floor = self._lowest()
        self._active[run] = _Active(1, self._start(run), now)
        self._paused.pop(run, None)

    def leave(self, run: RunKey) -> None:
        """Notes that one of its sequences has ended; a run without any is ignored."""
        active = self._active.get(run)
        if active is None:
            return
        active.sequences -= 1
        if not active.sequences:
            self._floor = self._lowest()
            del self._active[run]
            self._pause(run, active.service)

    def charge(self, run: RunKey, now: float, prompt_rows: int = 0, decode_rows: int = 0) -> None:
        """Adds what was computed for the run in a step, also where it ended in that step."""
        rows = prompt_rows + decode_rows * self.decode_cost
        active = self._active.get(run)
        if active is not None:
            active.service += rows
            active.served_s = now
        else:
            self._pause(run, self.of(run) + rows)

    def _lowest(self) -> float:
        """Returns the floor as it is now: it rises with the least served active run."""
        return max(self._floor, min((a.service for a in self._active.values()), default=0.0))

    def _start(self, run: RunKey) -> float:
        floor = self._lowest()
        return max(self._paused.get(run, floor), floor - CREDIT_ROWS)

    def _pause(self, run: RunKey, service: float) -> None:
        self._paused[run] = service
        self._paused.move_to_end(run)
        while len(self._paused) > self._remembered:
            self._paused.popitem(last=False)
