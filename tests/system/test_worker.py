"""A real worker process with SmolLM2, over its socket: exact answers, kills, signals, lost connections."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from magnitude_engine import api
from testkit.engine import Recorder, generate
from testkit.model import smollm2_path
from testkit.worker_client import WorkerClient
from testkit.worker_process import WorkerProcess, config, worker

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOKENS = 200
QUESTIONS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how a bicycle stays upright, for a child of ten. " * 12,
    "List the steps to bake bread, then say which one fails most often, and why. Grüße aus Wien! 你好。" * 4,
)
STRANGERS = tuple(f"Stranger {i}: tell me about the number {i} and its neighbours. " * (1 + i % 3) for i in range(5))


def ask(question: str, **fields: object) -> api.Generate:
    chat = api.ChatInput(messages=(api.Message(role="user", content=question),))
    return generate(chat, **{"max_tokens": TOKENS, **fields})


@pytest.fixture(scope="module")
def model_path() -> Path:
    return smollm2_path()


@pytest.fixture(scope="module")
def whole(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that computes each prompt in one chunk."""
    with worker(tmp_path_factory.mktemp("whole"), config(model_path, prefill_chunk=8192)) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def chunked(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    """A worker that computes prompts in chunks of an awkward size."""
    with worker(tmp_path_factory.mktemp("chunked"), config(model_path, prefill_chunk=37)) as running:
        running.wait_ready()
        yield running


async def answers(running: WorkerProcess, *requests: api.Generate) -> list[Recorder]:
    async with WorkerClient(running.socket) as client:
        return await client.answer(*requests)


@pytest.fixture(scope="module")
def expected(whole: WorkerProcess) -> list[list[int]]:
    """Each question's greedy answer: alone, cold, its prompt in one chunk."""
    return [asyncio.run(answers(whole, ask(q)))[0].ids() for q in QUESTIONS]


async def test_the_reference_answers_are_complete(expected: list[list[int]], whole: WorkerProcess) -> None:
    assert [len(ids) for ids in expected] == [TOKENS] * 3
    (story,) = await answers(whole, ask(QUESTIONS[0]))
    assert "lighthouse" in story.text()
    assert "�" not in story.text()


async def test_batches_of_two_to_eight_are_exact(expected: list[list[int]], chunked: WorkerProcess) -> None:
    """Strangers leave one after the other, so that the questions decode in batches of 8, 7, … 3 rows; then 2."""
    strangers = [
        ask(q, sampling=api.Sampling(temperature=1.0, seed=i), max_tokens=30 * (i + 1)) for i, q in enumerate(STRANGERS)
    ]
    together = await answers(chunked, *strangers, *(ask(q) for q in QUESTIONS))
    assert [r.ids() for r in together[-3:]] == expected
    pair = await answers(chunked, ask(STRANGERS[0], max_tokens=100), ask(QUESTIONS[0], max_tokens=100))
    assert pair[1].ids() == expected[0][:100]
    assert pair[0].ids()[:30] != together[0].ids()


async def test_a_session_of_many_steps_is_exact(expected: list[list[int]], chunked: WorkerProcess) -> None:
    """Each step continues after all tokens before it, 20 more at a time, and computes only what is new.

    The first step computes the prompt in many chunks: the tenant is one that has asked nothing before.
    """
    for number, (question, ids) in enumerate(zip(QUESTIONS, expected, strict=True)):
        for done in range(0, TOKENS, 20):
            known = (api.Resume(choice=0, ids=tuple(ids[:done])),)
            step = ask(question, tenant="steps", session=f"steps{number}", max_tokens=done + 20, resume=known)
            (answer,) = await answers(chunked, step)
            assert answer.ids() == ids[done : done + 20]
            if done == 0:
                assert len(answer.of(api.Progress)) > 1
            else:
                assert answer.started.cached_tokens == answer.started.prompt_tokens
                assert not any(p.done < p.total for p in answer.of(api.Progress))


async def test_a_conversation_reuses_its_history(whole: WorkerProcess, chunked: WorkerProcess) -> None:
    messages: tuple[api.Message, ...] = ()
    for step, question in enumerate(("Name three rivers.", "Which is the longest?", "And the shortest?")):
        messages = (*messages, api.Message(role="user", content=question))
        fields = {"max_tokens": 40, "ignore_eos": False}
        (cold,) = await answers(whole, generate(api.ChatInput(messages=messages), **fields))
        (warm,) = await answers(chunked, generate(api.ChatInput(messages=messages), session="talk", **fields))
        assert warm.ids() == cold.ids()
        if step:
            new = warm.started.prompt_tokens - warm.started.cached_tokens
            assert new <= 16 + len(question), f"step {step} computed {new} tokens"
        messages = (*messages, api.Message(role="assistant", content=warm.text()))


@pytest.mark.parametrize("sampling", [api.Sampling(temperature=0.0), api.Sampling(temperature=0.9, seed=3)])
async def test_an_answer_resumes_at_every_cut(chunked: WorkerProcess, sampling: api.Sampling) -> None:
    request = ask("Say hello in five languages.", max_tokens=16, sampling=sampling)
    (unbroken,) = await answers(chunked, request)
    deltas = unbroken.of(api.Delta)
    cuts = []
    for cut in range(len(deltas) + 1):
        sent = "".join(d.text for d in deltas[:cut])
        ids = tuple(i for d in deltas[:cut] for i in d.ids)
        resume = api.Resume(choice=0, ids=ids, chars=len(sent))
        cuts.append((sent, ask("Say hello in five languages.", max_tokens=16, sampling=sampling, resume=(resume,))))
    recorders = await answers(chunked, *(request for _, request in cuts))
    for (sent, _), recorder in zip(cuts, recorders, strict=True):
        assert sent + recorder.text() == unbroken.text()


async def test_cancelling_and_losing_connections_free_everything(chunked: WorkerProcess) -> None:
    async with WorkerClient(chunked.socket) as client:
        before = await client.status()
        cancelled = ask(QUESTIONS[1], max_tokens=2000)
        async with WorkerClient(chunked.socket) as leaver:
            leaver.send(ask(QUESTIONS[2], max_tokens=2000))
            await leaver.until(api.Delta)
            leaver.writer.transport.abort()
        client.send(cancelled)
        await client.until(api.Progress)
        client.send(api.Cancel(request=cancelled.request, epoch=cancelled.epoch))
        while (status := await client.status()).running or status.waiting:
            pass
    assert status.pages_free == before.pages_free == status.pages_total


async def test_malformed_frames_close_their_connection_only(chunked: WorkerProcess) -> None:
    async with WorkerClient(chunked.socket) as good:
        for frame in (b"\x00\x00\x00\x02\xc1\xc1", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n"):
            async with WorkerClient(chunked.socket) as bad:
                bad.writer.write(frame)
                bad.writer.write_eof()
                assert await bad.closed()
        (answer,) = await good.answer(ask("Hi", max_tokens=4))
    assert len(answer.ids()) == 4


async def test_status_comes_while_a_step_runs(whole: WorkerProcess) -> None:
    async with WorkerClient(whole.socket) as client:
        request = ask("word " * 800, max_tokens=1)
        client.send(request)
        seen = [await client.status() for _ in range(4)]
        (answer,) = [await client.until(api.Completed)]
        assert isinstance(answer, api.Completed)
    busy = [s for s in seen if s.running]
    assert len(busy) >= 2
    assert busy[0].steps == busy[1].steps


async def test_a_killed_worker_takes_its_connections_along(model_path: Path, tmp_path: Path) -> None:
    with worker(tmp_path, config(model_path)) as running:
        running.wait_ready()
        async with WorkerClient(running.socket) as client:
            client.send(ask(QUESTIONS[0]))
            await client.until(api.Delta)
            running.signal(signal.SIGKILL)
            assert await client.closed()
        assert running.wait() == -signal.SIGKILL
    with worker(tmp_path, config(model_path)) as again:
        again.wait_ready()
        (answer,) = await answers(again, ask("Hi", max_tokens=4))
    assert len(answer.ids()) == 4


async def test_sigterm_lets_short_answers_end_and_fails_long_ones(model_path: Path, tmp_path: Path) -> None:
    with worker(tmp_path, config(model_path), "--grace", "20") as running:
        running.wait_ready()
        async with WorkerClient(running.socket) as client:
            short, long = ask("Hi", max_tokens=3), ask("Hi", max_tokens=8000)
            client.send(short, long)
            await client.until(api.Delta)
            running.signal(signal.SIGTERM)
            recorders = {short.request: Recorder(), long.request: Recorder()}
            late = ask("Hi")
            client.send(late)
            recorders[late.request] = Recorder()
            while not all(r.done for r in recorders.values()):
                event = await client.event()
                assert not isinstance(event, api.Welcome | api.Status)
                recorders[event.request](event)
            assert await client.closed()
        assert running.wait() == 0
    assert not running.socket.exists()
    assert len(recorders[short.request].of(api.Completed)) == 1
    for request in (long, late):
        failed = recorders[request.request].failed
        assert failed is not None
        assert (failed.code, failed.retryable) == ("worker_lost", True)


@pytest.mark.parametrize("mode", ["serve", "watch"])
def test_a_missing_model_is_one_line(tmp_path: Path, mode: str) -> None:
    with worker(tmp_path, config(tmp_path / "none.gguf"), mode) as running:
        assert running.wait() == 2
    (line,) = running.lines
    assert line.startswith("magnitude worker: no model at")
