"""The engine on a tiny model: whatever runs beside a request and however its prompt is computed, it gets the same
tokens as alone and cold."""

from __future__ import annotations

import math

import pytest
import torch

from magnitude_engine import api
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel
from testkit.clock import ManualClock
from testkit.engine import Recorder, alone, drain, engine_config, generate, run, spoiled, submit
from testkit.tiny import tiny_model

GREEDY = api.Sampling(temperature=0.0)
SEEDED = api.Sampling(temperature=1.1, top_p=0.95, presence_penalty=0.4, seed=11)
PROMPTS = [f"{'the quick brown fox ' * (i % 4)}prompt number {i}" for i in range(60)]
LONG = "a session's history that fills several pages of the cache, so that chunks and reuse really happen."


def small(model: LoadedModel, pages: int = 64, **settings: object) -> Engine:
    return Engine(model, engine_config(**settings), pages=pages)


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_batched_with_strangers(model: LoadedModel, sampling: api.Sampling, size: int) -> None:
    requests = [generate(p, sampling=sampling, max_tokens=6 + i) for i, p in enumerate(PROMPTS[:size])]
    answers = run(small(model), *requests)
    for request, answer in zip(requests, answers, strict=True):
        expected = alone(model, request)
        assert answer.ids() == expected.ids()
        assert answer.text() == expected.text()
        assert answer.usage.completion_tokens == request.max_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_chunked_prefill(model: LoadedModel, chunk: int) -> None:
    request = generate(LONG, sampling=SEEDED)
    (answer,) = run(small(model, prefill_chunk=chunk), request)
    assert answer.ids() == alone(model, request).ids()
    progress = answer.of(api.Progress)
    assert [p.done for p in progress] == sorted(p.done for p in progress)
    assert progress[-1].done == progress[-1].total == answer.started.prompt_tokens


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_sessions_next_step_computes_only_what_is_new(model: LoadedModel, sampling: api.Sampling) -> None:
    engine = small(model)
    first = generate(LONG, session="s", sampling=sampling)
    (before,) = run(engine, first)
    history = (*model.prompts.encode(first.input), *before.ids())
    second = generate((*history, *model.tokenizer.encode("and then?")), session="s", sampling=sampling, step=1)
    (answer,) = run(engine, second)
    assert answer.started.cached_tokens >= len(history) - 16
    assert answer.usage.cached_tokens == answer.started.cached_tokens
    assert answer.ids() == alone(model, second).ids()


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_resuming_at_every_cut_gives_the_unbroken_answer(
    model: LoadedModel, sampling: api.Sampling, logprobs: int | None
) -> None:
    request = generate("cut me anywhere", sampling=sampling, max_tokens=9, logprobs=logprobs)
    whole = alone(model, request)
    deltas = whole.of(api.Delta)
    resumed: list[api.Generate] = []
    for cut in range(len(deltas) + 1):
        ids = tuple(i for d in deltas[:cut] for i in d.ids)
        known = api.Resume(choice=0, ids=ids, chars=sum(len(d.text) for d in deltas[:cut]))
        fields = {"sampling": sampling, "max_tokens": 9, "logprobs": logprobs, "resume": (known,)}
        resumed.append(generate("cut me anywhere", **fields))
    for cut, answer in enumerate(run(small(model), *resumed)):
        assert "".join(d.text for d in deltas[:cut]) + answer.text() == whole.text()
        assert answer.ids() == whole.ids()[cut:]
        told = [entry for d in [*deltas[:cut], *answer.of(api.Delta)] for entry in d.logprobs]
        assert told == [entry for d in deltas for entry in d.logprobs]
        assert answer.finish().reason == "length"
        assert answer.usage.completion_tokens == 9


@pytest.mark.thorough
def test_resuming_some_of_several_choices(model: LoadedModel) -> None:
    request = generate(LONG, n=3, sampling=SEEDED)
    whole = alone(model, request)
    known = tuple(api.Resume(choice=c, ids=tuple(whole.ids(c)[: c * 6]), chars=0) for c in (1, 2))
    (answer,) = run(small(model), generate(LONG, n=3, sampling=SEEDED, resume=known))
    assert [answer.ids(c) for c in range(3)] == [whole.ids(c)[c * 6 :] for c in range(3)]
    assert [answer.text(c) for c in range(3)] == [whole.text(c) for c in range(3)]
    assert len(answer.of(api.Finished)) == 3


