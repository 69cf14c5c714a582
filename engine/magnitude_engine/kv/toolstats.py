"""What is known of a tenant's tools: how long they take and how long their results are.

Estimates are medians of the last 32 values of a tool, so that one outlier moves nothing and a lasting change is
learned within 17 calls. How long a running call still takes is the median of those earlier calls that took longer
than it has taken so far: a tool that takes either 1 s or 600 s is, after 2 s, one that takes 600 s.

At most `MAX_TOOLS` tools of `MAX_TENANTS` tenants are known; those that were seen last stay.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

SAMPLES = 32
FEWEST = 3
MAX_TOOLS = 128
MAX_TENANTS = 128


class Recent:
    """The last `SAMPLES` values of a quantity."""

    __slots__ = ("_latest", "_ordered")

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        """Notes a value; the oldest is forgotten when there are too many."""
        if len(self._latest) == SAMPLES:
            del self._ordered[bisect_left(self._ordered, self._latest.popleft())]
        self._latest.append(value)
        insort(self._ordered, value)

    @property
    def median(self) -> float | None:
        """The lower median; None before `FEWEST` values, of which one may be an outlier."""
        count = len(self._ordered)
        return None if count < FEWEST else self._ordered[(count - 1) // 2]

    def beyond(self, passed: float) -> float | None:
        """Returns the median of the values above `passed`, less `passed`; None where too few are above it.

        Too few are fewer than two, or than an eighth of all: those may be outliers.
        """
        count = len(self._ordered)
        start = bisect_right(self._ordered, passed)
        above = count - start
        if count < FEWEST or above < max(2, count // 8):
            return None
        return self._ordered[start + (above - 1) // 2] - passed


@dataclass(slots=True, eq=False)
class ToolRecord:
    """One tool of a tenant: seconds from a call to the session's return, tokens of a result."""

    seconds: Recent = field(default_factory=Recent)
    tokens: Recent = field(default_factory=Recent)


class ToolTable:
    """The tools of all tenants. Not thread-safe."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, ToolRecord]] = OrderedDict()

    def find(self, tenant: str, tool: str) -> ToolRecord | None:
        """Returns what is known of a tool."""
        tools = self._tenants.get(tenant)
        return None if tools is None else tools.get(tool)

    def duration(self, tenant: str, tools: Iterable[str]) -> float | None:
        """Returns the seconds after which calls made together are all done; None where no tool is known."""
        records = [self.find(tenant, tool) for tool in tools]
        known = [r.seconds.median for r in records if r is not None and r.seconds.median is not None]
        return max(known, default=None)

    def remaining(self, tenant: str, tools: Iterable[str], passed: float) -> float | None:
        """Returns the seconds until calls made together `passed` seconds ago are all done.

        None where no tool is known, or all take longer than ever, so that what is known no longer holds.
        """
        longest: float | None = None
        for tool in tools:
            record = self.find(tenant, tool)
            left = None if record is None else record.seconds.beyond(passed)
            if left is not None and (longest is None or left > longest):
                longest = left
        return longest

    def took(self, tenant: str, tools: Sequence[str], seconds: float, told: Mapping[str, float] | None = None) -> None:
        """Learns from calls made together, of which the last one was done after `seconds`.

        Where `told` says of each of them how long it ran, the last one was the slowest. Else it was one of those not
        known yet if it took longer than the known ones do, or the slowest known one.
        """
        ran = {tool: told[tool] for tool in tools if tool in told} if told else {}
        if ran and len(ran) == len(set(tools)):
            final = max(ran, key=ran.__getitem__)
            for tool, alone in ran.items():
                self._record(tenant, tool).seconds.add(seconds if tool == final else min(alone, seconds))
            return
        known = {tool: d for tool in tools if (d := self.duration(tenant, [tool])) is not None}
        unknown = [tool for tool in tools if tool not in known]
        slowest = max(known, key=known.__getitem__, default=None)
        if slowest is None or (unknown and seconds > known[slowest]):
            last = unknown
        else:
            last = [slowest]
        for tool in last:
            self._record(tenant, tool).seconds.add(seconds)

    def returned(self, tenant: str, tool: str, tokens: int) -> None:
        """Learns the length of a result."""
        self._record(tenant, tool).tokens.add(tokens)

    def _record(self, tenant: str, tool: str) -> ToolRecord:
        tools = self._tenants.setdefault(tenant, OrderedDict())
        record = tools.setdefault(tool, ToolRecord())
        self._tenants.move_to_end(tenant)
        tools.move_to_end(tool)
        if len(tools) > MAX_TOOLS:
            tools.popitem(last=False)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return record
