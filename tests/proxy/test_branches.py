"""Branches of sessions over real sockets, on a real store and in memory: what each act changes, and what it refuses."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_proxy.identity import IdentityHints, identify
from magnitude_proxy.store.branches import KEPT_ENDED, Branches, changed, forked, pruned
from testkit.agents import MESSAGES, Agents, agents, until
from testkit.proxy import Reply, proxy_config, proxying
from testkit.upstream import OpenAIStub

pytestmark = pytest.mark.thorough

ROUTES = {
    "/chat/completions": {"messages": MESSAGES},
    "/completions": {"prompt": "2"},
    "/responses": {"input": "go"},
    "/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.fixture(params=["store", "memory"])
async def both(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Agents]:
    async with agents(tmp_path, stored=request.param == "store") as made:
        await made.step("run-1")
        yield made


async def act(made: Agents, below: str = "", body: Any = None, key: str = "sk-one", session: str = "run-1") -> Reply:
    """Posts to the branches of a session."""
    return await made.ask("POST", f"/sessions/{session}/branches{below}", {} if body is None else body, key)


async def fork(made: Agents, **body: Any) -> list[str]:
    """Forks and returns the ids."""
    reply = await act(made, "", body)
    assert reply.status == 200, reply.body
    return [each["id"] for each in reply.json["data"]]


async def listed(made: Agents) -> dict[str, dict[str, Any]]:
    data = (await made.ask("GET", "/sessions/run-1/branches")).json["data"]
    return {each["id"]: each for each in data}


def ends(made: Agents) -> list[tuple[str | None, bool]]:
    """What the worker was told of lines that ended, and forgets that."""
    told = [(each.branch, each.pruned) for each in made.worker.news if isinstance(each, api.EndSession)]
    made.worker.news.clear()
    return told


async def test_branches_are_forked_asked_scored_and_pruned(both: Agents) -> None:
    one, two, three = await fork(both, count=3)
    (child,) = await fork(both, parent=one)
    for path, body in ROUTES.items():
        for given in ({"x_magnitude_branch": two}, {}):
            named = {"session": "run-1"} if given else {"session": "run-1", "branch": child}
            reply = await both.ask("POST", path, {**body, "magnitude": named}, **given)
            assert (reply.status, both.worker.generated[-1].branch) == (200, two if given else child), reply.body
    reply = await act(both, f"/{two}/score", {"score": 0.5})
    assert (reply.json["score"], reply.json["state"], reply.json["parent"]) == (0.5, "open", "main")
    await act(both, f"/{two}/score", {"score": -1})
    gone = (await act(both, f"/{one}/prune", {"reason": "a dead end"})).json["data"]
    assert [(each["id"], each["state"], each["reason"]) for each in gone] == [
        (one, "pruned", "a dead end"),
        (child, "pruned", "a dead end"),
    ]
    assert ends(both) == [(one, True), (child, True)]
    assert (await act(both, f"/{one}/prune")).json["data"] == []
    assert ends(both) == []
    found = await listed(both)
    assert [(name, each["depth"], each["state"], each["score"]) for name, each in found.items()] == [
        (one, 1, "pruned", None),
        (two, 1, "open", -1.0),
        (three, 1, "open", None),
        (child, 2, "pruned", None),
    ]
    report = (await both.ask("GET", "/sessions/run-1")).json
    assert report["steps"] == 1 + 2 * len(ROUTES)


async def test_the_session_goes_on_from_the_selected_branch(both: Agents) -> None:
    one, two = await fork(both, count=2)
    chosen = (await act(both, f"/{one}/select")).json
    assert (chosen["id"], chosen["state"]) == (one, "selected")
    assert ends(both) == [(two, True), ("main", False)]
    assert (await act(both, f"/{one}/select")).json == chosen
    assert ends(both) == []
    await both.step("run-1")
    assert both.worker.generated[-1].branch == one
    event = {"type": "tool_started", "call_id": "c"}
    await both.ask("POST", "/sessions/run-1/events", event)
    await until(lambda: bool(both.worker.news))
    assert [each.branch for each in both.worker.news] == [one]
    both.worker.news.clear()
    (three,) = await fork(both)
    await act(both, f"/{three}/select")
    assert ends(both) == [(one, False)]
    assert (await both.ask("GET", "/sessions/run-1/branches")).json["line"] == three
    for path, body in ROUTES.items():
        for name, words in ((one, "was selected"), (two, "was pruned")):
            reply = await both.ask("POST", path, {**body, "magnitude": {"session": "run-1", "branch": name}})
            assert (reply.status, reply.header("x-should-retry")) == (409, "false")
            assert words in reply.json["error"]["message"]
    refused = await act(both, f"/{two}/select")
    assert (refused.status, refused.error["code"]) == (409, "branch_ended")


async def test_the_limit_says_what_to_do(both: Agents) -> None:
    names = await fork(both, count=7)
    refused = await act(both, "", {"count": 2})
    assert (refused.status, refused.error["code"], refused.error["param"]) == (429, "branch_limit_exceeded", "count")
    assert refused.header("x-should-retry") == "false"
    assert "has 7 open branches; 2 more would be over max_parallel_branches=8" in refused.error["message"]
    await act(both, f"/{names[0]}/prune")
    assert len(await fork(both, count=2)) == 2
    for name in names[1:]:
        await act(both, f"/{name}/prune")
    (kept,) = await fork(both, max_parallel_branches=3)
    assert (await act(both)).status == 429
    await act(both, f"/{kept}/prune")
    reply = await act(both, "", {"max_parallel_branches": 1000})
    assert reply.json["max_parallel_branches"] == 8


async def test_what_is_wrong_is_a_typed_refusal(tmp_path: Path) -> None:
    wrong: list[tuple[str, Any, int, str | None]] = [
        ("", {"count": 0}, 400, "count"),
        ("", {"count": 10_000}, 400, "count"),
        ("", {"count": "3"}, 400, "count"),
        ("", {"count": True}, 400, "count"),
        ("", {"parent": "mbr-none"}, 404, "branch"),
        ("", {"parent": 5}, 400, "parent"),
        ("", {"max_parallel_branches": 0}, 400, "max_parallel_branches"),
        ("", b"[]", 400, None),
        ("", b"", 400, None),
        ("/{}/score", b'{"score": NaN}', 400, "score"),
        ("/{}/score", b'{"score": 1e999}', 400, "score"),
        ("/{}/score", {"score": True}, 400, "score"),
        ("/{}/score", {}, 400, "score"),
        ("/{}/prune", {"reason": "x" * 5000}, 400, "reason"),
        ("/main/prune", {}, 404, "branch"),
        ("/%00%ff'%22%0d%0a/select", {}, 404, "branch"),
        (f"/{'x' * 4000}/score", {"score": 1}, 404, "branch"),
    ]
    async with agents(tmp_path, stored=False) as made:
        await made.step("run-1")
        (name,) = await fork(made)
        for below, body, status, param in wrong:
            reply = await act(made, below.format(name), body)
            assert (reply.status, reply.error["param"]) == (status, param), reply.body
        unknown = await act(made, "", {}, session="never")
        assert (unknown.status, unknown.error["code"]) == (404, "session_not_found")
        assert [(each["state"], each["score"]) for each in (await listed(made)).values()] == [("open", None)]


async def test_another_tenants_branch_is_one_that_never_was(both: Agents) -> None:
    (name,) = await fork(both)
    await both.step("run-1", "sk-two")
    foreign = [
        await act(both, below, body, "sk-two")
        for below, body in (
            ("", {"parent": name}),
            (f"/{name}/score", {"score": 1}),
            (f"/{name}/prune", {}),
            (f"/{name}/select", {}),
        )
    ]
    body = {"messages": MESSAGES, "magnitude": {"session": "run-1", "branch": name}}
    foreign.append(await both.ask("POST", "/chat/completions", body, "sk-two"))
    assert {(reply.status, reply.error["code"]) for reply in foreign} == {(404, "branch_not_found")}
    shown = str((await both.ask("GET", "/sessions/run-1")).json["id"])
    for path in (f"/{name}/score", f"/{name}/prune", f"/{name}/select", ""):
        reply = await act(both, path, {"score": 1}, "sk-two", shown)
        assert (reply.status, reply.error["code"]) == (404, "session_not_found")
    assert (await both.ask("GET", "/sessions/run-1/branches", key="sk-two")).json["data"] == []
    assert [each["state"] for each in (await listed(both)).values()] == ["open"]
    assert ends(both) == []


@pytest.mark.parametrize("way", ["feedback", "event"])
async def test_a_branch_that_is_judged_dead_is_pruned(both: Agents, way: str) -> None:
    one, two = await fork(both, count=2)
    for name in (one, two):
        await both.step("run-1", branch=name, track_feedback=True)

    async def judge(name: str, success: bool = False) -> Reply:
        said = {"session_id": "run-1", "success": success, "timestamp": "2100-01-01T00:00:00Z", "branch": name}
        event = {"type": "branch_failed", "branch": name, "reason": "wrong"}
        if way == "event":
            return await both.ask("POST", "/sessions/run-1/events", event)
        return await both.ask("POST", "/feedback", {**said, "error_reason": None if success else "wrong"})

    for _ in range(2):
        assert (await judge(one)).status == 200
    assert [(each["state"], each["reason"]) for each in (await listed(both)).values()] == [
        ("pruned", "wrong"),
        ("open", ""),
    ]
    await judge("a sub-agent's own name")
    (own,) = [each for each in both.worker.news[1:] if isinstance(each, api.EndSession)]
    assert (own.branch or "").startswith("~")
    unknown = await judge("mbr-none")
    if way == "event":
        assert (unknown.status, unknown.error["code"]) == (404, "branch_not_found")
        assert (await judge("main")).error["param"] == "branch"
        return
    assert unknown.json == {"status": "rejected", "reason": "the session has no such branch"}
    await judge(two, success=True)
    steps = (await both.ask("GET", "/sessions/run-1")).json["tracked_steps"]
    assert [(step["branch"], step["success"]) for step in steps] == [(one, False), (two, True)]
    assert (await listed(both))[two]["state"] == "open"


async def test_acts_of_two_proxies_at_once_never_pass_the_limit_and_lose_nothing(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        await made.step("run-1")
        config = made.proxy.running.surface.config
        async with proxying(config) as second:
            other = Agents(second, made.worker, made.store)
            sides = (made, other)
            tried = await asyncio.gather(*(act(each) for each in sides * 6))
            assert sorted(reply.status for reply in tried) == [200] * 8 + [429] * 4
            names = list(await listed(other))
            scores = [
                act(each, f"/{name}/score", {"score": n})
                for n, (each, name) in enumerate(zip(sides * 4, names, strict=True))
            ]
            assert {reply.status for reply in await asyncio.gather(*scores)} == {200}
            assert [each["score"] for each in (await listed(made)).values()] == list(range(8))
            await asyncio.gather(*(act(each, f"/{names[n]}/select") for n, each in enumerate(sides)))
            lines = [(await each.ask("GET", "/sessions/run-1/branches")).json["line"] for each in sides]
            assert lines[0] == lines[1]
            assert lines[0] in names[:2]
            states = [each["state"] for each in (await listed(made)).values()]
            assert (states.count("selected"), states.count("pruned")) == (1, 7)


async def test_a_step_of_a_branch_that_is_pruned_meanwhile_is_not_kept(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        shown = await made.step("run-1")
        (name,) = await fork(made)
        body = {"prompt": "1 pause", "stream": True, "magnitude": {"session": "run-1", "branch": name}}
        asking = asyncio.create_task(made.ask("POST", "/completions", body))
        await until(lambda: len(made.worker.generated) == 2)
        await act(made, f"/{name}/prune")
        made.worker.fail(made.worker.generated[-1], "branch_ended")
        assert (await asking).events[-1]["error"]["code"] == "branch_ended"
        assert (await made.ask("GET", f"/sessions/{shown}")).json["steps"] == 1
        # A worker that learns of the branch's end before a request that was already let in is told again.
        assert ends(made) == [(name, True)] * 2
        assert await made.metric("stale_commits") == {}


async def test_a_worker_or_a_store_that_is_away(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        await made.step("run-1")
        one, two = await fork(made, count=2)
        await made.worker.close()
        worker = made.proxy.running.surface.worker
        await until(lambda: worker is not None and not worker.available())
        assert [(each["id"], each["tokens"]) for each in (await listed(made)).values()] == [(one, None), (two, None)]
        assert (await act(made, f"/{one}/select")).status == 200
        await made.worker.start()
        await until(lambda: worker is not None and worker.available())
        assert made.store is not None
        await made.store.kill()
        await made.step("run-1", branch=one)
        for below in ("", f"/{two}/score", f"/{two}/prune", f"/{two}/select"):
            reply = await act(made, below, {"score": 1})
            assert (reply.status, reply.error["code"], reply.header("retry-after")) == (503, "store_unavailable", "1")
        assert (await made.ask("GET", "/sessions/run-1/branches")).error["code"] == "store_unavailable"


async def test_without_a_worker_branches_are_an_upstreams(tmp_path: Path) -> None:
    async with OpenAIStub(text="yes") as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        ask = {"model": "stub-model", "messages": MESSAGES, "magnitude": {"session": "run-1"}}
        assert (await proxy.post("/chat/completions", ask)).status == 200
        made = (await proxy.post("/sessions/run-1/branches", {"count": 2})).json["data"]
        one, two = (each["id"] for each in made)
        assert (await proxy.post("/chat/completions", ask, x_magnitude_branch=one)).status == 200
        chosen = await proxy.post(f"/sessions/run-1/branches/{one}/select", {})
        assert (chosen.status, chosen.json["tokens"]) == (200, None)
        assert (await proxy.post("/chat/completions", ask, x_magnitude_branch=two)).status == 409
        assert (await proxy.post("/chat/completions", ask)).status == 200


async def test_the_store_gives_no_lease_of_a_branch_that_has_ended(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        await made.step("run-1")
        (name,) = await fork(made)
        sessions, salt = made.proxy.running.surface.sessions, made.worker.generated[0].tenant
        record = await sessions.book.find(salt, "run-1")
        identity = identify(salt, {"X-Magnitude-Session": "run-1", "X-Magnitude-Branch": name}, IdentityHints())
        lease = await sessions.open(identity)
        assert lease.line == name
        await act(made, f"/{name}/prune")
        after = await sessions.book.find(salt, "run-1")
        assert record is not None
        assert after is not None
        assert after.epoch == record.epoch + 1
        assert (
            await made.ask("POST", "/chat/completions", {"messages": MESSAGES}, x_magnitude_branch="sub-agent")
        ).status == 200


def test_of_branches_that_ended_the_last_are_kept() -> None:
    known, numbers = Branches(), itertools.count()
    for _ in range(KEPT_ENDED + 40):
        name = f"mbr-{next(numbers)}"
        known = changed(known, forked(known, "main", [name], (8, None), 0.0))
        known = changed(known, pruned(known, name, "", 0.0))
    assert list(known.notes) == [f"mbr-{n}" for n in range(40, KEPT_ENDED + 40)]
    assert known.dead == set(known.notes)
    assert [note.number for note in known.notes.values()] == list(range(41, KEPT_ENDED + 41))