def test_an_output_of_no_tokens(model: LoadedModel) -> None:
    (answer,) = run(small(model), generate("echo this", echo=True, max_tokens=0, n=2))
    assert [answer.text(c) for c in range(2)] == ["echo this"] * 2
    assert answer.finish(1).reason == "length"
    assert answer.usage.completion_tokens == 0


@pytest.mark.thorough
def test_reuse_ends_at_the_first_different_token(model: LoadedModel) -> None:
    engine = small(model)
    run(engine, generate(LONG, session="s"))
    changed = generate(LONG[:100] + "#" + LONG[101:], session="s")
    (answer,) = run(engine, changed)
    assert 0 < answer.started.cached_tokens <= 100
    assert answer.ids() == alone(model, changed).ids()


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_another_session_of_the_tenant_shares_the_prefix_and_another_tenant_nothing(
    model: LoadedModel, sampling: api.Sampling
) -> None:
    engine = small(model)
    run(engine, generate(LONG + " first", session="a", tenant="t", sampling=sampling))
    common = len(model.tokenizer.encode(LONG))
    requests = [generate(LONG + " second", session="b", tenant=t, sampling=sampling) for t in ("t", "u")]
    answers = run(engine, *requests)
    assert common - 1 <= answers[0].started.cached_tokens < answers[0].started.prompt_tokens
    assert answers[0].usage.cached_tokens == answers[0].started.cached_tokens
    assert answers[1].started.cached_tokens == 0
    for request, answer in zip(requests, answers, strict=True):
        assert answer.ids() == alone(model, request).ids()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_eight_sessions_with_one_system_prompt_at_once(model: LoadedModel, sampling: api.Sampling) -> None:
    engine = small(model)
    run(engine, generate(LONG, sampling=sampling))
    requests = [generate(LONG + p, sampling=sampling, max_tokens=5 + i) for i, p in enumerate(PROMPTS[:8])]
    answers = run(engine, *requests)
    common = len(model.tokenizer.encode(LONG))
    for request, answer in zip(requests, answers, strict=True):
        assert answer.started.cached_tokens >= common - 1
        assert answer.ids() == alone(model, request).ids()


@pytest.mark.thorough
def test_sessions_that_start_together_keep_their_common_prompt_once(model: LoadedModel) -> None:
    engine = small(model)
    requests = [generate(LONG, sampling=SEEDED, max_tokens=4) for _ in range(4)]
    seen: list[int] = []
    answers = run(engine, *requests, between=lambda: seen.append(engine.status().pages_free))
    pages = answers[0].started.prompt_tokens // 16
    assert 64 - seen[1] <= pages + 4 * 2
    for request, answer in zip(requests, answers, strict=True):
        assert answer.ids() == alone(model, request).ids()


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_sessions_that_share_a_prefix_are_preempted_and_still_equal(model: LoadedModel, sampling: api.Sampling) -> None:
    engine = small(model, pages=8)
    requests = [generate(LONG[:30] + p[-14:], sampling=sampling, max_tokens=40) for p in PROMPTS[:4]]
    answers = run(engine, *requests)
    assert engine.status().counters["preemptions"] > 0
    assert engine.status().counters["cached_tokens"] > 0
    for request, answer in zip(requests, answers, strict=True):
        assert answer.ids() == alone(model, request).ids()


@pytest.mark.thorough
def test_choices_of_another_session_start_from_the_shared_prefix(model: LoadedModel) -> None:
    engine = small(model)
    run(engine, generate(LONG, sampling=SEEDED))
    request = generate(LONG + " again", n=4, sampling=SEEDED)
    (answer,) = run(engine, request)
    expected = alone(model, request)
    assert answer.started.cached_tokens >= len(model.tokenizer.encode(LONG)) - 1
    assert [answer.ids(c) for c in range(4)] == [expected.ids(c) for c in range(4)]


@pytest.mark.thorough
def test_level_off_computes_every_prompt_anew(model: LoadedModel) -> None:
    engine = small(model, optimization_level="off")
    answers = [run(engine, generate(LONG, session="s"))[0] for _ in range(2)]
    assert answers[1].started.cached_tokens == 0
    assert answers[0].ids() == answers[1].ids()


