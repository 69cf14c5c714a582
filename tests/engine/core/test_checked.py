"""What is held back until it is checked, and what is written a second time: events by hand, checks by a word."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_engine.checked import RETRY_TEMPERATURE, Aside, CheckedSink, second_try
from magnitude_engine.decode.grammar.validate import PostCheck, Rule
from magnitude_engine.errors import AnswerInvalid, Overloaded
from testkit.engine import Recorder, generate

PICK = PostCheck(rules=(Rule(tool="pick", schema="{}", keywords=("not at #",)),))
WHOLE = PostCheck(rules=(Rule(tool=None, schema="{}", keywords=("not at #",)),))


class AtOnce(Executor):
    """Runs what is submitted on the spot."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


class Bench:
    """A checked answer whose texts are right unless they hold "bad", and what it asks of its engine."""

    def __init__(self, check: PostCheck, **fields: Any) -> None:
        self.request = generate("go", **fields)
        self.told = Recorder()
        self.second: list[api.Generate] = []
        self.cancelled: list[str] = []
        self._sinks: list[Callable[[api.AnswerEvent], None]] = []
        aside = Aside(self._judge, AtOnce(), self._submit, self.cancelled.append)
        self.sink = CheckedSink(self.request, check, aside, self.told)

    def say(self, *events: api.AnswerEvent) -> None:
        """The first request answers."""
        for event in events:
            self.sink(event)

    def say_again(self, *events: api.AnswerEvent, number: int = 0) -> None:
        """A second one answers."""
        for event in events:
            self._sinks[number](event)

    def _judge(self, rule: Rule, text: str) -> None:
        if "bad" in text:
            raise AnswerInvalid("it is bad")
        if "busy" in text:
            raise Overloaded("later")

    def _submit(self, request: api.Generate, sink: Callable[[api.AnswerEvent], None]) -> None:
        self.second.append(request)
        self._sinks.append(sink)

    def delta(self, *ids: int, text: str = "", choice: int = 0, **fields: Any) -> api.Delta:
        return api.Delta(request="any", epoch=1, choice=choice, ids=ids, text=text, **fields)

    def call(self, *ids: int, arguments: str, name: str = "pick", index: int = 0, choice: int = 0) -> api.Delta:
        piece = api.ToolCallDelta(index=index, id=f"c{index}", name=name, arguments=arguments)
        return self.delta(*ids, choice=choice, tool_calls=(piece,))

    def finished(self, choice: int = 0, reason: api.FinishReason = "stop") -> api.Finished:
        return api.Finished(request="any", epoch=1, choice=choice, reason=reason)

    def completed(self, **counts: int) -> api.Completed:
        return api.Completed(request="any", epoch=1, usage=api.Usage(prompt_tokens=9, **counts))


def shown(told: Recorder, choice: int = 0) -> list[str]:
    """What a client sees of a choice: texts, arguments, and how it ended."""
    seen = [
        part
        for event in told.events
        if isinstance(event, api.Delta) and event.choice == choice
        for part in (event.text, *(piece.arguments for piece in event.tool_calls))
        if part
    ]
    return seen + [event.reason for event in told.of(api.Finished) if event.choice == choice]


def test_a_call_that_fails_is_written_again_behind_what_was_shown() -> None:
    bench = Bench(PICK, sampling=api.Sampling(temperature=0.0, seed=5))
    bench.say(api.Started(request="any", epoch=1, prompt_tokens=9, cached_tokens=8))
    bench.say(bench.delta(1, text="Well "), bench.delta(2), bench.call(3, arguments="good"))
    bench.say(bench.delta(4), bench.call(5, arguments="bad", index=1), bench.delta(6, text=" and so on"))
    (again,) = bench.second
    assert again.resume == (api.Resume(choice=0, ids=(1, 2, 3), chars=5),)
    assert bench.cancelled == [bench.request.request]
    assert (again.sampling.temperature, again.n) == (RETRY_TEMPERATURE, 1)
    assert again.sampling.seed != 5
    bench.say(bench.finished(), bench.completed(completion_tokens=6))
    assert not bench.told.done
    bench.say_again(api.Started(request="x", epoch=1), bench.delta(7), bench.call(8, arguments="fine", index=1))
    bench.say_again(bench.delta(9, text="!"), bench.finished(), bench.completed(completion_tokens=6, forced_tokens=2))
    assert shown(bench.told) == ["Well ", "good", "fine", "!", "stop"]
    assert bench.told.ids() == [1, 2, 3, 7, 8, 9]
    assert len(bench.told.of(api.Started)) == 1
    usage = bench.told.usage
    assert (usage.completion_tokens, usage.cached_tokens, usage.forced_tokens) == (6, 8, 2)


