"""Equal to the token, wherever the history of a session comes from and whoever runs beside it.

Sessions that share a system prompt take a first step. Then what they left goes where `origin` says, and the second
step comes in one of four `shape`s. Each combination proves by the engine's own figures that it was what it says.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import Recorder, alone, drain, generate, run, submit
from testkit.tiered import counter, evict, save, tier_use, tiered

pytestmark = pytest.mark.thorough

GREEDY = api.Sampling(temperature=0.0)
SEEDED = api.Sampling(temperature=1.1, top_p=0.95, presence_penalty=0.4, seed=11)
SYSTEM = "you are an agent with tools; answer in short and exact sentences, and never guess. "
SESSIONS = 8
# Room for some of the eight, so that they take turns.
FEW_PAGES = 20

Ids = tuple[int, ...]
Origin = Callable[[LoadedModel, Path, "History", int], Engine]


class History:
    """First steps of `SESSIONS` sessions, and what each session sends next."""

    def __init__(self, model: LoadedModel, sampling: api.Sampling) -> None:
        self.model = model
        self.sampling = sampling
        texts = [SYSTEM + f"task {i}: {'look around ' * (i % 3)}" for i in range(SESSIONS)]
        self.firsts = [generate(text, session=f"s{i}", sampling=sampling) for i, text in enumerate(texts)]
        self.ids: list[Ids] = []
        for first in self.firsts:
            self.ids.append((*model.prompts.encode(first.input), *alone(model, first).ids()))

    def second(self, session: int, text: str = "and then?", **fields: object) -> api.Generate:
        """Returns the next step of a session, after its whole history."""
        ids = (*self.ids[session], *self.model.tokenizer.encode(text))
        return generate(ids, session=f"s{session}", step=1, sampling=self.sampling, **fields)

    def pages(self, session: int) -> int:
        """Returns the tokens in full pages of a session's computed history; its last token never is."""
        return (len(self.ids[session]) - 1) // PAGE_TOKENS * PAGE_TOKENS

    def take_place(self, engine: Engine, some: int | None = None) -> None:
        """Runs the first steps together."""
        answers = run(engine, *self.firsts[:some])
        for first, answer in zip(self.firsts, answers, strict=False):
            assert answer.ids() == alone(self.model, first).ids()


def cold(model: LoadedModel, folder: Path, history: History, pages: int) -> Engine:
    return tiered(model, folder, pages)


def cached(model: LoadedModel, folder: Path, history: History, pages: int) -> Engine:
    engine = tiered(model, pages=pages)
    history.take_place(engine)
    return engine


def from_host(model: LoadedModel, folder: Path, history: History, pages: int) -> Engine:
    engine = tiered(model, pages=pages, kv_host_mb=8)
    history.take_place(engine)
    evict(engine)
    return engine


def from_disk(model: LoadedModel, folder: Path, history: History, pages: int) -> Engine:
    engine = tiered(model, folder, pages)
    history.take_place(engine)
    save(engine)
    evict(engine)
    return engine


def restarted(model: LoadedModel, folder: Path, history: History, pages: int) -> Engine:
    before = tiered(model, folder, pages)
    history.take_place(before)
    before.close()
    return tiered(model, folder, pages)


def killed(model: LoadedModel, folder: Path, history: History, pages: int) -> Engine:
    """The folder as it is found after `kill -9`: copied while the process uses it, with a step half done."""
    before = tiered(model, folder, pages)
    history.take_place(before)
    save(before)
    submit(before, history.second(1, "never to be finished"))
    before.step()
    shutil.copytree(folder, folder.with_name("left"))
    before.close()
    return tiered(model, folder.with_name("left"), pages)


ORIGINS: dict[str, Origin] = {
    "cold": cold,
    "cached": cached,
    "host": from_host,
    "disk": from_disk,
    "restarted": restarted,
    "killed": killed,
}