@pytest.mark.thorough
def test_two_steps_of_one_session_at_once(model: LoadedModel) -> None:
    engine = small(model, prefill_chunk=16)
    requests = [generate(LONG + end, session="s", sampling=SEEDED) for end in ("one", "two", "three")]
    recorders = submit(engine, requests[0])
    for _ in range(12):
        engine.step()
    recorders += submit(engine, *requests[1:])
    drain(engine)
    for request, answer in zip(requests, recorders, strict=True):
        assert answer.ids() == alone(model, request).ids()
    assert recorders[1].started.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("prompt", [LONG, LONG[:32], "x"])
def test_choices_share_one_prefill(model: LoadedModel, prompt: str) -> None:
    engine = small(model)
    (answer,) = run(engine, generate(prompt, n=4, sampling=SEEDED, request="same"))
    prompt_tokens = answer.started.prompt_tokens
    assert engine.status().counters["prefill_rows"] in (prompt_tokens, 0)
    texts = {answer.text(choice) for choice in range(4)}
    assert len(texts) > 1
    assert answer.usage.completion_tokens == 48
    for choice in range(4):
        single = generate(prompt, n=choice + 1, sampling=SEEDED, request="same")
        assert alone(model, single).ids(choice) == answer.ids(choice)


@pytest.mark.thorough
def test_more_choices_than_seats(model: LoadedModel) -> None:
    request = generate(LONG, n=6, sampling=SEEDED)
    (answer,) = run(small(model, max_batch_size=2), request)
    expected = alone(model, request)
    assert [answer.ids(c) for c in range(6)] == [expected.ids(c) for c in range(6)]


def test_choices_that_end_before_they_get_a_seat(model: LoadedModel) -> None:
    engine = small(model, max_batch_size=1)
    request = generate(LONG, n=3, sampling=SEEDED, max_tokens=1)
    (answer,) = run(engine, request)
    assert [answer.ids(c) for c in range(3)] == [alone(model, request).ids(c) for c in range(3)]
    assert (engine.status().running, engine.status().waiting, engine.status().pages_free) == (0, 0, 64)


@pytest.mark.thorough
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preempted_for_lack_of_pages(model: LoadedModel, sampling: api.Sampling) -> None:
    engine = small(model, pages=5)
    requests = [generate(p[:24], sampling=sampling, max_tokens=24) for p in PROMPTS[:3]]
    answers = run(engine, *requests)
    assert engine.status().counters["preemptions"] > 0
    for request, answer in zip(requests, answers, strict=True):
        assert answer.ids() == alone(model, request).ids()


@pytest.mark.slow
def test_choices_are_preempted_alone_and_still_equal(model: LoadedModel) -> None:
    engine = small(model, pages=4)
    request = generate(PROMPTS[1][:20], n=3, sampling=SEEDED, max_tokens=30)
    (answer,) = run(engine, request)
    expected = alone(model, request)
    assert [answer.ids(c) for c in range(3)] == [expected.ids(c) for c in range(3)]
    assert engine.status().counters["preemptions"] > 0


@pytest.mark.slow
def test_sixty_requests_on_a_small_pool(model: LoadedModel) -> None:
    engine = small(model, pages=64, max_batch_size=16)
    requests = [generate(p, sampling=SEEDED, session=f"s{i % 20}", max_tokens=8) for i, p in enumerate(PROMPTS)]
    answers = run(engine, *requests)
    ample = run(small(model, pages=512, optimization_level="off"), *requests)
    assert [a.ids() for a in answers] == [a.ids() for a in ample]
    assert engine.status().pages_free == 64
    assert (engine.status().running, engine.status().waiting) == (0, 0)


