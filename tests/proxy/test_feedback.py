"""Feedback over real sockets and a real store: counted once, whatever the order, and never across tenants."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import MagnitudeClient
from magnitude_proxy.identity import tenant_name
from magnitude_proxy.store.book import SessionBook
from magnitude_proxy.store.credit import KEPT, Feedback, StepNote, credited, ordered
from testkit.agents import Agents, agents

pytestmark = pytest.mark.thorough

EARLY, LATE = "2020-01-01T00:00:00Z", "2100-01-01T00:00:00+00:00"
GOOD = {"status": "acknowledged"}


def said(session: str, success: bool = True, timestamp: str = LATE, **fields: Any) -> dict[str, Any]:
    return {"session_id": session, "success": success, "error_reason": None, "timestamp": timestamp, **fields}


async def stream(made: Agents) -> list[dict[str, str]]:
    """The entries of alice's stream."""
    assert made.store is not None
    key = f"magnitude:{{{tenant_name(made.worker.generated[0].tenant)}}}:feedback"
    entries = await made.store.do("XRANGE", key, "-", "+")
    assert isinstance(entries, list)
    return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in entries]


@pytest.mark.parametrize("stored", [True, False])
async def test_feedback_is_credited_to_tracked_steps(tmp_path: Path, stored: bool) -> None:
    async with agents(tmp_path, stored=stored) as made:
        shown = await made.step("run-1", track_feedback=True)
        await made.step("run-1")
        await made.step("run-1", track_feedback=True)
        before = said("run-1", timestamp=EARLY)
        after = said(shown, False, error_reason="tests failed")
        for told in (after, before, after):
            assert (await made.ask("POST", "/feedback", told)).json == GOOD
        report = (await made.ask("GET", f"/sessions/{shown}")).json
        assert [(step["step"], step["success"]) for step in report["tracked_steps"]] == [(0, False), (2, False)]
        assert [each["timestamp"] for each in report["feedback"]] == [EARLY, LATE]
        assert report["feedback"][1]["error_reason"] == "tests failed"
        assert await made.metric("feedback") == {'outcome="added"': 2, 'outcome="known"': 1}
        if stored:
            entries = await stream(made)
            assert [(e["session"], e["success"], e["error_reason"], e["steps"]) for e in entries] == [
                (shown, "0", "tests failed", "3"),
                (shown, "1", "", "3"),
            ]


async def test_sessions_that_are_unknown_foreign_or_expired_are_rejected_alike(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        shown = await made.step("run-1")
        gone = await made.step("run-2")
        assert made.store is not None
        await made.store.do("DEL", f"magnitude:{{{gone}}}")
        replies = [
            await made.ask("POST", "/feedback", said(name), key)
            for name, key in ((shown, "sk-two"), ("run-1", "sk-two"), ("never", "sk-one"), (gone, "sk-one"))
        ]
        assert {reply.body for reply in replies} == {replies[0].body}
        assert (replies[0].status, replies[0].json["status"]) == (200, "rejected")
        assert "expired" in replies[0].json["reason"]
        assert await stream(made) == []


async def test_any_order_and_any_repetition_is_the_same(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        await made.step("run-1", track_feedback=True)
        await made.step("run-2", track_feedback=True)
        dice = random.Random(7)
        told = [said("", dice.random() < 0.5, f"2100-01-01T00:{n:02}:00Z") for n in range(12)]
        for name, times in (("run-1", 1), ("run-2", 3)):
            sent = [{**each, "session_id": name} for each in told * times]
            dice.shuffle(sent)
            for each in sent:
                assert (await made.ask("POST", "/feedback", each)).json == GOOD
        one, two = [(await made.ask("GET", f"/sessions/run-{n}")).json for n in (1, 2)]
        assert one["feedback"] == two["feedback"]
        assert len(one["feedback"]) == 12
        assert one["tracked_steps"][0]["success"] == two["tracked_steps"][0]["success"] == told[0]["success"]
        assert len(await stream(made)) == 24


async def test_what_was_kept_but_not_streamed_is_streamed_by_the_next_attempt(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        await made.step("run-1")
        book: SessionBook = made.proxy.running.surface.sessions.book
        salt = made.worker.generated[0].tenant
        record = await book.find(salt, "run-1")
        assert record is not None
        assert made.store is not None
        # A process that died between keeping feedback and adding it to the stream has left this.
        feedback = Feedback(success=True, timestamp=LATE, at_s=4102444800.0)
        call = made.proxy.running.surface.sessions.call
        words = (record.tenant, feedback.id(), feedback.at_s, '{"success":true,"timestamp":"x","at_s":1.0}')
        await call("test", "FCALL", "magnitude_session_feedback_4", 1, f"magnitude:{{{record.session}}}", *words)
        for _ in range(2):
            assert (await made.ask("POST", "/feedback", said("run-1"))).json == GOOD
        assert len(await stream(made)) == 1


@pytest.mark.parametrize("stored", [True, False])
async def test_a_session_keeps_the_latest(tmp_path: Path, stored: bool) -> None:
    async with agents(tmp_path, stored=stored) as made:
        shown = await made.step("run-1")
        times = [f"2100-01-01T{n // 60:02}:{n % 60:02}:00Z" for n in range(KEPT + 2)]
        for when in (*times[1:-1], times[-1]):
            assert (await made.ask("POST", "/feedback", said("run-1", timestamp=when))).json == GOOD
        late = (await made.ask("POST", "/feedback", said("run-1", timestamp=times[0]))).json
        assert (late["status"], "later ones" in late["reason"]) == ("rejected", True)
        kept = (await made.ask("GET", f"/sessions/{shown}")).json["feedback"]
        assert [each["timestamp"] for each in kept] == times[2:]


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"success": "yes"}, "success"),
        ({"timestamp": "yesterday"}, "timestamp"),
        ({"timestamp": 5}, "timestamp"),
        ({"session_id": ""}, "session_id"),
        ({"error_reason": "x" * 5_000}, "error_reason"),
    ],
)
async def test_wrong_feedback_is_a_400(tmp_path: Path, wrong: dict[str, Any], param: str) -> None:
    async with agents(tmp_path, stored=False) as made:
        reply = await made.ask("POST", "/feedback", {**said("run-1"), **wrong})
        assert (reply.status, reply.error["param"]) == (400, param)


async def test_the_published_client_and_a_store_that_is_down(tmp_path: Path) -> None:
    async with agents(tmp_path) as made:
        await made.step("run-1")
        async with MagnitudeClient(made.proxy.url, api_key="sk-one", max_retries=0) as client:
            assert await client.submit_telemetry_feedback(said("run-1")) == GOOD
            assert (await client.submit_telemetry_feedback(said("run-7")))["status"] == "rejected"
        assert made.store is not None
        await made.store.kill()
        reply = await made.ask("POST", "/feedback", said("run-1"))
        assert (reply.status, reply.error["code"], reply.header("retry-after")) == (503, "store_unavailable", "1")


def test_a_step_is_credited_with_the_first_word_after_it() -> None:
    step = StepNote(
        at_s=100.0,
        branch="main",
        route="r",
        finish_reason="",
        prompt_tokens=0,
        completion_tokens=0,
        cached_tokens=0,
        ok=True,
    )
    words = ordered([Feedback(success=at == 99, timestamp="", at_s=at) for at in (300.0, 99.0, 200.0, 97.0)])
    first = credited(step, words)
    assert (first is not None and first.at_s) == 99.0
    assert credited(step, words[:1]) is None
    assert credited(step, ()) is None