def proven_origin(origin: str, answer: Recorder, expected: int) -> None:
    """Checks that the cached tokens of a request came from where they should; `expected` of them at least."""
    usage = answer.usage
    lower = {"host": usage.cached_host_tokens, "disk": usage.cached_disk_tokens}
    if origin == "cold":
        assert usage.cached_tokens == 0
    else:
        assert usage.cached_tokens >= expected
    if origin in ("cold", "cached"):
        assert lower == {"host": 0, "disk": 0}
    else:
        tier = "host" if origin == "host" else "disk"
        assert lower.pop(tier) >= expected
        assert set(lower.values()) == {0}


@pytest.fixture(params=[pytest.param(GREEDY, marks=pytest.mark.slow), SEEDED], ids=["greedy", "seeded"])
def history(model: LoadedModel, request: pytest.FixtureRequest) -> History:
    return History(model, request.param)


@pytest.fixture(params=ORIGINS)
def origin(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def equal(model: LoadedModel, requests: list[api.Generate], answers: list[Recorder]) -> None:
    """Checks each choice against a cold run of the request alone."""
    for request, answer in zip(requests, answers, strict=True):
        expected = alone(model, request)
        assert answer.failed is None
        assert [answer.ids(c) for c in range(request.n)] == [expected.ids(c) for c in range(request.n)]
        assert [answer.text(c) for c in range(request.n)] == [expected.text(c) for c in range(request.n)]


def test_alone(model: LoadedModel, tmp_path: Path, history: History, origin: str) -> None:
    engine = ORIGINS[origin](model, tmp_path / "kv", history, 128)
    request = history.second(3)
    answers = run(engine, request)
    engine.close()
    equal(model, [request], answers)
    proven_origin(origin, answers[0], history.pages(3))


@pytest.mark.slow
def test_branched(model: LoadedModel, tmp_path: Path, history: History, origin: str) -> None:
    """Several choices, another branch that leaves the history in its middle, and a stranger with the same beginning."""
    engine = ORIGINS[origin](model, tmp_path / "kv", history, 128)
    middle = history.pages(2) - PAGE_TOKENS - 5
    turn = (*history.ids[2][:middle], *model.tokenizer.encode("no, something else"))
    requests = [
        history.second(2, n=4),
        generate(turn, session="s2", branch="other", n=2, sampling=history.sampling),
        generate(history.ids[2], session="stranger", sampling=history.sampling),
    ]
    rows = counter(engine, "prefill_rows") + counter(engine, "decode_rows")
    answers = [run(engine, requests[0])[0], *run(engine, *requests[1:])]
    rows = counter(engine, "prefill_rows") + counter(engine, "decode_rows") - rows
    engine.close()
    equal(model, requests, answers)
    proven_origin(origin, answers[0], history.pages(2))
    assert answers[1].usage.cached_tokens >= middle // PAGE_TOKENS * PAGE_TOKENS
    assert answers[2].usage.cached_tokens >= history.pages(2)
    # The prompt is computed once for four choices, and of the others only what is new.
    new = sum(a.usage.prompt_tokens - a.usage.cached_tokens for a in answers)
    # Rows of drafts are not among them, and a token that was accepted needs no other.
    drawn = sum(
        a.usage.completion_tokens - r.n - a.usage.accepted_tokens for a, r in zip(answers, requests, strict=True)
    )
    assert rows == new + drawn
    if history.sampling is SEEDED:
        assert len({answers[0].text(c) for c in range(4)}) > 1


@pytest.mark.slow
def test_batched(model: LoadedModel, tmp_path: Path, history: History, origin: str) -> None:
    engine = ORIGINS[origin](model, tmp_path / "kv", history, 128)
    requests = [history.second(i, max_tokens=10 + i) for i in range(SESSIONS)]
    together: list[int] = []
    answers = run(engine, *requests, between=lambda: together.append(engine.status().running))
    engine.close()
    equal(model, requests, answers)
    assert max(together) == SESSIONS
    if origin == "cold":
        assert answers[0].usage.cached_tokens == 0
        return
    shared = len(model.tokenizer.encode(SYSTEM)) // PAGE_TOKENS * PAGE_TOKENS
    for i, answer in enumerate(answers):
        assert answer.usage.cached_tokens >= history.pages(i)
        # What they have in common comes from below once, and is on the device for the others.
        below = answer.usage.cached_host_tokens + answer.usage.cached_disk_tokens
        assert below >= (0 if origin == "cached" else history.pages(i) - shared)
    name = {"host": "host", "cached": "device"}.get(origin, "disk")
    assert tier_use(engine, name).tokens_served >= sum(map(history.pages, range(SESSIONS))) - shared * SESSIONS


@pytest.mark.slow
def test_preempted(model: LoadedModel, tmp_path: Path, history: History, origin: str) -> None:
    engine = ORIGINS[origin](model, tmp_path / "kv", history, FEW_PAGES)
    requests = [history.second(i, max_tokens=30, n=1 + (i == 2)) for i in range(SESSIONS)]
    answers = run(engine, *requests)
    preempted, use = counter(engine, "preemptions"), engine._stepper.report().tiers
    assert engine.status().pages_free == FEW_PAGES
    engine.close()
    equal(model, requests, answers)
    assert preempted > 0
    served = {tier.name: tier.tokens_served for tier in use}
    if origin in served:
        assert served[origin] > 0
    if origin in ("restarted", "killed"):
        assert served["disk"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 8])
