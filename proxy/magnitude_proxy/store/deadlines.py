"""Deadlines of many replies under one timer: a timer for each would be armed and disarmed with every request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Deadlines:
    """Calls `overdue(reply, deadline)` once for every reply that is not there at its deadline, in the loop's time."""

    def __init__(self, overdue: Callable[[asyncio.Future[object], float], None]) -> None:
        self._overdue = overdue
        self._watched: deque[tuple[asyncio.Future[object], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, reply: asyncio.Future[object], deadline: float) -> None:
        """Takes a reply that is outstanding; it is let go of once it is there and all before it are."""
        watched, loop = self._watched, asyncio.get_running_loop()
        while watched and watched[0][0].done():
            watched.popleft()
        if watched and deadline < watched[-1][1]:
            # A command that is sent again keeps its deadline, which is before those of the commands since.
            loop.call_at(deadline, self._tell, reply, deadline)
            return
        watched.append((reply, deadline))
        if self._timer is None:
            self._timer = loop.call_at(deadline, self._look)

    def clear(self) -> None:
        """Watches nothing any more."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Tells of what is overdue and comes back for the next that may be."""
        self._timer = None
        watched, loop = self._watched, asyncio.get_running_loop()
        while watched:
            reply, deadline = watched[0]
            if not reply.done() and deadline > loop.time():
                self._timer = loop.call_at(deadline, self._look)
                return
            watched.popleft()
            self._tell(reply, deadline)

    def _tell(self, reply: asyncio.Future[object], deadline: float) -> None:
        if not reply.done():
            self._overdue(reply, deadline)
