"""What a session may use, what it has used, and how both are said: pure functions.

A limit is reached when as much is used as it allows; the request that finds it so is refused. Clients name limits for
their session in the header `x-magnitude-limits` or in `magnitude.limits` of the body, and can only lower what the
server allows; answers say in the same header how far the session is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_proxy.config import SessionLimits
from magnitude_proxy.errors import BadRequest, SessionLimitExceeded

HEADER = "x-magnitude-limits"
LIMITS = ("max_iterations", "max_tokens", "max_seconds", "max_repeats")
# So many messages with tool calls are looked back at.
WINDOW = 20
# The values of limits, in that order.
limits_of = attrgetter(*LIMITS)
_NONE = (None,) * len(LIMITS)
_NUMBER = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,6})?")
_WORDS = {
    "max_iterations": "{used} steps were answered, and {most} are allowed",
    "max_tokens": "its steps took {used} prompt and completion tokens, and {most} are allowed",
    "max_seconds": "it began {used} s ago, and {most} s are allowed",
    "max_repeats": "the same tool call with the same arguments stands {used} times in its recent history, and {most} "
    "times are allowed",
}


class Use(NamedTuple):
    """What a session has used, in the order of `LIMITS`."""

    iterations: int = 0
    tokens: int = 0
    seconds: float = 0.0
    repeats: int = 0


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On which terms a session takes a step.

    Attributes:
        server: what the server allows the session's key.
        client: what the client asks for; it binds the session from then on.
        repeats: see `repeated`.
        fresh: the step begins a run, so that what earlier runs of the session used no longer counts.
    """

    server: SessionLimits = SessionLimits()
    client: SessionLimits = SessionLimits()
    repeats: int = 0
    fresh: bool = False


NO_TERMS = Terms()


def lowered(one: SessionLimits, other: SessionLimits) -> SessionLimits:
    """Returns the lower limit of each kind."""
    if limits_of(other) == _NONE:
        return one
    least = {}
    for name, *both in zip(LIMITS, limits_of(one), limits_of(other), strict=True):
        least[name] = min((value for value in both if value is not None), default=None)
    return SessionLimits(**least)


def exceeded(limits: SessionLimits, use: Use) -> str | None:
    """Returns the first limit that is reached, None where there is none; the store's functions do the same in Lua."""
    for name, most, used in zip(LIMITS, limits_of(limits), use, strict=True):
        if most is not None and used >= most:
            return name
    return None


def shown(limits: SessionLimits, use: Use) -> str:
    """Returns the header's value: `iterations=3/50, tokens=1200/100000` for the limits that there are."""
    parts = []
    for name, most, used in zip(LIMITS, limits_of(limits), use, strict=True):
        if most is not None:
            parts.append(f"{name.removeprefix('max_')}={_plain(used)}/{_plain(most)}")
    return ", ".join(parts)


def read_limits(header: str | None) -> SessionLimits:
    """Returns the limits in a request's header, `iterations=50, seconds=600`; raises BadRequest."""
    if header is None:
        return SessionLimits()
    given: dict[str, float] = {}
    for part in header.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if not part.strip():
            continue
        limit = f"max_{name}"
        whole = limit != "max_seconds"
        if limit not in LIMITS or limit in given or not _NUMBER.fullmatch(value) or (whole and "." in value):
            raise _wrong()
        given[limit] = int(value) if whole else float(value)
    try:
        return msgspec.convert(given, SessionLimits)
    except msgspec.ValidationError as error:
        raise _wrong() from error


def refusal(limit: str, limits: SessionLimits, use: Use, session: str) -> SessionLimitExceeded:
    """Returns the error for a session that has reached `limit`."""
    used, most = _plain(use[LIMITS.index(limit)]), _plain(getattr(limits, limit))
    remedy = (
        "have the agent do something else, or raise the limit where it is set"
        if limit == "max_repeats"
        else "begin another session, or raise the limit where it is set"
    )
    return SessionLimitExceeded(
        f"the session has reached its limit {limit}: {_WORDS[limit].format(used=used, most=most)}; {remedy} (the "
        f"server's [limits], its key's line, or the client's own {HEADER})",
        param=limit,
        headers={HEADER: shown(limits, use), "x-magnitude-session": session},
    )


def repeated(messages: Sequence[api.Message]) -> int:
    """Returns how often the last message's tool calls were made since the user spoke last, 0 without any.

    The calls of one message count together. Equal are calls of the same tools with the same arguments as JSON, the
    order of keys aside. Only the last `WINDOW` messages with calls are looked at.
    """
    count = looked = 0
    last: tuple[api.ToolCall, ...] = ()
    for message in reversed(messages):
        if message.role == "user" or looked == WINDOW:
            break
        if message.tool_calls:
            looked += 1
            last = last or message.tool_calls
            count += _same(last, message.tool_calls)
    return count


def _same(some: Sequence[api.ToolCall], others: Sequence[api.ToolCall]) -> bool:
    return len(some) == len(others) and all(
        one.name == other.name and _equal(one.arguments, other.arguments)
        for one, other in zip(some, others, strict=True)
    )


def _equal(one: str, other: str) -> bool:
    """True for the same JSON value; text that is no JSON is compared as it stands."""
    if one == other:
        return True
    try:
        values = [msgspec.json.decode(text) for text in (one, other)]
    except (msgspec.DecodeError, RecursionError):
        return False
    # Python's equality, which takes 1 for true, is the quick way out of comparing what differs.
    first, second = values
    return first == second and msgspec.json.encode(first, order="sorted") == msgspec.json.encode(second, order="sorted")


def _plain(value: float) -> str:
    """Returns a number without needless decimals, rounded down: what is used never looks reached before it is."""
    if isinstance(value, int):
        return str(value)
    return f"{math.floor(value * 10) / 10:g}" if value < 1e5 else str(math.floor(value))


def _wrong() -> BadRequest:
    names = ", ".join(name.removeprefix("max_") for name in LIMITS)
    return BadRequest(
        f"{HEADER} must be like `iterations=50, tokens=100000`: each of {names} at most once, a number above 0, whole "
        "but for seconds",
        param=HEADER,
    )
