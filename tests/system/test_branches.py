"""Branches over HTTP on a real engine, store and sockets: what they share, what they free, and what outlives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import MagnitudeClient, api
from magnitude_engine.client.branches import SessionBranch
from magnitude_engine.engine import Engine
from magnitude_engine.errors import StatusError, StreamBroken
from magnitude_engine.server import Server as WorkerServer
from magnitude_proxy.config import StoreConfig, WorkerConfig
from testkit import store
from testkit.engine import engine_config
from testkit.model import smollm2_path
from testkit.proxy import proxy_config, proxying
from testkit.serve import lend_model, serving
from testkit.tiny import tiny_model

PAGE = 16
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}
ASKED = [{"role": "user", "content": "a question that fills some pages of the cache " * 3}]


@dataclass(frozen=True)
class Tiny:
    """Two proxies of one store and one worker, a client of each, and the engine behind the worker's socket."""

    clients: tuple[MagnitudeClient, MagnitudeClient]
    engine: Engine

    async def report(self) -> api.CacheReport:
        """What the cache holds, by the engine's own accounts."""
        told: asyncio.Future[api.CacheReport] = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        self.engine.inspect(lambda report: loop.call_soon_threadsafe(told.set_result, report))
        return await told

    async def lines(self) -> dict[str, str]:
        return {use.branch: use.state for use in (await self.report()).sessions}


@asynccontextmanager
async def worker(socket: Path) -> AsyncIterator[Engine]:
    engine = Engine(tiny_model(), engine_config(), pages=512)
    server = WorkerServer(engine, socket)
    await server.start()
    engine.start()
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.close)
        await server.close()


@asynccontextmanager
async def clients(folder: Path, kept: store.Server) -> AsyncIterator[tuple[MagnitudeClient, MagnitudeClient]]:
    attached = WorkerConfig(mode="attach", socket=str(folder / "w.sock"))
    config = proxy_config(folder, worker=attached, store=StoreConfig(url=kept.url, timeout_s=1.0))
    async with AsyncExitStack() as stack:
        made = []
        for _ in range(2):
            proxy = await stack.enter_async_context(proxying(config))
            while (await proxy.get("/health/ready")).status != 200:
                await asyncio.sleep(0.01)
            made.append(await stack.enter_async_context(MagnitudeClient(proxy.url, max_retries=0)))
        yield made[0], made[1]


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[store.Server]:
    async with store.server("valkey", tmp_path) as running:
        yield running


@pytest.fixture
async def tiny(tmp_path: Path, kept: store.Server) -> AsyncIterator[Tiny]:
    async with worker(tmp_path / "w.sock") as engine, clients(tmp_path, kept) as made:
        yield Tiny(made, engine)


def cached(answer: Any) -> int:
    figures: dict[str, int] = answer["usage"]["magnitude"]
    return figures["cached_tokens"]


async def ask(client: MagnitudeClient, branch: SessionBranch | None, *more: str, **options: Any) -> Any:
    """Asks a branch, or the main line, the common question and what follows it."""
    messages = [*ASKED, *({"role": "user" if n % 2 else "assistant", "content": text} for n, text in enumerate(more))]
    named = {} if branch is None else {"branch": branch.id}
    return await client.chat(messages, session_id="s", **{**GREEDY, **named, **options})


async def test_a_pruned_branch_frees_its_pages_within_a_second(tiny: Tiny) -> None:
    client, other = tiny.clients
    first = await ask(client, None)
    session = client.session("s")
    branches = await session.fork(3)
    while not tiny.engine.status().counters["warm_rows"]:
        await asyncio.sleep(0.01)
    before = await tiny.report()
    texts = [f"thought {n}: " + f"{n}, " * 60 for n in range(3)]
    for branch, text in zip(branches, texts, strict=True):
        answer = await ask(client, branch, first["text"], text)
        assert cached(answer) >= first["usage"]["prompt_tokens"] - PAGE
    held = {each.id: each.tokens for each in (await session.branches()).branches}
    assert all((held[branch.id] or 0) > 100 for branch in branches)
    full = await tiny.report()
    began = time.monotonic()
    await other.session("s").prune(branches[0])
    freed = await tiny.report()
    while freed.pages_free == full.pages_free and time.monotonic() < began + 1:
        freed = await tiny.report()
    assert freed.pages_free - full.pages_free >= 100 // PAGE
    await session.prune(branches[1])
    await session.prune(branches[2])
    while (await tiny.lines())[branches[2].id] != "ended":
        await asyncio.sleep(0.01)
    # All but the beginning of a page that more than one of them used.
    assert before.pages_free - (await tiny.report()).pages_free <= 1
    assert [each.tokens for each in (await session.branches()).branches] == [0, 0, 0]
    await asyncio.to_thread(tiny.engine.close)
    tiny.engine.check_integrity()


