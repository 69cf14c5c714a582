"""What keeps trouble from spreading: a circuit breaker per route and one budget of retries for all of them.

    closed ──`failures` in a row──► open ──`open_s` later──► half open ──content──► closed, on probation
       ▲                              ▲                          │                        │
       └────── a complete answer ─────┴──────── a failure ───────┴────────────────────────┘

Both are plain state with the clock passed in; the dispatcher is their only user.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self


class Breaker:
    """Counts consecutive failures of one route and closes it for a while after too many.

    After `open_s` one attempt is let through as a probe. Its first content closes the breaker, but one more
    failure opens it again until an answer has been complete.
    """

    def __init__(self, failures: int, open_s: float, clock: Callable[[], float]) -> None:
        self._limit = failures
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._opened_at: float | None = None
        self._probing = False
        self._held_until = 0.0

    def allows(self) -> bool:
        """True when an attempt may start now."""
        if self._opened_at is None:
            return True
        return not self._probing and self._clock() - self._opened_at >= self._open_s

    @property
    def failing(self) -> bool:
        """True when the last attempt failed by the route's fault."""
        return self._failures > 0

    def held_s(self) -> float:
        """Seconds until the route wants to be asked again; 0 when it may be asked now."""
        return max(0.0, self._held_until - self._clock()) if self._held_until else 0.0

    def hold(self, seconds: float) -> None:
        """The route asked for a pause of `seconds` (its Retry-After)."""
        self._held_until = max(self._held_until, self._clock() + seconds)

    def begin(self) -> None:
        """An attempt starts; call one of `succeed`, `fail` or `abandon` at its end."""
        if self._opened_at is not None:
            self._probing = True

    def alive(self) -> None:
        """The attempt gave content."""
        if self._opened_at is not None:
            self._opened_at = None
            self._probing = False
            self._failures = self._limit - 1

    def succeed(self) -> None:
        """The attempt ended as it should."""
        self._failures = 0
        self._opened_at = None
        self._probing = False

    def fail(self) -> bool:
        """The attempt failed by the route's fault; True when that opened the breaker."""
        newly = self._opened_at is None
        if not newly and not self._probing:
            # An attempt from before the opening: it tells nothing new and must not lengthen the pause.
            return False
        self._failures += 1
        if newly and self._failures < self._limit:
            return False
        self._opened_at = self._clock()
        self._probing = False
        return newly

    def abandon(self) -> None:
        """The attempt ended without telling anything about the route."""
        self._probing = False


class RetryBudget:
    """At most `ratio` of the active requests, and at least `minimum`, may be retrying at one time."""

    def __init__(self, ratio: float, minimum: int) -> None:
        self._ratio = ratio
        self._minimum = minimum
        self._active = 0
        self._retrying = 0

    def ticket(self) -> Ticket:
        """Returns the context manager that one request holds while it is active."""
        return Ticket(self)

    def available(self) -> bool:
        """True when one more retry is allowed now."""
        return self._retrying < max(self._minimum, int(self._ratio * self._active))

    def _change(self, active: int, retrying: int) -> None:
        self._active += active
        self._retrying += retrying


class Ticket:
    """One active request's share of the budget; what it spent returns when it ends."""

    def __init__(self, budget: RetryBudget) -> None:
        self._budget = budget
        self._spent = 0

    def __enter__(self) -> Self:
        self._budget._change(1, 0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._budget._change(-1, -self._spent)

    def spend(self) -> None:
        """This request starts one more retry."""
        self._spent += 1
        self._budget._change(0, 1)