@pytest.mark.slow
def test_cancelled_neighbours_leave_no_trace(model: LoadedModel) -> None:
    engine = small(model, prefill_chunk=32)
    requests = [generate(PROMPTS[i] + LONG, sampling=SEEDED, max_tokens=16) for i in range(4)]
    recorders = submit(engine, *requests)
    steps = iter(range(1000))

    def cancel() -> None:
        doomed = {3: 1, 14: 3}.get(next(steps))
        if doomed is not None:
            engine.cancel(requests[doomed].request, requests[doomed].epoch)
            counts.append((doomed, len(recorders[doomed].events)))

    counts: list[tuple[int, int]] = []
    drain(engine, between=cancel)
    assert [len(recorders[i].events) for i, _ in counts] == [n for _, n in counts]
    assert not recorders[1].done
    for i in (0, 2):
        assert recorders[i].ids() == alone(model, requests[i]).ids()
    assert engine.status().pages_free == 64
    assert engine.status().counters["requests_cancelled"] == 2


def test_cancelling_before_the_first_step_and_unknown_requests(model: LoadedModel) -> None:
    engine = small(model)
    request = generate("x")
    (recorder,) = submit(engine, request)
    engine.cancel(request.request, 99)
    engine.cancel(request.request, request.epoch)
    drain(engine)
    assert recorder.events == []


def test_the_same_request_cannot_run_twice_at_once(model: LoadedModel) -> None:
    engine = small(model)
    request = generate("x")
    first, second = submit(engine, request, request)
    assert second.failed is not None
    assert "running already" in second.failed.message
    drain(engine)
    assert first.usage.completion_tokens == 12
    (again,) = run(engine, request)
    assert again.ids() == first.ids()


def test_a_full_queue_is_refused_with_an_estimate(model: LoadedModel) -> None:
    engine = small(model, max_waiting=2)
    recorders = submit(engine, *(generate("x") for _ in range(4)))
    refused = [r.failed for r in recorders if r.failed]
    assert [(f.code, f.retryable) for f in refused] == [("overloaded", True)] * 2
    assert all(f.retry_after_s is not None and f.retry_after_s >= 1 for f in refused)
    drain(engine)
    assert all(r.usage for r in recorders if not r.failed)


def test_a_queue_of_none_still_uses_free_seats(model: LoadedModel) -> None:
    engine = small(model, max_waiting=0)
    (recorder,) = run(engine, generate("x"))
    assert recorder.usage.completion_tokens == 12


@pytest.mark.thorough
def test_a_smaller_batch_wanted_by_the_client(model: LoadedModel) -> None:
    engine = small(model, speculation=False)
    shy = generate("x", preferences=api.Preferences(max_batch_size=1))
    seen: list[int] = []
    answers = run(
        engine, shy, *(generate(p) for p in PROMPTS[:3]), between=lambda: seen.append(engine.status().running)
    )
    assert set(seen[:11]) == {1}
    assert all(a.usage for a in answers)


@pytest.mark.thorough
def test_a_row_that_is_not_finite_fails_its_own_request_only(model: LoadedModel) -> None:
    def spoil(logits: torch.Tensor, call: int) -> torch.Tensor:
        logits = logits.clone()
        if call == 4:
            logits[1, 5] = math.nan
        return logits

    engine = small(spoiled(model, spoil))
    requests = [generate(p, sampling=SEEDED, session=f"s{i}") for i, p in enumerate(PROMPTS[:3])]
    answers = run(engine, *requests)
    failed = answers[1].failed
    assert failed is not None
    assert (failed.code, failed.retryable) == ("numeric_failure", True)
    for i in (0, 2):
        assert answers[i].ids() == alone(model, requests[i]).ids()
    (again,) = run(engine, generate(PROMPTS[1], session="s1"))
    assert again.started.cached_tokens == 0
    assert engine.status().pages_free == 64


@pytest.mark.thorough
def test_what_a_broken_request_started_from_is_computed_anew_for_every_session(model: LoadedModel) -> None:
    broken = generate(LONG + " broken", session="b")

    def spoil(logits: torch.Tensor, call: int) -> torch.Tensor:
        return logits * math.nan if call == 14 else logits

    engine = small(spoiled(model, spoil), speculation=False)
    run(engine, generate(LONG, session="a"))
    (failed,) = run(engine, broken)
    assert failed.started.cached_tokens > 0
    assert failed.failed is not None
    (again,) = run(engine, generate(LONG, session="c"))
    assert again.started.cached_tokens == 0
    assert again.ids() == alone(model, generate(LONG)).ids()
    assert engine.status().pages_free == 64


