"""How often each address came with a key that is none, and whom that shuts out for the rest of the minute.

Beyond `most` refusals a minute an address is heard only with keys that it had used before: whoever guesses learns
nothing more, and clients behind the same address that are at work go on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from magnitude_proxy.bounded import keep

WINDOW_S = 60.0
ADDRESSES = 4096
KEYS = 1024


@dataclass(slots=True)
class _Caller:
    """One address: refusals since `began`, monotonic seconds, and the keys it used, by their ids."""

    began: float
    refused: int = 0
    known: OrderedDict[str, None] = field(default_factory=OrderedDict)


class Refusals:
    """Remembers the addresses seen last; `most` 0 shuts nobody out."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._callers: OrderedDict[str, _Caller] = OrderedDict()

    def wait_s(self, address: str, key: str | None, now: float) -> float:
        """Returns how long a request from `address` has to wait, 0 when it may be looked at.

        Args:
            key: the id of its key, None for a key that is none.
            now: monotonic seconds.
        """
        caller = self._callers.get(address)
        if not self._most or caller is None or caller.refused < self._most or key in caller.known:
            return 0.0
        return max(0.0, caller.began + WINDOW_S - now)

    def count(self, address: str, key: str | None, now: float) -> None:
        """Notes a request that was looked at; see `wait_s`."""
        caller = self._callers.get(address) or _Caller(now)
        keep(self._callers, address, caller, ADDRESSES)
        if key is not None:
            keep(caller.known, key, None, KEYS)
            return
        if now - caller.began >= WINDOW_S:
            caller.began, caller.refused = now, 0
        caller.refused += 1
