"""The published client's sessions and tools against a real proxy before a scripted worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnitude_engine import MagnitudeClient, api
from magnitude_engine.client import session as session_module
from magnitude_engine.client.client import RegisteredTool
from magnitude_engine.errors import RequestError, StatusError
from magnitude_proxy import events as events_module
from testkit.agents import Agents, agents, until

TOOL = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object"}}}
BAD = {"type": "function", "function": {"name": "bad", "parameters": {"type": "object"}}}


@pytest.fixture
async def made(tmp_path: Path) -> AsyncIterator[Agents]:
    async with agents(tmp_path, stored=False) as running:
        yield running


@pytest.fixture
async def client(made: Agents) -> AsyncIterator[MagnitudeClient]:
    async with MagnitudeClient(made.proxy.url, api_key="sk-one", max_retries=0) as running:
        yield running


def told(made: Agents) -> str:
    return "".join(event.text for event in made.worker.news if isinstance(event, api.ToolEvent))


async def test_tools_are_registered(made: Agents, client: MagnitudeClient) -> None:
    registered = await client.register_tools([TOOL], system="Be brief.")
    tool = RegisteredTool(name="odd", status="compiled", grammar="checked", checked_keywords=("not at #",))
    assert registered.tools == (tool,)
    assert made.worker.registered[0].system == "Be brief."
    with pytest.raises(StatusError, match="tool 'bad'") as refused:
        await client.register_tools([TOOL, BAD])
    assert (refused.value.status, refused.value.param) == (400, "tools[1].function.parameters")
    with pytest.raises(RequestError) as wrong:
        await client.register_tools("odd")  # type: ignore[arg-type]
    assert wrong.value.param == "tools"


@pytest.mark.thorough
async def test_a_session_tells_and_is_told(made: Agents, client: MagnitudeClient) -> None:
    name = "runs/1 ü?"
    await client.chat([{"role": "user", "content": "go"}], session_id=name, track_feedback=True)
    session = client.session(name)
    async with session.events(branch="b1") as events:
        await events.tool_started("c1", "ls")
        await until(lambda: len(made.worker.news) == 1)
        await events.tool_output("c1", "total ")
        await until(lambda: told(made) == "total ")
        await events.tool_finished("c1", "4")
        await events.step_failed("wrong folder")
        await events.step_failed(step=7)
    assert events.receipt is not None
    assert (events.receipt.events, events.receipt.delivered, events.receipt.rejected) == (5, 4, 1)
    assert "event 6: step is none" in events.receipt.errors[0]
    await until(lambda: told(made) == "total 4")
    assert {event.branch for event in made.worker.news} == {"b1"}
    report = await session.report()
    assert (report.client_id, report.state, report.steps, report.tracked_steps[0].dead) == (
        name,
        "failed",
        1,
        "wrong folder",
    )
    await session.end()
    with pytest.raises(StatusError, match="no such session") as gone:
        await session.report()
    assert (gone.value.status, gone.value.error_code) == (404, "session_not_found")


@pytest.mark.thorough
async def test_long_output_comes_in_pieces_and_no_faster_than_it_is_taken(
    made: Agents, client: MagnitudeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PIECE_CHARS", 1000)
    await made.step("run-1")
    text = "é\n" * 100_000
    async with client.session("run-1").events() as events:
        await events.tool_finished("c1", text)
    assert events.receipt is not None
    assert events.receipt.events == 201
    await until(lambda: told(made) == text)


async def test_a_stream_that_the_server_refuses_or_ends_is_an_error(
    made: Agents, client: MagnitudeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StatusError, match="no such session"):
        async with client.session("never").events() as events:
            await events.tool_started("c1")
    await made.step("run-1")
    monkeypatch.setattr(events_module, "MAX_FAULTS", 2)
    async with client.session("run-1").events() as events:
        for _ in range(3):
            await events.step_failed(step=9)
    assert events.receipt is not None
    assert (events.receipt.events, events.receipt.rejected) == (0, 2)
    assert "2 lines were wrong" in events.receipt.errors[-1]
    with pytest.raises(RequestError, match="async with"):
        await client.session("run-1").events().tool_started("c1")
    with pytest.raises(RequestError, match="non-empty"):
        client.session("")


async def test_a_block_that_fails_drops_its_stream(made: Agents, client: MagnitudeClient) -> None:
    await made.step("run-1")
    events = client.session("run-1").events()

    async def fail() -> None:
        async with events:
            await events.tool_started("c1")
            await until(lambda: len(made.worker.news) == 1)
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await fail()
    assert events.receipt is None
    await until(lambda: made.proxy.running.surface.drain.running == 0)


@pytest.mark.thorough
async def test_branches_of_a_session(made: Agents, client: MagnitudeClient) -> None:
    name, ask = "runs/1 ü?", [{"role": "user", "content": "go"}]
    await client.chat(ask, session_id=name)
    session = client.session(name)
    one, two, three = await session.fork(3)
    (child,) = await session.fork(parent=two, max_parallel_branches=4)
    assert (child.parent, child.depth, child.state, child.tokens) == (two.id, 2, "open", 0)
    for branch in (one, child):
        result = await client.chat(ask, session_id=name, branch=branch.id)
        assert (result["session_id"], made.worker.generated[-1].branch) == (name, branch.id)
        await session.score(branch, len(branch.id) if branch is child else -0.5)
    assert (await session.branches()).best().id == child.id
    with pytest.raises(StatusError, match="max_parallel_branches=4") as full:
        await session.fork()
    assert (full.value.status, full.value.error_code) == (429, "branch_limit_exceeded")
    async with session.events(branch=three.id) as events:
        await events.branch_failed("no way")
    assert [each.id for each in await session.prune(one.id, "worse")] == [one.id]
    assert (await session.select(child)).state == "selected"
    found = await session.branches()
    assert (found.line, [(each.state, each.reason) for each in found.branches]) == (
        child.id,
        [("pruned", "worse"), ("pruned", f"{child.id} was selected"), ("pruned", "no way"), ("selected", "")],
    )
    with pytest.raises(StatusError, match="was selected") as ended:
        await client.generate_optimized(prompt="go", session_id=name, branch=child.id)
    assert (ended.value.status, ended.value.error_code) == (409, "branch_ended")
    with pytest.raises(RequestError, match="no open branch"):
        found.best()


async def test_wrong_acts_on_branches_are_refused_before_they_are_sent(client: MagnitudeClient) -> None:
    session = client.session("run-1")
    for call, param in (
        (lambda: session.fork(0), "count"),
        (lambda: session.fork(True), "count"),
        (lambda: session.fork(parent=5), "branch"),  # type: ignore[arg-type]
        (lambda: session.fork(max_parallel_branches=0), "max_parallel_branches"),
        (lambda: session.score("b", float("nan")), "value"),
        (lambda: session.score("b", True), "value"),
        (lambda: session.prune("b", 5), "reason"),  # type: ignore[arg-type]
        (lambda: session.select(""), "branch"),
        (lambda: client.chat([], branch="b"), "branch"),
    ):
        with pytest.raises(RequestError) as wrong:
            await call()
        assert wrong.value.param == param
