"""The worker's route against a scripted worker on a real socket: nothing lost, mixed up, or waited for in vain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from magnitude_engine import api
from magnitude_engine.errors import WorkerLost
from magnitude_proxy.config import TelemetryConfig
from magnitude_proxy.routing.route import Step
from magnitude_proxy.telemetry import Telemetry
from magnitude_proxy.worker.inbox import Inbox, merge
from magnitude_proxy.worker.local import LocalRoute, Pulse
from testkit.clock import ManualClock
from testkit.scripted_worker import CARD, REPORT, ScriptedWorker

HANG_S = 5.0


class Bench:
    """A worker and a route to it."""

    def __init__(self, folder: Path, protocol: int = api.PROTOCOL_VERSION) -> None:
        self.worker = ScriptedWorker(folder / "w.sock", protocol)
        self.telemetry = Telemetry(TelemetryConfig())
        self.clock = ManualClock()
        self.route = LocalRoute(folder / "w.sock", self.telemetry, hang_s=HANG_S, clock=self.clock)

    def fenced(self) -> float:
        lines = self.telemetry.exposition().decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith("magnitude_frames_fenced_total"))


@asynccontextmanager
async def bench(folder: Path) -> AsyncIterator[Bench]:
    made = Bench(folder)
    await made.worker.start()
    await made.route.start()
    await until(made.route.available)
    try:
        yield made
    finally:
        await made.route.close()
        await made.worker.close()


async def until(check: object) -> None:
    async with asyncio.timeout(20):
        while not check():  # type: ignore[operator]
            await asyncio.sleep(0.005)


def step(script: str, request: str = "r1", epoch: int = 7) -> Step:
    generate = api.Generate(request=request, epoch=epoch, tenant="t", session="s", input=api.TextInput(text=script))
    return Step(kind="completions", request=generate, body={}, stream=True)


async def answer(route: LocalRoute, script: str, request: str = "r1", attempt: int = 0) -> list[api.AnswerEvent]:
    async with aclosing(route.answer(step(script, request), attempt)) as events:
        return [event async for event in events]


def text(events: list[api.AnswerEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, api.Delta))


def words(count: int) -> str:
    return "".join(f"w{n} " for n in range(count))


async def test_an_answer_arrives_whole_and_fenced(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        assert b.route.name == "local"
        assert b.route.card == CARD
        events = await answer(b.route, "3", attempt=2)
        assert [type(e).__name__ for e in events] == ["Started", "Delta", "Delta", "Delta", "Finished", "Completed"]
        assert text(events) == words(3)
        assert {event.epoch for event in events} == {7002}
        assert b.worker.generated[0].epoch == 7002


@pytest.mark.thorough
async def test_many_answers_share_the_connection(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        counts = [(n * 7) % 90 for n in range(60)]
        answers = await asyncio.gather(*(answer(b.route, str(c), f"r{n}") for n, c in enumerate(counts)))
        assert [text(events) for events in answers] == [words(count) for count in counts]
        assert b.worker.connections == 1


async def test_frames_of_another_epoch_are_dropped_and_counted(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        assert text(await answer(b.route, "1 foreign 1")) == "w0 w0 "
        assert b.fenced() == 1


async def test_closing_the_generator_cancels_and_late_frames_are_fenced(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        events = b.route.answer(step("2 pause"), 0)
        await anext(events)
        await events.aclose()
        await until(lambda: b.worker.cancelled == [api.Cancel(request="r1", epoch=7000)])
        events = b.route.answer(step("500", "r2"), 1)
        await anext(events)
        await events.aclose()
        assert text(await answer(b.route, "2", "r2")) == words(2)
        assert b.fenced() > 0


async def test_cancelling_the_reader_cancels_the_request(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        reading = asyncio.create_task(answer(b.route, "2 pause"))
        await until(lambda: b.worker.generated)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: b.worker.cancelled)


@pytest.mark.thorough
async def test_a_lost_worker_fails_every_request_and_is_found_again(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        reading = [asyncio.create_task(answer(b.route, "2 pause", f"r{n}")) for n in range(5)]
        await until(lambda: len(b.worker.generated) == 5)
        await b.worker.close()
        for events in await asyncio.gather(*reading):
            last = events[-1]
            assert isinstance(last, api.Failed)
            assert (last.code, last.retryable) == ("worker_lost", True)
        assert not b.route.available()
        assert b.route.status is None
        assert b.route.card == CARD
        (refused,) = await answer(b.route, "1", "r9")
        assert isinstance(refused, api.Failed)
        assert (refused.code, refused.retryable, refused.request) == ("worker_lost", True, "r9")
        await b.worker.start()
        await until(b.route.available)
        assert text(await answer(b.route, "1")) == "w0 "


async def test_bytes_that_are_no_frame_end_the_connection_only(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        last = (await answer(b.route, "1 garbage pause"))[-1]
        assert isinstance(last, api.Failed)
        await until(b.route.available)
        assert text(await answer(b.route, "1")) == "w0 "
        assert b.worker.connections == 2


async def test_another_protocol_is_refused_with_advice(tmp_path: Path) -> None:
    b = Bench(tmp_path, protocol=9)
    await b.worker.start()
    await b.route.start()
    await until(lambda: "protocol 9" in (b.route.problem or ""))
    assert "same release" in (b.route.problem or "")
    assert not b.route.available()
    await b.route.close()
    await b.worker.close()


async def test_no_worker_at_all(tmp_path: Path) -> None:
    b = Bench(tmp_path)
    await b.route.start()
    await until(lambda: "no worker listens" in (b.route.problem or ""))
    (failed,) = await answer(b.route, "1")
    assert isinstance(failed, api.Failed)
    assert "no worker listens" in failed.message
    assert b.route.pulse().pid is None
    await b.route.close()


@pytest.mark.thorough
async def test_a_slow_client_holds_nobody_up_and_loses_nothing(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        slow = b.route.answer(step("3000", "slow"), 0)
        got = [await anext(slow)]
        assert text(await answer(b.route, "50", "quick")) == words(50)
        await answer(b.route, "3000", "as long")
        got += [event async for event in slow]
        assert text(got) == words(3000)
        assert [i for event in got if isinstance(event, api.Delta) for i in event.ids] == list(range(3000))
        assert len(got) < 200
        assert isinstance(got[-1], api.Completed)


async def test_the_same_id_twice_at_once_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        first = b.route.answer(step("pause"), 0)
        await anext(first)
        (refused,) = await answer(b.route, "1")
        assert isinstance(refused, api.Failed)
        assert "already under way" in refused.message
        await first.aclose()


async def test_what_no_frame_can_say_is_refused_and_the_connection_serves_on(tmp_path: Path) -> None:
    tools = (api.Tool(name="f", description="", parameters={"maximum": 2**64}),)
    given = api.ChatInput(messages=(api.Message(role="user", content="Hi"),), tools=tools)
    request = msgspec.structs.replace(step("1").request, input=given)
    wrong = Step(kind="chat", request=request, body={}, stream=True)
    async with bench(tmp_path) as b:
        async with aclosing(b.route.answer(wrong, 0)) as events:
            told = [event async for event in events]
        told += [
            await b.route.count(given),
            await b.route.register(api.Register(tenant="t", request="r", tools=tools, system="")),
        ]
        for failed in told:
            assert isinstance(failed, api.Failed)
            assert (failed.code, "beyond 64 bits" in failed.message) == ("unsupported_feature", True)
        assert len(told) == 3
        assert text(await answer(b.route, "2")) == words(2)


@pytest.mark.thorough
async def test_a_silent_or_stuck_worker_gets_nothing_new(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await until(lambda: b.route.status)
        b.clock.advance(HANG_S - 0.1)
        assert b.route.available()
        b.clock.advance(0.2)
        assert not b.route.available()
        status = b.route.status
        await until(lambda: b.route.status is not status)
        assert b.route.available()
        stuck = asyncio.create_task(answer(b.route, "stick"))
        for _ in range(3):
            status = b.route.status
            await until(lambda status=status: b.route.status is not status)
            b.clock.advance(HANG_S / 2)
        assert b.route.pulse().stuck_s >= HANG_S
        assert b.route.pulse().hung(HANG_S)
        assert not b.route.available()
        stuck.cancel()


async def test_the_workers_figures_are_metrics(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        await until(lambda: b.route.status)
        shown = b.telemetry.exposition().decode()
        assert "magnitude_worker_up 1.0" in shown
        assert 'magnitude_worker{name="tokens"} 5.0' in shown
        assert 'magnitude_worker{name="pages_on_disk"} 7.0' in shown


async def test_reports_of_the_cache_are_shared_by_those_who_ask_at_once(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        assert await asyncio.gather(*(b.route.inspect() for _ in range(3))) == [REPORT] * 3
        assert b.worker.inspected == 1
        assert await b.route.inspect() == REPORT
        assert b.worker.inspected == 2


async def test_a_worker_that_says_nothing_of_its_cache_is_not_waited_for(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.worker.report = None
        with pytest.raises(WorkerLost, match=r"within 0\.02 s .* between two steps: try again"):
            await b.route.inspect(0.02)
        b.worker.report = REPORT
        assert await b.route.inspect() == REPORT


async def test_a_cancelled_reader_of_the_report_leaves_it_to_the_others(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        b.worker.report = None
        asked = [asyncio.create_task(b.route.inspect()) for _ in range(2)]
        await until(lambda: b.worker.inspected)
        asked[0].cancel()
        await asyncio.wait({asked[0]})
        await b.worker.close()
        with pytest.raises(WorkerLost, match="was lost before it said"):
            await asked[1]
        with pytest.raises(WorkerLost, match="cannot say what its cache holds: "):
            await b.route.inspect()


def test_a_pulse_without_a_worker_is_not_hung() -> None:
    assert not Pulse(None, 100.0, 100.0).hung(1.0)
    assert Pulse(1, 1.0, 0.0).hung(1.0)
    assert Pulse(1, 0.0, 1.0).hung(1.0)
    assert not Pulse(1, 0.9, 0.9).hung(1.0)


def test_merging_keeps_each_choice_in_order() -> None:
    def delta(choice: int, piece: str, **more: object) -> api.Delta:
        return api.Delta(request="r", epoch=1, choice=choice, text=piece, **more)  # type: ignore[arg-type]

    call = api.ToolCallDelta(index=0, arguments="{")
    chosen = api.TokenLogprob(token="b", logprob=-1.0)
    events: list[api.AnswerEvent] = [
        api.Progress(request="r", epoch=1, done=1, total=9),
        api.Progress(request="r", epoch=1, done=9, total=9),
        delta(0, "a"),
        delta(1, "x"),
        delta(0, "b", tool_calls=(call,), logprobs=(chosen,)),
        delta(0, "c", extra={"reasoning_content": "r"}),
        delta(0, "d"),
        delta(1, "y"),
        delta(0, "e", tool_calls=(call,)),
        api.Finished(request="r", epoch=1, choice=0, reason="stop"),
    ]
    assert merge(events) == [
        events[1],
        delta(0, "ab", tool_calls=(call,), logprobs=(chosen,)),
        delta(1, "xy"),
        delta(0, "c", extra={"reasoning_content": "r"}),
        delta(0, "de", tool_calls=(call,)),
        events[9],
    ]


async def test_an_inbox_stays_small_and_gives_what_it_got() -> None:
    inbox = Inbox(limit=10)
    for number in range(5000):
        inbox.put(api.Delta(request="r", epoch=1, choice=number % 3, text=f"{number} ", ids=(number,)))
        assert len(inbox) <= 10
    got = await inbox.take()
    for choice in range(3):
        mine = [event for event in got if isinstance(event, api.Delta) and event.choice == choice]
        assert [i for event in mine for i in event.ids] == list(range(choice, 5000, 3))


@pytest.mark.parametrize("choices", [1, 300])
async def test_an_inbox_grows_with_the_choices_not_with_the_output(choices: int) -> None:
    inbox = Inbox(limit=10)
    for number in range(choices * 20):
        inbox.put(api.Delta(request="r", epoch=1, choice=number % choices, text="x"))
    assert len(inbox) <= max(10, 2 * choices + 2)