@pytest.mark.thorough
def test_a_step_that_raises_fails_its_requests_and_the_engine_goes_on(model: LoadedModel) -> None:
    def spoil(logits: torch.Tensor, call: int) -> torch.Tensor:
        if call == 3:
            raise RuntimeError("planted")
        return logits

    engine = small(spoiled(model, spoil), max_batch_size=2)
    engine.start()
    requests = [generate(p) for p in PROMPTS[:3]]
    answers = submit(engine, *requests)
    engine.close(grace_s=30)
    codes = [a.failed.code if a.failed else None for a in answers]
    assert "engine_error" in codes
    ended_well = [i for i, code in enumerate(codes) if code is None]
    assert 2 in ended_well
    for i in ended_well:
        assert answers[i].ids() == alone(model, requests[i]).ids()
    engine.check_integrity()
    assert engine.status().pages_free == 64


@pytest.mark.thorough
def test_steps_that_keep_failing_end_the_engine(model: LoadedModel) -> None:
    def spoil(logits: torch.Tensor, call: int) -> torch.Tensor:
        raise RuntimeError("planted")

    engine = small(spoiled(model, spoil), max_batch_size=1)
    fatal: list[bool] = []
    answers = submit(engine, *(generate(p) for p in PROMPTS[:5]))
    engine.start(on_fatal=lambda: fatal.append(True))
    engine.close(grace_s=30)
    assert fatal == [True]
    assert [a.failed.code if a.failed else None for a in answers] == ["engine_error"] * 3 + ["worker_lost"] * 2
    (late,) = submit(engine, generate("x"))
    assert late.failed is not None
    assert (late.failed.code, late.failed.retryable) == ("worker_lost", True)


@pytest.mark.thorough
def test_a_sink_that_raises_ends_its_request_only(model: LoadedModel) -> None:
    engine = small(model)

    def sink(event: api.AnswerEvent) -> None:
        raise OSError("gone")

    engine.submit(generate("x"), sink)
    (other,) = run(engine, generate("y"))
    assert other.usage.completion_tokens == 12
    assert (engine.status().running, engine.status().pages_free) == (0, 64)


def test_closing_fails_what_is_left(model: LoadedModel) -> None:
    engine = small(model)
    recorders = submit(engine, generate("x"), generate("y"))
    engine.step()
    recorders += submit(engine, generate("z"))
    engine.close()
    assert [r.failed.code if r.failed else None for r in recorders] == ["worker_lost"] * 3


def test_steps_count_up_while_there_is_work(model: LoadedModel) -> None:
    engine = small(model)
    counted: list[int] = []
    run(engine, generate(LONG), between=lambda: counted.append(engine.status().steps))
    assert counted == list(range(1, len(counted) + 1))
    assert engine.status().steps == counted[-1]


@pytest.mark.thorough
@pytest.mark.parametrize(("seconds_per_step", "rows"), [(0.0001, 64), (9.0, 16)])
def test_chunks_shrink_where_steps_are_slow(seconds_per_step: float, rows: int) -> None:
    clock = ManualClock()

    def slow(logits: torch.Tensor, number: int) -> torch.Tensor:
        clock.advance(seconds_per_step)
        return logits

    engine = Engine(spoiled(tiny_model(profile="native"), slow), engine_config(), clock=clock, pages=64)
    (first,) = run(engine, generate(LONG))
    (second,) = run(engine, generate(LONG + LONG, tenant="another"))
    done = [p.done for p in second.of(api.Progress)]
    assert first.of(api.Progress)[0].done == 64
    assert done[0] == rows
    assert second.usage.completion_tokens == 12


@pytest.mark.thorough
def test_events_come_in_order(model: LoadedModel) -> None:
    (answer,) = run(small(model), generate(LONG))
    kinds = [type(e).__name__ for e in answer.events]
    assert kinds[0] == "Started"
    assert kinds[-2:] == ["Finished", "Completed"]
    last_progress = max(i for i, kind in enumerate(kinds) if kind == "Progress")
    assert set(kinds[last_progress + 1 : -2]) == {"Delta"}


def test_recorder_refuses_events_after_the_end() -> None:
    recorder = Recorder()
    recorder(api.Completed(request="r", epoch=1))
    with pytest.raises(AssertionError):
        recorder(api.Completed(request="r", epoch=1))