async def test_pruning_over_another_proxy_ends_what_the_branch_generates(tiny: Tiny) -> None:
    client, other = tiny.clients
    await ask(client, None)
    one, two = await client.session("s").fork(2)
    stream = await client.chat(ASKED, session_id="s", branch=one.id, stream=True, temperature=1.0, max_tokens=1500)
    await anext(stream)
    whole = asyncio.create_task(ask(client, two, temperature=1.0, max_tokens=1500))
    while (await tiny.lines()).get(two.id) != "thinking":
        await asyncio.sleep(0.01)
    for branch in (one, two):
        await other.session("s").prune(branch, "too slow")
    with pytest.raises(StreamBroken, match="branch_ended"):
        async for _ in stream:
            pass
    with pytest.raises(StatusError, match="was pruned") as ended:
        await whole
    assert (ended.value.status, ended.value.error_code) == (409, "branch_ended")
    assert tiny.engine.status().running == 0
    assert (await client.session("s").report()).steps == 1


async def test_branches_outlive_the_worker(tmp_path: Path, kept: store.Server) -> None:
    socket, life = tmp_path / "w.sock", AsyncExitStack()
    async with life:
        await life.enter_async_context(worker(socket))
        async with clients(tmp_path, kept) as (client, other):
            await ask(client, None)
            one, two, three = await client.session("s").fork(3)
            texts = {branch.id: (await ask(client, branch, "so", "and then?"))["text"] for branch in (one, two)}
            await client.session("s").score(two, 0.75)
            await client.session("s").prune(three)
            await life.aclose()
            async with worker(socket):
                for each in (client, other):
                    while (await each.session("s").branches()).branches[0].tokens is None:
                        await asyncio.sleep(0.01)
                found = (await other.session("s").branches()).branches
                assert [each.state for each in found] == ["open", "open", "pruned"]
                assert [each.score for each in found] == [None, 0.75, None]
                assert (await ask(other, one, "so", "and then?"))["text"] == texts[one.id]
                await other.session("s").select(two)
                assert (await ask(client, None, "so", "and then?"))["text"] == texts[two.id]
                with pytest.raises(StatusError, match="was pruned"):
                    await ask(client, one)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_the_session_goes_on_from_the_best_branch_in_the_same_words(tmp_path: Path) -> None:
    lend_model(tmp_path / "data", smollm2_path())
    start = [{"role": "user", "content": "Which city is the capital of France? Answer in one sentence."}]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}
    hints = ["Name a museum there.", "Name a river there.", "Name a tower there."]
    with serving(tmp_path, "--threads", "1") as server:
        async with MagnitudeClient(server.base_url) as client:
            first = await client.chat(start, session_id="run", **options)
            said = [*start, {"role": "assistant", "content": first["text"]}]
            asked = [[*said, {"role": "user", "content": hint}] for hint in hints]
            session = client.session("run")
            branches = await session.fork(3)
            questions = (
                client.chat(each, session_id="run", branch=branch.id, **options)
                for branch, each in zip(branches, asked, strict=True)
            )
            answers = await asyncio.gather(*questions)
            for branch, answer in zip(branches, answers, strict=True):
                assert cached(answer) >= first["usage"]["prompt_tokens"] - PAGE
                await session.score(branch, -len(answer["text"]))
            best = (await session.branches()).best()
            index = [branch.id for branch in branches].index(best.id)
            await session.select(best)
            chosen = answers[index]
            reply = {"role": "assistant", "content": chosen["text"]}
            later = [*asked[index], reply, {"role": "user", "content": "Why?"}]
            on = await client.chat(later, session_id="run", **options)
            # Nobody else has asked this, so the selected branch has computed what is cached.
            assert cached(on) >= chosen["usage"]["prompt_tokens"] - PAGE
            states = {each.id: each.state for each in (await session.branches()).branches}
            assert states == {each.id: "selected" if each.id == best.id else "pruned" for each in branches}
            for n, (each, answer) in enumerate([(start, first), *zip(asked, answers, strict=True), (later, on)]):
                alone = await client.chat(each, session_id=f"plain-{n}", **options)
                assert alone["text"] == answer["text"]
