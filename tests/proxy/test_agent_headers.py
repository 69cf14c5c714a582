"""Requests in the form of every coding agent through a running proxy: each turn is counted to the right session.

Many sessions are under way at once, some requests are sent twice, histories are compacted, sub-agents work. The store
may be stopped, flushed or hung meanwhile: that changes nothing.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from magnitude_engine import api
from magnitude_proxy.bench.recorded import OWN, Trace, read_traces
from magnitude_proxy.config import StoreConfig
from magnitude_proxy.identity import IdentityHints
from magnitude_proxy.limits import Terms
from magnitude_proxy.session import Lease, Sessions
from testkit import store
from testkit.agent_headers import SHAPES, Run, Turn, renamed
from testkit.agents import MESSAGES, agents, until
from testkit.proxy import Proxy, proxy_config, proxying
from testkit.upstream import OpenAIStub

pytestmark = pytest.mark.thorough

PUBLIC = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces" / "public"
AT_ONCE = 16
Trouble = Literal["none", "stopped", "flushed", "hung"]


def traces(folder: Path = OWN) -> list[Trace]:
    """Returns the traces of a folder, by default the product's own; none where it is absent."""
    return [trace for path in sorted(folder.glob("*.jsonl")) for trace in read_traces(path)]


@dataclass
class Replayed:
    """What a proxy said of each turn, and how long it took to find and open its session."""

    counted: list[tuple[Turn, str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    degraded: int = 0

    def homes(self) -> dict[str, Counter[str]]:
        """Returns, for each true session, to which sessions its turns were counted."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for turn, session in self.counted:
            found[turn.session][session] += 1
        return found

    def right(self) -> float:
        """Returns the share of the turns that were counted to the session of most turns of theirs."""
        return sum(max(home.values()) for home in self.homes().values()) / len(self.counted)

    def check_apart(self) -> None:
        """No session holds turns of two, but for requests without an id that are the same word for word."""
        same: dict[str, set[str]] = defaultdict(set)
        users: dict[str, set[str]] = defaultdict(set)
        for turn, _ in self.counted:
            same[f"{turn.headers} {turn.body}"].add(turn.session)
        for turn, session in self.counted:
            if len(same[f"{turn.headers} {turn.body}"]) == 1:
                users[session].add(turn.session)
        assert [found for found in users.values() if len(found) > 1] == []


def mixed(runs: list[list[Turn]], rng: random.Random) -> Iterator[Turn]:
    """Yields the turns of all runs, `AT_ONCE` of them side by side, one in ten twice."""
    waiting, active = list(runs), []
    while waiting or active:
        while waiting and len(active) < AT_ONCE:
            active.append(waiting.pop())
        run = rng.choice(active)
        turn = run.pop(0)
        yield from [turn, turn] if rng.random() < 0.1 else [turn]
        if not run:
            active.remove(run)


def timed(sessions: Sessions, seconds: list[float]) -> None:
    """Notes how long it takes from now on to find and open the session of a request."""
    enter = sessions.enter

    async def entered(tenant: str, headers: Mapping[str, str], hints: IdentityHints, terms: Terms) -> Lease:
        began = time.perf_counter()
        lease = await enter(tenant, headers, hints, terms)
        seconds.append(time.perf_counter() - began)
        return lease

    sessions.enter = entered  # type: ignore[method-assign]


async def replay(proxy: Proxy, runs: list[list[Turn]], trouble: Trouble, server: store.Server) -> Replayed:
    """Sends all turns, one after the other; the trouble begins after a third of them and ends after two."""
    turns = list(mixed(runs, random.Random(7)))
    replayed = Replayed()
    timed(proxy.running.surface.sessions, replayed.seconds)
    for number, turn in enumerate(turns):
        if number == len(turns) // 3:
            await begin(trouble, server)
        if number == 2 * len(turns) // 3:
            await end(trouble, server)
        reply = await proxy.post(turn.path, turn.body, **turn.headers)
        assert reply.status == 200, reply.body
        replayed.degraded += reply.header("x-magnitude-degraded") is not None
        replayed.counted.append((turn, str(reply.header("x-magnitude-session"))))
    return replayed


async def begin(trouble: Trouble, server: store.Server) -> None:
    """Makes the store stop, forget or hang."""
    if trouble == "stopped":
        await server.kill()
    elif trouble == "flushed":
        await server.do("FLUSHALL")
    elif trouble == "hung":
        server.signal(signal.SIGSTOP)


async def end(trouble: Trouble, server: store.Server) -> None:
    """Brings the store back."""
    if trouble == "stopped":
        await server.start()
    elif trouble == "hung":
        server.signal(signal.SIGCONT)


async def replayed_under(folder: Path, trouble: Trouble, runs: list[list[Turn]]) -> Replayed:
    """Replays runs against a proxy with a store in trouble."""
    async with store.server("valkey", folder) as server, OpenAIStub(text="Hello") as stub:
        config = proxy_config(folder, stub.url, store=StoreConfig(url=server.url))
        async with proxying(config) as proxy:
            return await replay(proxy, runs, trouble, server)


def runs_of(found: list[Trace], rng: random.Random, *names: str) -> list[list[Turn]]:
    """Returns each trace once as a run of each named client."""
    shapes = [(name, SHAPES[name]) for name in names or SHAPES]
    made = [Run(f"{trace.trace_id} by {name}", trace, rng) for trace in found for name, _ in shapes]
    return [list(shape(run)) for run, (_, shape) in zip(made, shapes * len(found), strict=True)]


@pytest.mark.parametrize("name", SHAPES)
async def test_every_client_is_one_session_with_its_sub_agents_as_branches(name: str, tmp_path: Path) -> None:
    trace = max(traces(), key=lambda t: sum(m.role == "assistant" for m in t.messages))
    (turns,) = runs_of([trace], random.Random(1), name)
    async with OpenAIStub(text="Hello") as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        for turn in turns:
            assert (await proxy.post(turn.path, turn.body, **turn.headers)).status == 200
        (session,) = (await proxy.get("/v1/sessions")).json["data"]
        assert session["steps"] == sum(not turn.aside for turn in turns)
        assert session["usage"]["completion_tokens"] == len(turns)
        assert session["failures"] == 0
        # The sub-agents' own ids lead to their session, too.
        for branch in {turn.branch for turn in turns if len(turn.branch) == 36}:
            assert (await proxy.get(f"/v1/sessions/{branch}")).json["id"] == session["id"]


@pytest.mark.slow
@pytest.mark.parametrize("trouble", ["none", "stopped", "flushed", "hung"])
async def test_turns_find_their_sessions_whatever_the_store_does(trouble: Trouble, tmp_path: Path) -> None:
    rng = random.Random(3)
    runs = runs_of(traces(), rng) + runs_of(traces(PUBLIC), rng, "unnamed")
    replayed = await replayed_under(tmp_path, trouble, runs)
    seconds = sorted(replayed.seconds)
    middle, late = (1000 * seconds[int(len(seconds) * share)] for share in (0.5, 0.99))
    right = 100 * replayed.right()
    print(f"{trouble}: {len(seconds)} turns, {right:.2f} % right; session found in {middle:.2f} ms, p99 {late:.2f} ms")
    assert replayed.right() >= 0.99
    replayed.check_apart()
    assert (replayed.degraded > 0) == (trouble in ("stopped", "hung"))


async def test_an_agent_that_renames_itself_is_told_so(tmp_path: Path) -> None:
    trace = max(traces(), key=lambda t: sum(m.role == "assistant" for m in t.messages))
    turns = list(renamed(Run("renamed", trace, random.Random(1))))
    async with (
        store.server("valkey", tmp_path) as server,
        OpenAIStub(text="Hello") as stub,
        proxying(proxy_config(tmp_path, stub.url, store=StoreConfig(url=server.url, timeout_s=1.0))) as proxy,
    ):
        replies = [await proxy.post(turn.path, turn.body, **turn.headers) for turn in turns]
        told = [reply.header("x-magnitude-session-advice") for reply in replies]
        assert told[:2] == [None, None]
        assert all("unstable-session-id" in (advice or "") for advice in told[2:])
        (session,) = {reply.header("x-magnitude-session") for reply in replies[2:]}
        for name in (session, turns[0].headers["x-session-id"], turns[-1].headers["x-session-id"]):
            report = (await proxy.get(f"/v1/sessions/{name}")).json
            assert (report["id"], report["advice"]) == (session, told[-1])
            assert report["steps"] == len(turns) - 1
        metrics = (await proxy.get(f"{proxy.admin}/metrics")).body.decode()
        line = f'magnitude_session_ids_unstable_total{{source="x-session-id"}} {len(turns) - 2}'
        assert line in metrics


async def test_the_worker_keeps_one_line_of_a_renamed_agent_and_learns_what_its_tools_took(tmp_path: Path) -> None:
    trace = max(traces(), key=lambda t: sum(m.role == "assistant" for m in t.messages))
    turns = list(renamed(Run("renamed", trace, random.Random(1))))
    async with agents(tmp_path, stored=False) as made:
        for turn in turns:
            hints = {"x-claude-code-prev-tool-durations": "Bash=1500", "authorization": "Bearer sk-one"}
            body = {name: value for name, value in turn.body.items() if name != "model"}
            assert (await made.proxy.post(turn.path, body, **turn.headers, **hints)).status == 200
        asked = made.worker.generated
    # Retention, what is computed ahead and fairness go by these names.
    assert len({(each.tenant, each.session, each.branch, each.run) for each in asked[2:]}) == 1
    assert [each.step for each in asked[2:]] == list(range(1, len(turns) - 1))
    assert {each.run for each in asked[2:]} == {asked[0].session}
    assert all(each.tool_seconds == {"Bash": 1.5} for each in asked)


async def test_a_session_of_dynamos_that_is_final_ends_in_the_worker(tmp_path: Path) -> None:
    headers = {"authorization": "Bearer sk-one", "x-dynamo-session-id": "root", "x-dynamo-session-final": "true"}
    async with agents(tmp_path, stored=False) as made:
        for stream, of in ((False, {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": "root"}), (True, {})):
            reply = await made.proxy.post("/chat/completions", {"messages": MESSAGES, "stream": stream}, **headers | of)
            assert reply.status == 200
        await until(lambda: len(made.worker.news) == 2)
        ended = [(each.session, each.branch) for each in made.worker.news if isinstance(each, api.EndSession)]
        assert ended == [(reply.header("x-magnitude-session"), branch) for branch in ("child", None)]


async def test_two_proxies_with_one_session_lose_and_count_nothing_twice(tmp_path: Path) -> None:
    """Concurrent steps of one session over two proxies: each is counted or refused, and the store is right."""
    async with store.server("valkey", tmp_path) as server, OpenAIStub(text="a b c") as stub:
        kept = StoreConfig(url=server.url, timeout_s=2.0)
        async with (
            proxying(proxy_config(tmp_path, stub.url, store=kept)) as one,
            proxying(proxy_config(tmp_path, stub.url, store=kept)) as two,
        ):
            body = {"model": "stub-model", "messages": [{"role": "user", "content": "Hi"}]}

            async def step(n: int) -> None:
                branch = {"x-magnitude-branch": f"b{n % 3}"} if n % 4 == 0 else {}
                reply = await (one, two)[n % 2].post("/chat/completions", body, session_id="shared", **branch)
                assert (reply.status, reply.header("x-magnitude-degraded")) == (200, None)

            for round_ in range(5):
                await asyncio.gather(*(step(n) for n in range(8)))
                await step(round_)
            reports = [(await proxy.get("/v1/sessions/shared")).json for proxy in (one, two)]
            stale = sum([await metric(proxy, "magnitude_session_stale_commits_total") for proxy in (one, two)])
        assert reports[0]["steps"] == reports[1]["steps"] == 45 - stale
        assert 0 < stale < 35
        assert [report["usage"]["completion_tokens"] for report in reports] == [3 * reports[0]["steps"]] * 2
        assert reports[0]["state"] == "idle"


async def metric(proxy: Proxy, name: str) -> float:
    """Returns a counter without labels, 0 where it has not been counted."""
    text = (await proxy.get(f"{proxy.admin}/metrics")).body.decode()
    return sum(float(line.split(" ")[1]) for line in text.splitlines() if line.startswith(f"{name} "))
