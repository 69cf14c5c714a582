"""A tenant's sessions over real sockets and a real store: listed, shown, ended, and nobody else's business."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from magnitude_engine import api
from magnitude_proxy.identity import IdentityHints, identify
from magnitude_proxy.session import StepOutcome
from testkit.agents import Agents, agents

pytestmark = pytest.mark.thorough

ANSWER = StepOutcome(
    route="local", finish_reason="stop", prompt_tokens=1, completion_tokens=1, cached_tokens=0, tool_call=False, ok=True
)


@pytest.fixture(params=["store", "memory"])
async def both(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Agents]:
    async with agents(tmp_path, stored=request.param == "store") as made:
        yield made


async def test_a_session_is_listed_shown_and_ended(both: Agents) -> None:
    shown = await both.step("run/1 ü", track_feedback=True)
    await both.step("run/1 ü")
    other = await both.step("run-2")
    salt = both.worker.generated[0].tenant
    use = api.SessionUse(tenant=salt, session=shown, branch="main", state="waiting", tokens=64, tool="ls", due_s=2.0)
    assert both.worker.report is not None
    both.worker.report = msgspec.structs.replace(both.worker.report, sessions=(use,))
    listed = (await both.ask("GET", "/sessions")).json
    assert [each["id"] for each in listed["data"]] == [other, shown]
    assert (listed["has_more"], listed["last_id"]) == (False, shown)
    for name in (shown, "run%2F1%20%C3%BC"):
        report = (await both.ask("GET", f"/sessions/{name}")).json
        assert (report["id"], report["client_id"], report["source"]) == (shown, "run/1 ü", "magnitude")
        assert (report["state"], report["steps"], report["usage"]["prompt_tokens"]) == ("idle", 2, 6)
        assert report["expires_at"] - report["seen_at"] == 86_400
        assert [(s["step"], s["ok"], s["success"]) for s in report["tracked_steps"]] == [(0, True, None)]
        assert report["cache"] == [
            {"branch": "main", "state": "waiting", "tokens": 64, "waits_for": "ls", "due_s": 2.0}
        ]
    ended = await both.ask("DELETE", f"/sessions/{shown}")
    assert ended.json == {"id": shown, "deleted": True, "object": "session.deleted"}
    assert both.worker.news == [api.EndSession(tenant=salt, session=shown)]
    assert (await both.ask("DELETE", f"/sessions/{shown}")).error["code"] == "session_not_found"
    assert [each["id"] for each in (await both.ask("GET", "/sessions")).json["data"]] == [other]


async def test_another_tenants_session_is_one_that_never_was(both: Agents) -> None:
    shown = await both.step("secret")
    for method, path in (
        ("GET", "/sessions/{}"),
        ("DELETE", "/sessions/{}"),
        ("POST", "/sessions/{}/events"),
    ):
        event = {"type": "tool_started", "call_id": "c"}
        replies = [await both.ask(method, path.format(name), event, "sk-two") for name in (shown, "secret", "0" * 32)]
        assert [reply.status for reply in replies] == [404] * 3
        assert len({reply.body for reply in replies}) == 1
    assert (await both.ask("GET", "/sessions", key="sk-two")).json["data"] == []
    assert both.worker.news == []
    assert (await both.ask("GET", f"/sessions/{shown}")).status == 200


async def test_pages_follow_one_another(both: Agents) -> None:
    made = [await both.step(f"run-{n}") for n in range(5)]
    first = (await both.ask("GET", "/sessions?limit=2")).json
    second = (await both.ask("GET", f"/sessions?limit=2&after={first['last_id']}")).json
    third = (await both.ask("GET", f"/sessions?limit=2&after={second['last_id']}")).json
    found = [each["id"] for page in (first, second, third) for each in page["data"]]
    assert found == made[::-1]
    assert [page["has_more"] for page in (first, second, third)] == [True, True, False]
    for query, param in (("limit=0", "limit"), ("limit=x", "limit"), ("limit=101", "limit"), ("after=none", "after")):
        wrong = await both.ask("GET", f"/sessions?{query}")
        assert (wrong.status, wrong.error["param"]) == (400, param)


async def test_a_deleted_session_takes_no_step_that_was_under_way(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        shown = await made.step("run-1")
        sessions, salt = made.proxy.running.surface.sessions, made.worker.generated[0].tenant
        lease = await sessions.open(identify(salt, {"X-Magnitude-Session": "run-1"}, IdentityHints()))
        assert (await made.ask("DELETE", "/sessions/run-1")).json["id"] == shown
        assert not await sessions.commit(lease, ANSWER)
        assert await sessions.get(shown) is None


async def test_with_the_store_away_nothing_is_said_of_sessions(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        shown = await made.step("run-1")
        assert made.store is not None
        await made.store.kill()
        for method, path in (("GET", "/sessions"), ("GET", f"/sessions/{shown}"), ("DELETE", "/sessions/run-1")):
            reply = await made.ask(method, path)
            assert (reply.status, reply.error["code"], reply.header("retry-after")) == (503, "store_unavailable", "1")


async def test_expired_sessions_leave_the_list(tmp_path: Path) -> None:
    async with agents(tmp_path, ttl_s=0.2) as made:
        await made.step("run-1")
        await asyncio.sleep(0.25)
        last = await made.step("run-2")
        assert [each["id"] for each in (await made.ask("GET", "/sessions")).json["data"]] == [last]
        assert (await made.ask("GET", "/sessions/run-1")).error["code"] == "session_not_found"


async def test_a_flushed_store_lists_what_goes_on(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        shown = await made.step("run-1")
        assert made.store is not None
        await made.store.do("FLUSHALL")
        assert (await made.ask("GET", "/sessions")).json["data"] == []
        await made.step("run-1")
        assert [each["id"] for each in (await made.ask("GET", "/sessions")).json["data"]] == [shown]
