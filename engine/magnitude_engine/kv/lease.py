"""What a sequence holds of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.kv.radix import Node
from magnitude_engine.kv.retention import SessionKey


class CacheKey(NamedTuple):
    """Whose tokens these are; what is retained is shared within the tenant."""

    tenant: str
    session: str
    branch: str
    choice: int = 0

    @property
    def owner(self) -> SessionKey:
        """The session, as retention knows it."""
        return SessionKey(self.tenant, self.session, self.branch)


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of one sequence; changed by the manager only.

    Attributes:
        pages: page ids for positions 0, 16, 32, …
        length: tokens whose keys and values are in the pages.
        reused: tokens that `acquire` found in the cache, of which `from_host` and `from_disk` in the lower tiers.
        source: the retained page of which it began with a copy.
    """

    key: CacheKey
    pages: list[int] = field(default_factory=list)
    length: int = 0
    reused: int = 0
    from_host: int = 0
    from_disk: int = 0
    source: Node | None = None


class Cached(NamedTuple):
    """Prompt tokens that were found in the cache, and those of them that came from lower tiers."""

    tokens: int = 0
    host: int = 0
    disk: int = 0


NOT_CACHED = Cached()


def cached_prompt(lease: Lease, prompt: int) -> Cached:
    """Returns what of a prompt's `prompt` tokens a new lease found.

    Of a resumed answer, generated tokens may be cached too; they come behind the prompt and are not counted.
    """
    tokens = min(lease.reused, prompt)
    # What came from below is always behind what was on the device.
    below = max(0, tokens - (lease.reused - lease.from_host - lease.from_disk))
    disk = min(lease.from_disk, below)
    return Cached(tokens, min(lease.from_host, below - disk), disk)


def pages_for(tokens: int) -> int:
    """Returns how many pages hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)


class Evicted(NamedTuple):
    """Pages that left the tree since the start: why, and how many of them a lower tier took."""

    pressure: int = 0
    dead: int = 0
    spilled: int = 0

    @property
    def pages(self) -> int:
        """All that were evicted."""
        return self.pressure + self.dead
