"""Which slot of a llama.cpp server each session uses, so that its next step finds its prefix there.

A session keeps one slot; when all are taken, the session that was used longest ago gives its slot up. A slot that is
at work is not waited for: the request then goes without one and the server chooses.
"""

from __future__ import annotations

from collections import OrderedDict


class Slots:
    """The slots of one server; holds at most as many sessions as there are slots."""

    def __init__(self) -> None:
        self._total = 0
        self._owned: OrderedDict[str, int] = OrderedDict()
        self._busy: set[int] = set()

    def take(self, session: str, total: int) -> int | None:
        """Returns the slot for a step of `session` on a server of `total` slots, to be released; None for any."""
        if total != self._total:
            # Another server, or the same one started anew: what its slots hold is not known.
            self._total, self._owned = total, OrderedDict()
        if not total:
            return None
        slot = self._owned.get(session)
        if slot is None:
            slot = self._vacant()
        if slot is None or slot in self._busy:
            return None
        self._owned[session] = slot
        self._owned.move_to_end(session)
        self._busy.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Ends what `take` began."""
        self._busy.discard(slot)

    def _vacant(self) -> int | None:
        """Returns an idle slot that no session owns, else the one that is taken from the session used longest ago."""
        taken = {*self._owned.values(), *self._busy}
        free = next((slot for slot in range(self._total) if slot not in taken), None)
        if free is not None:
            return free
        loser = next((session for session, slot in self._owned.items() if slot not in self._busy), None)
        return None if loser is None else self._owned.pop(loser)
