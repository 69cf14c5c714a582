"""Whole workloads: agents with tools on a cache too small for all, where the learned rule wins, loses, wins again.

A cache that evicts as `Retention.choose` says stands in for the real one, beside one that always evicts the least
recently used page: what the shadows claim is compared with what these two find.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from magnitude_engine.kv.retention import Retention, SessionKey
from magnitude_engine.kv.shadow import WINDOW
from testkit.page_cache import PageCache, chain

pytestmark = pytest.mark.thorough

SYSTEM = ["system"]


@dataclass
class Agent:
    """Calls `tool` at each step, which takes about `seconds`; its prompt is `SYSTEM` and `pages` of its own."""

    name: str
    tool: str
    seconds: float
    pages: int

    @property
    def key(self) -> SessionKey:
        return SessionKey("t", self.name, "main")

    def prompt(self) -> list[bytes]:
        return chain([*SYSTEM, *[(self.name, n) for n in range(self.pages)]])


@dataclass
class World:
    """Agents in simulated time; every prompt goes to the retention and to both caches."""

    retention: Retention
    pages: int
    now: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    strangers: int = 0

    def __post_init__(self) -> None:
        self.real = PageCache(self.pages, self.retention.choose)
        self.lru = PageCache(self.pages, lambda candidates, now: 0)
        self.found: list[tuple[int, int, int]] = []
        self.policies: list[str] = []

    def run(self, agents: list[Agent], seconds: float, stranger_every: float = 0.0) -> None:
        """Lets agents take steps; a stranger with one prompt that never returns comes every so many seconds."""
        self.found.clear()
        self.policies.clear()
        end = self.now + seconds
        queue = [(self.now + self.rng.random() * agent.seconds, i) for i, agent in enumerate(agents)]
        if stranger_every:
            queue.append((self.now, -1))
        heapq.heapify(queue)
        while queue[0][0] < end:
            self.now, index = heapq.heappop(queue)
            if index < 0:
                self.strangers += 1
                self.step(Agent(f"stranger-{self.strangers}", "", 0.0, 4))
                heapq.heappush(queue, (self.now + stranger_every, index))
            else:
                self.step(agents[index])
                wait = agents[index].seconds * self.rng.uniform(0.9, 1.1)
                heapq.heappush(queue, (self.now + wait, index))
        self.now = end
        self.retention.check_integrity()

    def step(self, agent: Agent) -> None:
        """One prompt, and a pause that calls the agent's tool."""
        prompt = agent.prompt()
        self.retention.resumed(agent.key, prompt, self.now)
        real, lru = (cache.access(agent.key, prompt, self.now) for cache in (self.real, self.lru))
        self.found.append((len(prompt), real, lru))
        self.policies.append(self.retention.policy)
        self.retention.paused(agent.key, prompt, [agent.tool] if agent.tool else [], self.now)

    def rates(self, last: int) -> tuple[float, float]:
        """Returns the hit rates of the real cache and of the least recently used one over the last accesses."""
        recent = self.found[-last:]
        pages = sum(access[0] for access in recent)
        return sum(access[1] for access in recent) / pages, sum(access[2] for access in recent) / pages


def honest() -> list[Agent]:
    """Six agents with a tool of 10 s, and twenty with one of 120 s that do not fit beside them."""
    fast = [Agent(f"fast-{n}", "search", 10.0, 8) for n in range(6)]
    return fast + [Agent(f"slow-{n}", "build", 120.0, 8) for n in range(20)]


def lying() -> list[Agent]:
    """What is learned of the tool is true of the many small sessions; the four large ones come back after 12 s."""
    small = [Agent(f"small-{n}", "research", 150.0, 1) for n in range(75)]
    return small + [Agent(f"large-{n}", "research", 12.0, 15) for n in range(4)]


def test_the_learned_rule_wins_where_tools_differ() -> None:
    world = World(Retention(70), 70)
    world.run(honest(), 1200.0)
    real, lru = world.rates(WINDOW)
    assert set(world.policies) == {"learned"}
    assert real > lru + 0.1
    assert (world.retention.learned_hit_rate, world.retention.lru_hit_rate) == (real, lru)


@pytest.mark.slow
def test_it_gives_way_where_tools_lie_and_comes_back_where_they_do_not() -> None:
    world = World(Retention(110), 110)
    world.run(lying(), 400.0, stranger_every=2.0)
    assert world.policies[-1] == "lru"
    world.run(lying(), 200.0, stranger_every=2.0)
    real, lru = world.rates(WINDOW)
    assert set(world.policies) == {"lru"}
    assert real == lru == world.retention.lru_hit_rate > world.retention.learned_hit_rate + 0.1
    world.run(honest(), 600.0)
    assert world.policies[-1] == "learned"
    world.run(honest(), 600.0)
    real, lru = world.rates(WINDOW)
    assert set(world.policies) == {"learned"}
    # What the real cache kept from the time before makes a small difference for long.
    assert real == pytest.approx(world.retention.learned_hit_rate, abs=0.03)
    assert real > lru + 0.05