def test_all_origins_in_one_batch(model: LoadedModel, tmp_path: Path, history: History, size: int) -> None:
    """One sequence goes on on the device, one from host memory, one from disk, others cold, in the same steps."""
    engine = tiered(model, tmp_path / "kv", kv_host_mb=8)
    history.take_place(engine)
    save(engine)
    evict(engine)
    cache = engine._stepper.cache
    assert cache.tiers._host is not None
    cache.tiers._host.discard(cache.manager.chain("t", history.ids[1])[2:])
    run(engine, history.second(0, "once more"))
    requests = [history.second(0), history.second(1), history.second(2)]
    requests += [generate(f"cold {i} {SYSTEM}", sampling=history.sampling) for i in range(size)]
    answers = run(engine, *requests)
    engine.close()
    equal(model, requests, answers)
    device, disk, host = (answer.usage for answer in answers[:3])
    assert (device.cached_host_tokens, device.cached_disk_tokens) == (0, 0)
    assert device.cached_tokens >= history.pages(0)
    assert disk.cached_disk_tokens > 0
    assert host.cached_host_tokens > 0
    assert [answer.usage.cached_tokens for answer in answers[3:]] == [0] * size


@pytest.mark.slow
def test_a_preempted_sequence_comes_back_from_host_memory(model: LoadedModel, history: History) -> None:
    """Pages run out for real: what a sequence that gave way had computed is evicted, spilled, and restored."""
    engine = tiered(model, pages=16, kv_host_mb=8)
    requests = [generate(f"{i} {SYSTEM}", sampling=history.sampling, max_tokens=40) for i in range(4)]
    answers = run(engine, *requests)
    equal(model, requests, answers)
    assert counter(engine, "preemptions") > 0
    assert engine._stepper.manager.evicted.spilled > 0
    assert tier_use(engine, "host").tokens_served > 0
    assert counter(engine, "prefill_rows") < 2 * sum(a.usage.prompt_tokens for a in answers)


def test_cancelled_while_its_blocks_are_read(model: LoadedModel, tmp_path: Path, history: History) -> None:
    engine = from_disk(model, tmp_path / "kv", history, 128)
    doomed, other = history.second(1), history.second(2)
    recorders = submit(engine, doomed, other)
    engine.step()
    engine.cancel(doomed.request, doomed.epoch)
    drain(engine)
    assert not recorders[0].done
    equal(model, [other], recorders[1:])
    assert not engine.reading
    (again,) = run(engine, history.second(1))
    engine.close()
    proven_origin("disk", again, history.pages(1) - len(model.tokenizer.encode(SYSTEM)))
