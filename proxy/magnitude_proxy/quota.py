"""What a key may use at a time: requests a minute and at once in this process, tokens a day over all of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from magnitude_proxy.access import Key
from magnitude_proxy.errors import RateLimited
from magnitude_proxy.store.spending import DAY_S

MINUTE_S = 60.0
# A longer wait is not for a client's retries.
PATIENCE_S = 60


class Bucket(NamedTuple):
    """How many requests may begin at once at `at_s`, monotonic seconds."""

    room: float
    at_s: float


def taken(bucket: Bucket | None, now: float, per_minute: int) -> tuple[Bucket, float]:
    """Returns the bucket after one more request, and how long that one has to wait: 0 when it may begin.

    A bucket holds a minute's requests and fills steadily. None is a full one.
    """
    rate = per_minute / MINUTE_S
    room = float(per_minute) if bucket is None else min(per_minute, bucket.room + (now - bucket.at_s) * rate)
    if room < 1:
        return Bucket(room, now), (1 - room) / rate
    return Bucket(room - 1, now), 0.0


def day_spent(tokens: int, most: int, now: float) -> None:
    """Raises RateLimited where a key has used up the tokens of the UTC day in which `now` (Unix seconds) lies."""
    if tokens < most:
        return
    wait = math.ceil(DAY_S - now % DAY_S)
    raise RateLimited(
        f"this key has used {tokens} of the {most} tokens that tokens_per_day allows; go on after midnight UTC, or "
        "raise the limit in the server's [limits] or the key's line",
        param="tokens_per_day",
        wait_s=wait,
        again=wait <= PATIENCE_S,
    )


class Quotas:
    """Counts the requests of each key in this process."""

    def __init__(self) -> None:
        self._buckets: dict[str, Bucket] = {}
        self._inside: Counter[str] = Counter()

    @contextmanager
    def entered(self, key: Key, now: float) -> Iterator[None]:
        """Counts the request inside, which begins at `now` (monotonic seconds); raises RateLimited."""
        most, per_minute = key.limits.concurrent_requests, key.limits.requests_per_minute
        if most is not None and self._inside[key.id] >= most:
            raise RateLimited(
                f"this key has {most} requests at work, which is all that concurrent_requests allows; send this one "
                "when one of them has ended",
                param="concurrent_requests",
                wait_s=1,
            )
        if per_minute is not None:
            self._buckets[key.id], wait = taken(self._buckets.get(key.id), now, per_minute)
            if wait:
                raise RateLimited(
                    f"this key begins more than the {per_minute} requests a minute that requests_per_minute allows; "
                    f"wait {math.ceil(wait)} s",
                    param="requests_per_minute",
                    wait_s=math.ceil(wait),
                )
        self._inside[key.id] += 1
        try:
            yield
        finally:
            self._inside[key.id] -= 1
            if not self._inside[key.id]:
                del self._inside[key.id]
