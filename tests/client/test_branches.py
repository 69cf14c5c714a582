"""Branches of a session in process: forked, asked, scored, pruned, selected, on a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from magnitude import AgentConfig, MagnitudeEngine
from magnitude_engine.client.answers import GenerateResult
from magnitude_engine.errors import BranchEnded, BranchLimit, EngineError, RequestError
from magnitude_engine.inprocess import Branch, Branches
from testkit.inprocess import Passes, use_tiny_model, wait_until

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
LIMIT = 6
PAGE = 16


@pytest.fixture
def passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Passes:
    return use_tiny_model(tmp_path, monkeypatch)


@pytest.fixture
def engine(passes: Passes) -> Iterator[MagnitudeEngine]:
    config = AgentConfig(max_parallel_branches=LIMIT, enable_hierarchical_cache=False)
    with MagnitudeEngine(config, kv_memory_mb=1) as made:
        yield made


@pytest.fixture
def branches(engine: MagnitudeEngine) -> Branches:
    return engine.branches("s")


def states(engine: MagnitudeEngine) -> dict[str, str]:
    """Returns what the engine knows of the lines of session `s`."""
    return {use.branch: use.state for use in engine.inspect().sessions if use.session == "s"}


def cached(result: GenerateResult) -> int:
    """Returns the prompt tokens that were found in the cache."""
    figures: dict[str, int] = result["usage"]["magnitude"]
    return figures["cached_tokens"]


@pytest.mark.thorough
def test_branches_answer_as_the_session_would(engine: MagnitudeEngine, branches: Branches) -> None:
    prompt = "Goal: a prompt long enough to fill some pages of the cache."
    alone = engine.generate(session_id="other", prompt=prompt, **GREEDY)
    for branch in branches.fork(2):
        result = branch.generate(prompt=prompt, **GREEDY)
        assert (result["text"], result["session_id"]) == (alone["text"], "s")
        assert cached(result) > 0
    chat = branches.fork(1)[0].chat([{"role": "user", "content": prompt}], **GREEDY)
    assert chat["text"] == alone["text"]


@pytest.mark.thorough
def test_streams_and_async_twins_answer_alike(branches: Branches) -> None:
    one, two = branches.fork(2)
    whole = one.generate(prompt="hi", **GREEDY)["text"]
    assert "".join(item["text"] for item in two.generate(prompt="hi", stream=True, **GREEDY)) == whole
    chat: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
    assert "".join(item["text"] for item in two.chat(chat, stream=True, **GREEDY)) == whole

    async def together() -> set[str]:
        results = await asyncio.gather(one.agenerate(prompt="hi", **GREEDY), two.achat(chat, **GREEDY))
        texts = {result["text"] for result in results}
        prompted = await one.agenerate(prompt="hi", stream=True, **GREEDY)
        for stream in (prompted, await two.achat(chat, stream=True, **GREEDY)):
            texts.add("".join([item["text"] async for item in stream]))
        return texts

    assert asyncio.run(together()) == {whole}


@pytest.mark.slow
def test_sixteen_branches_store_a_prefix_of_six_thousand_tokens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = use_tiny_model(tmp_path, monkeypatch, context=8192)
    prefix = "Observation: " + "".join(f"{number:x}," for number in range(1600))
    config = AgentConfig(max_parallel_branches=16, enable_hierarchical_cache=False)
    # 512 pages: the prefix takes three quarters of them, two copies of it have no room.
    with MagnitudeEngine(config, kv_memory_mb=2) as engine:
        main = engine.generate(session_id="s", prompt=prefix, raw=True, **GREEDY)
        length = main["usage"]["prompt_tokens"]
        assert 5500 < length < 7000
        before = engine.inspect()
        with engine.branches("s") as branches, ThreadPoolExecutor(16) as threads:
            forked = branches.fork(16)

            def ask(number: int) -> GenerateResult:
                prompt = f"{prefix}; hypothesis {number:02d}"
                result: GenerateResult = forked[number].generate(prompt=prompt, raw=True, **GREEDY)
                return result

            results = list(threads.map(ask, range(16)))
        after = engine.inspect()
    assert (before.pages_total, after.pages_total) == (512, 512)
    assert all(length - PAGE <= cached(result) for result in results)
    own = max(result["usage"]["prompt_tokens"] for result in results) - length + GREEDY["max_tokens"]
    used = before.pages_free - after.pages_free
    assert 0 < used <= 16 * (own // PAGE + 2)
    # The branches ended with the block: what they alone used is free again, nothing else had to go.
    assert sum(tier.evicted for tier in after.tiers) <= 16 * (own // PAGE + 1)
    lines = {use.branch: use.state for use in after.sessions}
    assert {lines[branch.id] for branch in forked} == {"ended"}
    assert max(passes.widths) > 1


@pytest.mark.thorough
def test_questions_of_several_threads_are_one_batch(passes: Passes, branches: Branches) -> None:
    forked = branches.fork(LIMIT)
    forked[0].generate(prompt="Goal: the same beginning", **GREEDY)
    passes.widths.clear()
    start = threading.Barrier(LIMIT)

    def ask(branch: Branch) -> int:
        start.wait()
        result = branch.generate(prompt="Goal: the same beginning", temperature=1.0, seed=1, max_tokens=24)
        return int(result["usage"]["completion_tokens"])

    with ThreadPoolExecutor(LIMIT) as threads:
        tokens = sum(threads.map(ask, forked))
    assert max(passes.widths) > 1
    assert sum(1 for width in passes.widths if width) < tokens


def test_the_limit_is_named_and_pruning_makes_room(branches: Branches) -> None:
    first = branches.fork(LIMIT - 1)
    with pytest.raises(BranchLimit, match=rf"has 5 open branches; 2 more .*max_parallel_branches={LIMIT}") as caught:
        first[0].fork(2)
    assert (caught.value.param, caught.value.code) == ("count", "branch_limit_exceeded")
    first[0].prune()
    assert [branch.depth for branch in first[1].fork(2)] == [2, 2]
    assert len(branches) == LIMIT
    for wrong in (0, True, "2"):
        with pytest.raises(RequestError, match="at least 1"):
            branches.fork(wrong)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_a_pruned_branch_takes_all_that_grew_from_it_along(engine: MagnitudeEngine, branches: Branches) -> None:
    left, right = branches.fork(2)
    (child,) = left.fork()
    (grandchild,) = child.fork()
    for branch in (left, right, child, grandchild):
        branch.generate(prompt="hi", **GREEDY)
    child.prune()
    assert list(branches) == [left, right]
    assert states(engine) == {left.id: "waiting", right.id: "waiting", child.id: "ended", grandchild.id: "ended"}
    child.prune()
    for ended in (child, grandchild):
        assert not ended.open
        for call in (
            lambda b=ended: b.generate(prompt="hi"),
            lambda b=ended: b.chat([]),
            lambda b=ended: b.fork(2),
            lambda b=ended: b.score(1),
            lambda b=ended: b.tool_output("c", "text"),
            lambda b=ended: asyncio.run(b.agenerate(prompt="hi")),
            lambda b=ended: asyncio.run(b.achat([])),
            lambda b=ended: branches.select(b),
        ):
            with pytest.raises(BranchEnded, match=f"branch {ended.id} of session 's' was pruned"):
                call()


@pytest.mark.thorough
def test_pruning_ends_what_the_branch_still_generates(engine: MagnitudeEngine, branches: Branches) -> None:
    streaming, waiting, looping = branches.fork(3)
    long: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 1900}
    stream = streaming.generate(prompt="hi", stream=True, **long)
    next(stream)
    with ThreadPoolExecutor(2) as threads:
        blocked = threads.submit(lambda: waiting.generate(prompt="hi", **long))
        tasks = threads.submit(lambda: asyncio.run(looping.agenerate(prompt="hi", **long)))
        wait_until(lambda: bool(waiting._asked and looping._asked))
        branches.prune()
        for ended, branch in ((blocked, waiting), (tasks, looping)):
            with pytest.raises(BranchEnded, match=f"{branch.id} .* was pruned"):
                ended.result(timeout=20)
    with pytest.raises(BranchEnded, match=streaming.id):
        for _ in stream:
            pass
    assert not waiting._asked
    assert all(run.in_use == 0 for run in engine.inspect().runs)


def test_a_stream_of_a_branch_that_is_pruned_before_it_begins_never_asks(branches: Branches, passes: Passes) -> None:
    (branch,) = branches.fork()
    stream = branch.generate(prompt="hi", stream=True, **GREEDY)
    branch.prune()
    with pytest.raises(BranchEnded):
        next(stream)
    assert passes.widths == []


def test_the_best_is_the_open_one_with_the_highest_score(branches: Branches) -> None:
    one, two, three = branches.fork(3)
    with pytest.raises(RequestError, match=r"none|no open branch .* score\(\.\.\.\)"):
        branches.best()
    one.score(0.2)
    two.score(0.9)
    three.score(0.9)
    assert branches.best() is two
    two.prune()
    assert branches.best() is three
    three.score(-1)
    assert (branches.best(), three.value) == (one, -1.0)
    for wrong in (float("nan"), True, "high", None):
        with pytest.raises(RequestError, match="finite number"):
            one.score(wrong)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_the_session_goes_on_from_the_selected_branch(engine: MagnitudeEngine, branches: Branches) -> None:
    engine.generate(session_id="s", prompt="hi", **GREEDY)
    one, two = branches.fork(2)
    (kept,) = one.fork()
    thought = [{"role": "user", "content": "a question that fills more than one page of the cache"}]
    answer = kept.chat(thought, **GREEDY)
    two.chat(thought, **GREEDY)
    branches.select(kept)
    assert (len(branches), list(branches)) == (0, [])
    assert states(engine) == {"main": "ended", kept.id: "waiting", two.id: "ended"}
    for ended, words in ((kept, "was selected: go on with"), (two, f"pruned when {kept.id} was selected")):
        with pytest.raises(BranchEnded, match=words):
            ended.generate(prompt="hi")
    later = [*thought, {"role": "assistant", "content": answer["text"]}, {"role": "user", "content": "go on"}]
    assert cached(engine.chat(later, session_id="s", **GREEDY)) >= answer["usage"]["prompt_tokens"] - PAGE
    assert set(states(engine)) == {"main", kept.id, two.id}
    (again,) = branches.fork()
    again.generate(prompt="hi", **GREEDY)
    branches.select(again)
    assert states(engine)[kept.id] == "ended"
    engine.end_session("s")
    assert set(states(engine).values()) == {"ended"}
    engine.generate(session_id="s", prompt="hi", **GREEDY)
    assert states(engine)["main"] == "waiting"


def test_a_branch_of_another_session_is_refused(engine: MagnitudeEngine, branches: Branches) -> None:
    (mine,) = branches.fork()
    (foreign,) = engine.branches("other").fork()
    with pytest.raises(RequestError, match="no branch of session 's'"):
        branches.select(foreign)
    assert mine.open
    assert foreign.open


def test_a_session_has_one_set_of_branches(engine: MagnitudeEngine) -> None:
    with engine.branches("s") as branches:
        (branch,) = branches.fork()
        assert engine.branches("s") is branches
        assert [branch] == list(engine.branches("s"))
        assert branch.session_id == "s"
    assert not branch.open
    assert len(branches) == 0
    (again,) = branches.fork()
    assert again.id != branch.id
    engine.end_session("s")
    assert not again.open
    for wrong in ("", None, 5):
        for call in (engine.branches, engine.end_session):
            with pytest.raises(RequestError, match="session_id must be a non-empty text"):
                call(wrong)  # type: ignore[arg-type]


@pytest.mark.thorough
def test_branches_of_a_closed_engine_end_without_an_error(engine: MagnitudeEngine, branches: Branches) -> None:
    with branches:
        (branch,) = branches.fork()
        branch.generate(prompt="hi", **GREEDY)
        engine.close()
        with pytest.raises(EngineError, match="closed"):
            branch.generate(prompt="hi", **GREEDY)
    assert not branch.open


def test_nothing_of_this_loads_a_model(engine: MagnitudeEngine, branches: Branches, passes: Passes) -> None:
    one, two = branches.fork(2)
    one.score(1)
    one.tool_output("call", "text")
    branches.select(one)
    engine.tool_output("s", "call", "text")
    engine.end_session("s")
    assert (two.open, passes.widths, engine._engine) == (False, [], None)
    engine.close()
    for call in (engine.branches, engine.end_session, lambda s: engine.tool_output(s, "call", "text")):
        with pytest.raises(EngineError, match="closed"):
            call("s")