def test_what_fails_twice_is_one_error_and_nothing_of_it_is_shown() -> None:
    bench = Bench(PICK)
    bench.say(bench.delta(1), bench.call(2, arguments="bad"))
    bench.say_again(bench.delta(3), bench.call(4, arguments="bad too"), bench.finished(), bench.completed())
    assert shown(bench.told) == []
    assert bench.told.failed is not None
    assert (bench.told.failed.code, bench.told.failed.request) == ("answer_invalid", bench.request.request)
    assert len(bench.second) == 1
    assert bench.told.ids() == []


def test_a_formatted_answer_is_written_again_as_a_whole() -> None:
    bench = Bench(WHOLE)
    logprob = api.TokenLogprob(token="b", logprob=-1.0)
    bench.say(bench.delta(1, text="b", logprobs=(logprob,)), bench.delta(2, text="ad"), bench.finished())
    assert bench.second[0].resume == ()
    bench.say_again(bench.delta(3, text="fi"), bench.delta(4, text="ne", logprobs=(logprob,)), bench.finished())
    bench.say_again(bench.completed())
    assert shown(bench.told) == ["fine", "stop"]
    assert sum(len(delta.logprobs) for delta in bench.told.of(api.Delta)) == 1
    assert bench.told.ids() == [3, 4]


def test_of_several_choices_only_the_one_that_fails_is_written_again() -> None:
    bench = Bench(PICK, n=2)
    bench.say(bench.call(1, arguments="bad", choice=1), bench.call(2, arguments="good"), bench.delta(3, choice=1))
    bench.say_again(bench.call(4, 5, arguments="fine"), bench.finished(), bench.completed(forced_tokens=1))
    bench.say(bench.finished(choice=1), bench.finished())
    assert not bench.told.done
    bench.say(bench.completed(completion_tokens=3, forced_tokens=2, cached_tokens=7))
    assert (shown(bench.told, 0), shown(bench.told, 1)) == (["good", "stop"], ["fine", "stop"])
    assert bench.cancelled == []
    assert (bench.told.usage.completion_tokens, bench.told.usage.forced_tokens) == (3, 3)
    assert not bench.second[0].preferences.predictive_caching


def test_log_probabilities_show_nothing_of_a_call_before_it_is_checked() -> None:
    bench = Bench(PICK, logprobs=0)
    logprob = api.TokenLogprob(token="x", logprob=-1.0)
    bench.say(bench.delta(1, logprobs=(logprob,)), bench.delta(2, logprobs=(logprob,)))
    assert not any(delta.logprobs or delta.ids for delta in bench.told.of(api.Delta))
    bench.say(bench.call(3, arguments="good"), bench.finished(), bench.completed())
    assert sum(len(delta.logprobs) for delta in bench.told.of(api.Delta)) == 2


@pytest.mark.parametrize(("check", "reason"), [(WHOLE, "length"), (PICK, "stop")])
def test_what_needs_no_check_passes(check: PostCheck, reason: api.FinishReason) -> None:
    bench = Bench(check)
    bench.say(
        bench.delta(1, text="bad"), bench.delta(2), bench.finished(reason=reason), bench.completed(cached_tokens=3)
    )
    assert shown(bench.told) == ["bad", reason]
    assert (bench.told.ids(), bench.second, bench.told.usage.cached_tokens) == ([1, 2], [], 3)


def test_a_check_that_cannot_be_made_is_no_reason_to_write_again() -> None:
    bench = Bench(PICK)
    bench.say(bench.call(1, arguments="busy"))
    assert bench.told.failed is not None
    assert (bench.told.failed.code, bench.second) == ("overloaded", [])


def test_a_stop_ends_both_requests() -> None:
    bench = Bench(PICK)
    bench.say(bench.call(1, arguments="bad"))
    bench.sink.stop()
    assert bench.cancelled.count(bench.second[0].request) == 1
    bench.say_again(bench.call(2, arguments="fine"), bench.finished(), bench.completed())
    assert bench.told.events == []


def test_a_second_try_is_drawn_otherwise_each_time_the_same() -> None:
    request = generate("go", sampling=api.Sampling(temperature=1.3, top_p=0.1, top_k=1, seed=3))
    known = api.Resume(choice=0, ids=(1,), chars=1)
    again = second_try(request, known)
    assert again == second_try(request, known)
    assert (again.sampling.temperature, again.sampling.top_p, again.sampling.top_k) == (1.3, 0.9, 0)
    assert again.sampling.seed != second_try(request, api.Resume(choice=1)).sampling.seed
