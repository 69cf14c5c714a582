"""The dispatcher over scripted routes, in virtual time. Every outcome obeys the terminal law (see `run`)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_proxy.config import DeadlineConfig, RetryConfig, TelemetryConfig
from magnitude_proxy.routing.fallback import Dispatcher
from magnitude_proxy.routing.route import Step, Taken
from magnitude_proxy.telemetry import Telemetry
from testkit.clock import virtual
from testkit.routes import (
    FOREVER,
    Action,
    Down,
    Pause,
    ScriptedRoute,
    answer,
    completed,
    delta,
    failed,
    finished,
    make_step,
    progress,
    started,
)

DEADLINES = DeadlineConfig(progress_s=1.0, first_token_s=30.0, idle_s=10.0)
RETRY = RetryConfig()


@dataclass
class Outcome:
    """What a client got: everything in order, and the seconds it took."""

    events: list[Taken | api.AnswerEvent]
    seconds: float

    @property
    def text(self) -> str:
        return "".join(e.text for e in self.events if isinstance(e, api.Delta))

    @property
    def labels(self) -> list[tuple[str, str | None]]:
        return [(e.label, e.reason) for e in self.events if isinstance(e, Taken)]

    @property
    def end(self) -> api.AnswerEvent | Taken:
        return self.events[-1]

    @property
    def failure(self) -> api.Failed:
        assert isinstance(self.end, api.Failed)
        return self.end


class Bench:
    """A dispatcher over scripted routes that share one log."""

    def __init__(self, routes: Sequence[ScriptedRoute], retry: RetryConfig, deadlines: DeadlineConfig) -> None:
        self.log: list[str] = []
        for route in routes:
            route.log = self.log
        self.telemetry = Telemetry(TelemetryConfig())
        self.clock = asyncio.get_running_loop().time
        self.dispatcher = Dispatcher(routes, deadlines, retry, self.telemetry, self.clock)

    async def run(self, step: Step | None = None) -> Outcome:
        """Runs one step; checks that it ends with exactly one Completed or Failed and that nothing is left open."""
        began = self.clock()
        events = [event async for event in self.dispatcher.run(step or make_step())]
        ends = [e for e in events if isinstance(e, api.Completed | api.Failed)]
        assert ends == events[-1:]
        opened = [line for line in self.log if line.startswith("open")]
        assert [line.replace("close", "open") for line in self.log[1::2]] == opened
        return Outcome(events, self.clock() - began)

    def metric(self, name: str) -> float:
        lines = self.telemetry.exposition().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"magnitude_{name}_total"))


@asynccontextmanager
async def bench(
    *routes: ScriptedRoute, retry: RetryConfig = RETRY, deadlines: DeadlineConfig = DEADLINES
) -> AsyncIterator[Bench]:
    made = Bench(routes, retry, deadlines)
    yield made
    made.telemetry.close()


def local(*scripts: Sequence[Action], **fields: Any) -> ScriptedRoute:
    return ScriptedRoute("local", scripts, **fields)


def upstream(*scripts: Sequence[Action], name: str = "a", **fields: Any) -> ScriptedRoute:
    return ScriptedRoute(name, scripts, **fields)


def outcome(*routes: ScriptedRoute, step: Step | None = None, **fields: Any) -> Outcome:
    """Runs one step over `routes` in virtual time."""

    async def main() -> Outcome:
        async with bench(*routes, **fields) as made:
            return await made.run(step)

    return virtual(main())


def test_the_worker_answers() -> None:
    got = outcome(local([started(), progress(5), delta("a", 1), delta("b", 2), finished(), completed()]), upstream([]))
    assert got.labels == [("local", None)]
    assert got.text == "ab"
    assert got.end == completed()


def test_without_a_worker_the_first_upstream_answers() -> None:
    got = outcome(upstream(answer("x")), upstream(answer("y"), name="b"))
    assert got.labels == [("upstream:a", None)]
    assert got.text == "x"


def test_nothing_configured() -> None:
    assert outcome().failure.code == "unavailable"


def test_an_absent_worker_is_passed_over() -> None:
    got = outcome(local([], ready=False), upstream(answer("x")))
    assert got.labels == [("fallback:a", "unavailable")]


@pytest.mark.parametrize("code", ["worker_lost", "overloaded", "numeric_failure", "engine_error"])
def test_a_failure_before_content_moves_on(code: str) -> None:
    worker = local([started(), progress(1), delta("", 5), failed(code)])
    got = outcome(worker, upstream(answer("x")))
    assert got.labels == [("local", None), ("fallback:a", code)]
    assert [e for e in got.events if isinstance(e, api.Delta)] == [delta("x", 1)]


def test_the_lost_attempt_is_closed_before_the_next_opens() -> None:
    async def main() -> list[str]:
        async with bench(
            local([FOREVER]), upstream([failed("upstream_timeout")]), upstream(answer(), name="b")
        ) as made:
            await made.run()
            return made.log

    assert virtual(main()) == ["open local", "close local", "open a", "close a", "open b", "close b"]


def test_attempts_are_numbered() -> None:
    a, b = upstream([failed("upstream_timeout")]), upstream(answer(), name="b")
    outcome(a, b)
    assert (a.attempts, b.attempts) == ([1], [2])


def test_silence_of_the_worker_moves_on_after_progress_s() -> None:
    got = outcome(local([FOREVER]), upstream(answer("x")))
    assert got.labels == [("local", None), ("fallback:a", "deadline_exceeded")]
    assert got.seconds == pytest.approx(1.0)


def test_prefill_progress_counts() -> None:
    slow = [item for i in range(20) for item in (Pause(0.9), progress(i))]
    got = outcome(local([*slow, *answer("slow")]), upstream(answer("x")))
    assert got.labels == [("local", None)]
    assert got.text == "slow"


def test_progress_without_end_meets_the_absolute_limit() -> None:
    endless = [item for i in range(100) for item in (Pause(0.9), progress(i))]
    got = outcome(local(endless), upstream(answer("x")))
    assert got.labels[-1] == ("fallback:a", "deadline_exceeded")
    assert got.seconds == pytest.approx(30.0)


@pytest.mark.parametrize("others", [[], [upstream([], ready=False)]])
def test_a_slow_worker_goes_on_when_nothing_else_could_answer(others: list[ScriptedRoute]) -> None:
    worker = local([Pause(100), *answer("late")])
    got = outcome(worker, *others)
    assert got.text == "late"
    assert got.labels == [("local", None)]
    assert len(worker.seen) == 1


def test_a_slow_worker_gets_the_request_back_when_nothing_else_answered() -> None:
    worker = local([FOREVER], [Pause(100), *answer("late")])
    got = outcome(worker, upstream([failed("upstream_http_503")]))
    assert got.text == "late"
    assert got.labels == [
        ("local", None),
        ("fallback:a", "deadline_exceeded"),
        ("local", "upstream_http_503"),
    ]


def test_a_route_that_returns_during_the_wait_takes_over() -> None:
    other = upstream(answer("x"), ready=False)

    async def main() -> Outcome:
        async with bench(local([FOREVER]), other) as made:
            asyncio.get_running_loop().call_later(4.5, setattr, other, "ready", True)
            return await made.run()

    got = virtual(main())
    assert got.text == "x"
    assert got.seconds == pytest.approx(5.0)


@pytest.mark.thorough
def test_a_request_that_comes_while_the_worker_starts_waits_for_it() -> None:
    worker = local(answer("x"), ready=False)

    async def main(ready_after_s: float) -> Outcome:
        async with bench(worker) as made:
            asyncio.get_running_loop().call_later(ready_after_s, setattr, worker, "ready", True)
            return await made.run()

    got = virtual(main(4.5))
    assert (got.text, got.labels) == ("x", [("local", None)])
    assert got.seconds == pytest.approx(4.5, abs=0.1)
    worker.ready = False
    late = virtual(main(120)).failure
    assert (late.code, late.retry_after_s) == ("unavailable", 5)
    assert "the model is being loaded" in late.message


def test_what_upstreams_have_no_words_for_waits_for_the_worker() -> None:
    worker, other = local(answer("x"), ready=False), upstream([failed("unsupported_feature", retryable=False)])

    async def main() -> Outcome:
        async with bench(worker, other) as made:
            asyncio.get_running_loop().call_later(3, setattr, worker, "ready", True)
            return await made.run()

    got = virtual(main())
    assert got.text == "x"
    assert got.labels[-1] == ("local", "unsupported_feature")
    assert outcome(other).failure.code == "unsupported_feature"


def test_a_request_that_was_not_sent_tells_a_breaker_nothing() -> None:
    other = upstream([failed("upstream_unreachable")], [failed("unsupported_feature", retryable=False)])

    async def main() -> bool:
        async with bench(other, retry=RetryConfig(breaker_failures=1, breaker_open_s=30)) as made:
            await made.run()
            await asyncio.sleep(31)
            assert (await made.run()).failure.code == "unsupported_feature"
            return made.dispatcher.snapshot()[0].failing

    assert virtual(main())


def test_nobody_waits_for_a_worker_that_refuses_its_model() -> None:
    got = outcome(local(answer("x"), ready=False, expected=False))
    assert got.failure.code == "unavailable"
    assert got.seconds == 0


def test_only_upstreams_that_take_the_model_are_asked() -> None:
    step = dataclasses.replace(make_step(), upstreams=frozenset({"b"}))
    other, taker = upstream(answer("no")), upstream(answer("yes"), name="b")
    got = outcome(local([failed("worker_lost")]), other, taker, step=step)
    assert got.text == "yes"
    assert other.seen == []


def test_silence_after_content_is_one_failure() -> None:
    got = outcome(local([started(), delta("a", 1), FOREVER]), upstream(answer("x")))
    assert got.failure.code == "deadline_exceeded"
    assert got.text == "a"
    assert got.seconds == pytest.approx(10.0)


def test_a_slow_client_is_no_idle_worker() -> None:
    async def main() -> list[Taken | api.AnswerEvent]:
        async with bench(local(answer("ok"))) as made:
            events = []
            async for event in made.dispatcher.run(make_step()):
                events.append(event)
                await asyncio.sleep(60)
            return events

    assert virtual(main())[-1] == completed()


def test_no_other_route_after_content() -> None:
    got = outcome(upstream([delta("a"), failed("upstream_stream_broken")]), upstream(answer("x"), name="b"))
    assert got.failure.code == "upstream_stream_broken"
    assert got.text == "a"


@pytest.mark.parametrize(
    "content",
    [
        delta("x"),
        delta(refusal="no"),
        delta(extra={"reasoning_content": "hm"}),
        delta(tool_calls=(api.ToolCallDelta(index=0),)),
        delta(logprobs=(api.TokenLogprob(token="t", logprob=-1.0),)),
        finished(),
    ],
)
def test_what_counts_as_content(content: api.AnswerEvent) -> None:
    made = outcome(upstream([content, failed("upstream_timeout")]), upstream(answer(), name="b"), step=make_step(n=2))
    assert made.failure.code == "upstream_timeout"


def test_held_deltas_arrive_in_order_with_the_first_content() -> None:
    got = outcome(local([started(), delta("", 1), delta("", 2), delta("ab", 3), finished(), completed()]))
    deltas = [e for e in got.events if isinstance(e, api.Delta)]
    assert [d.ids for d in deltas] == [(1,), (2,), (3,)]


def test_an_answer_without_any_text_is_complete() -> None:
    got = outcome(local([started(), delta("", 1), finished(), completed()]))
    assert [type(e) for e in got.events[1:]] == [api.Started, api.Delta, api.Finished, api.Completed]


def test_a_lost_worker_resumes_where_the_client_is() -> None:
    worker = local(
        [started(), delta("", 9), delta("ab", 1, 2), delta("", 3), Down(2.0), failed("worker_lost")],
        [started(), progress(3), delta("cd", 4), finished(), completed()],
    )

    async def main() -> tuple[Outcome, float]:
        async with bench(worker, upstream(answer("x"))) as made:
            return await made.run(), made.metric("resumes")

    got, resumes = virtual(main())
    assert got.text == "abcd"
    assert got.labels == [("local", None)]
    assert worker.seen[1].request.resume == (api.Resume(choice=0, ids=(9, 1, 2, 3), chars=2),)
    assert resumes == 1
    assert got.seconds == pytest.approx(2.0, abs=0.1)


def test_a_twice_lost_worker_resumes_from_all_that_was_sent() -> None:
    worker = local(
        [delta("a", 1), failed("worker_lost")],
        [delta("b", 2), failed("worker_lost")],
        [delta("c", 3), finished(), completed()],
    )
    got = outcome(worker)
    assert got.text == "abc"
    assert worker.seen[2].request.resume == (api.Resume(choice=0, ids=(1, 2), chars=2),)


def test_a_worker_that_is_lost_again_and_again_ends_the_stream() -> None:
    script: list[Action] = [delta("a", 1), failed("worker_lost")]
    worker = local(script)
    got = outcome(worker)
    assert got.failure.code == "worker_lost"
    assert len(worker.seen) == 4


@pytest.mark.thorough
def test_a_worker_that_does_not_return_ends_the_stream() -> None:
    got = outcome(local([delta("a", 1), Down(600), failed("worker_lost")]), upstream(answer("x")))
    assert got.failure.code == "worker_lost"
    assert got.seconds == pytest.approx(60.0, abs=0.1)


@pytest.mark.parametrize(
    ("event", "request_fields"),
    [
        (delta("a", 1, tool_calls=(api.ToolCallDelta(index=0, id="c", name="f"),)), {}),
        (delta("a", 1), {"logprobs": 0}),
        (delta("a", 1), {"echo": True}),
        (delta("a"), {}),
    ],
)
def test_unsafe_streams_are_not_resumed(event: api.Delta, request_fields: dict[str, Any]) -> None:
    worker = local([event, failed("worker_lost")], answer())
    got = outcome(worker, upstream(answer()), step=make_step(**request_fields))
    assert got.failure.code == "worker_lost"
    assert len(worker.seen) == 1


def test_choices_resume_each_for_itself_and_finished_ones_stay_finished() -> None:
    worker = local(
        [delta("a", 1, choice=0), delta("b", 2, choice=1), finished(0), failed("worker_lost")],
        [delta("!", 7, choice=0), finished(0), delta("c", 3, choice=1), finished(1), completed()],
    )
    got = outcome(worker, step=make_step(n=2))
    texts = {c: "".join(e.text for e in got.events if isinstance(e, api.Delta) and e.choice == c) for c in (0, 1)}
    assert texts == {0: "a", 1: "bc"}
    assert [e.choice for e in got.events if isinstance(e, api.Finished)] == [0, 1]
    assert [r.ids for r in worker.seen[1].request.resume] == [(1,), (2,)]


def test_only_the_end_mark_was_lost() -> None:
    worker = local([started(), delta("ab", 1, 2), finished(), failed("worker_lost")])
    got = outcome(worker)
    assert got.end == completed(prompt_tokens=7, cached_tokens=3, completion_tokens=2)
    assert len(worker.seen) == 1


def test_a_worker_lost_before_content_starts_anew_when_alone() -> None:
    worker = local([started(), delta("", 5), Down(3.0), failed("worker_lost")], answer("again"))
    got = outcome(worker)
    assert (got.text, worker.seen[1].request.resume) == ("again", ())
    assert got.labels == [("local", None)]


def test_refused_by_the_worker_answered_by_an_upstream() -> None:
    refusal = failed("context_length_exceeded", retryable=False)
    got = outcome(local([refusal]), upstream(answer("x")))
    assert got.labels == [("local", None), ("fallback:a", "context_length_exceeded")]
    assert outcome(local([refusal])).failure.code == "context_length_exceeded"
    known = replace(make_step(), local_refusal=refusal)
    worker = local(answer())
    assert outcome(worker, upstream(answer("x")), step=known).labels == [("upstream:a", "context_length_exceeded")]
    assert worker.seen == []
    assert outcome(worker, step=known).failure.code == "context_length_exceeded"


def test_client_errors_of_an_upstream_are_passed_on() -> None:
    refusal = failed("upstream_http_400", retryable=False, param="messages", upstream_code="bad")
    other = upstream(answer(), name="b")
    assert outcome(upstream([refusal]), other).failure == refusal
    assert other.seen == []


def test_a_pause_is_respected_by_the_next_requests() -> None:
    busy = upstream([failed("upstream_http_429", retry_after_s=20.0)], answer("back"))

    async def main() -> list[Outcome]:
        async with bench(busy, deadlines=DEADLINES) as made:
            first = await made.run()
            await asyncio.sleep(5)
            second = await made.run()
            await asyncio.sleep(15.1)
            return [first, second, await made.run()]

    first, second, third = virtual(main())
    assert [first.failure.code, second.failure.code] == ["overloaded", "overloaded"]
    assert [first.failure.retry_after_s, second.failure.retry_after_s] == pytest.approx([20.0, 15.0])
    assert third.text == "back"


def test_the_breaker_opens_and_probes() -> None:
    broken = upstream(*[[failed("upstream_unreachable")]] * 6, answer("healed"))

    async def main() -> tuple[list[str], bool, float]:
        async with bench(broken) as made:
            codes = [(await made.run()).failure.code for _ in range(7)]
            ready = made.dispatcher.ready()
            await asyncio.sleep(31)
            codes.append((await made.run()).failure.code)
            await asyncio.sleep(31)
            codes.append((await made.run()).text)
            return codes, ready, made.metric("breaker_opened")

    codes, ready, opened = virtual(main())
    assert codes == ["upstream_unreachable"] * 5 + ["unavailable"] * 2 + ["upstream_unreachable", "healed"]
    assert not ready
    assert opened == 1


def test_the_budget_bounds_second_attempts_upstream() -> None:
    first = upstream([Pause(1), failed("upstream_http_500")])
    second = upstream([Pause(5), *answer("x")], name="b")

    async def main() -> tuple[list[Outcome], float]:
        async with bench(first, second, retry=RetryConfig(breaker_failures=1000)) as made:

            async def one() -> Outcome:
                return Outcome([e async for e in made.dispatcher.run(make_step())], 0)

            results = await asyncio.gather(*(one() for _ in range(40)))
            return list(results), made.metric("retries_denied")

    results, denied = virtual(main())
    assert sum(r.text == "x" for r in results) == len(second.seen)
    assert 3 <= len(second.seen) <= 8
    assert denied == 40 - len(second.seen)
    assert all(isinstance(r.end, api.Completed | api.Failed) for r in results)


def test_a_route_that_raises_or_falls_silent_is_a_failure() -> None:
    got = outcome(local([RuntimeError("bug")]), upstream(answer("x")))
    assert got.labels[-1] == ("fallback:a", "internal_error")
    assert outcome(upstream([started()])).failure.code == "internal_error"
    assert outcome(local([delta("a", 1), RuntimeError("bug")])).failure.code == "internal_error"


@pytest.mark.parametrize("script", [[FOREVER], [started(), FOREVER], [delta("a", 1), FOREVER]])
def test_cancelling_the_reader_closes_the_route(script: list[Action]) -> None:
    async def main() -> list[str]:
        async with bench(local(script), retry=RetryConfig(breaker_failures=1)) as made:

            async def read() -> None:
                async with aclosing(made.dispatcher.run(make_step())) as events:
                    async for _ in events:
                        pass

            reader = asyncio.create_task(read())
            await asyncio.sleep(0.5)
            reader.cancel()
            await asyncio.wait({reader})
            assert made.dispatcher.snapshot()[0].admitted
            return made.log

    assert virtual(main()) == ["open local", "close local"]


def test_closing_between_events_closes_the_route() -> None:
    async def main() -> list[str]:
        async with bench(local(answer())) as made:
            events = made.dispatcher.run(make_step())
            async for event in events:
                if isinstance(event, api.Delta):
                    break
            await events.aclose()
            return made.log

    assert virtual(main()) == ["open local", "close local"]


def test_fallbacks_and_broken_streams_are_counted() -> None:
    async def main() -> tuple[float, float]:
        routes = local([failed("worker_lost")]), upstream([delta("a"), failed("upstream_stream_broken")])
        async with bench(*routes) as made:
            await made.run()
            return made.metric("fallbacks"), made.metric("streams_broken")

    assert virtual(main()) == (1, 1)
