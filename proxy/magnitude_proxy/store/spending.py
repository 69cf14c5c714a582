"""How many tokens each key has used today (UTC), over all proxies of one store.

    magnitude:{KEY}:tokens:DAY    a counter; KEY is the key's id, DAY counts days since 1970

While the store is away this process counts what it has seen itself.
"""

from __future__ import annotations

from magnitude_proxy.store.connection import Link, StoreDown

DAY_S = 86_400


class Spending:
    """Adds up tokens by key and day; `link` is None where nothing is shared."""

    def __init__(self, link: Link | None) -> None:
        self._link = link
        self._here: dict[str, tuple[int, int]] = {}

    def add(self, key: str, tokens: int, now: float) -> None:
        """Adds the tokens of a step that ended at `now`, Unix seconds."""
        day = _day(now)
        self._here[key] = (day, self._seen(key, day) + tokens)
        if self._link is not None:
            self._link.tell("INCRBY", _name(key, day), tokens)
            self._link.tell("PEXPIRE", _name(key, day), 2 * DAY_S * 1000)

    async def today(self, key: str, now: float) -> int:
        """Returns the tokens of the day so far."""
        day = _day(now)
        here = self._seen(key, day)
        if self._link is None:
            return here
        try:
            reply = await self._link.call("spending", "GET", _name(key, day))
        except StoreDown:
            return here
        return max(here, int(reply)) if isinstance(reply, bytes) and reply.isdigit() else here

    def _seen(self, key: str, day: int) -> int:
        seen, tokens = self._here.get(key, (day, 0))
        return tokens if seen == day else 0


def _day(now: float) -> int:
    return int(now // DAY_S)


def _name(key: str, day: int) -> str:
    return f"magnitude:{{{key}}}:tokens:{day}"
