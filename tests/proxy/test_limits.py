"""Limits of sessions and keys: pure rules, the same in Lua and in memory, and what clients see over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from magnitude_engine import api
from magnitude_engine.client import MagnitudeClient
from magnitude_engine.errors import SessionLimitExceeded
from magnitude_proxy.config import Limits, SessionLimits, StoreConfig, TelemetryConfig
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.errors import SessionLimitExceeded as Refused
from magnitude_proxy.identity import Identity
from magnitude_proxy.keyfile import parse_key_file
from magnitude_proxy.limits import Terms, Use, exceeded, lowered, read_limits, repeated, shown
from magnitude_proxy.quota import Bucket, taken
from magnitude_proxy.session import Lease, Sessions, StepOutcome
from magnitude_proxy.telemetry import Telemetry
from testkit import store
from testkit.proxy import ASK, Proxy, proxy_config, proxying, routing
from testkit.routes import FOREVER, ScriptedRoute, delta, started
from testkit.upstream import OpenAIStub


def who(raw: str) -> Identity:
    return Identity(tenant="t", session=raw, branch="main", run=raw, source="magnitude", raw=raw)


def call(name: str = "ls", arguments: str = '{"a": 1, "b": [true]}') -> api.ToolCall:
    return api.ToolCall(id="c", name=name, arguments=arguments)


def history(*turns: tuple[api.ToolCall, ...] | str) -> list[api.Message]:
    """Returns a conversation: each tuple is an assistant's calls with their results, each text a user's message."""
    found = []
    for turn in turns:
        if isinstance(turn, str):
            found.append(api.Message(role="user", content=turn))
        else:
            found += [api.Message(role="assistant", tool_calls=turn), api.Message(role="tool", content="done")]
    return found


SAME = call(arguments='{"b":[true],"a":1}')
OTHER = call(arguments='{"a": 1, "b": [1]}')


@pytest.mark.parametrize(
    ("turns", "count"),
    [
        ([], 0),
        (["go"], 0),
        (["go", (call(),)], 1),
        (["go", (call(),), (SAME,), (call(),)], 3),
        (["go", (call(),), (call(), SAME)], 1),
        (["go", (call(),), (OTHER,)], 1),
        (["go", (call(),), (call("cat"),), (call(),)], 2),
        (["go", (call(),), (call(),), "again", (call(),)], 1),
        (["go", (call(arguments="{"),), (call(arguments="{"),), (call(arguments="[[" * 9999),)], 1),
        (["go", *[(call(),)] * 50], 20),
    ],
)
def test_repeated_calls_are_counted_since_the_user_spoke(turns: list[Any], count: int) -> None:
    assert repeated(history(*turns)) == count


def test_the_lower_limit_counts_and_is_reached_when_it_is_used_up() -> None:
    both = lowered(
        Limits(max_iterations=5, max_tokens=9, tokens_per_day=1), SessionLimits(max_iterations=7, max_seconds=2)
    )
    assert both == SessionLimits(max_iterations=5, max_tokens=9, max_seconds=2)
    assert exceeded(both, Use(iterations=4, tokens=8, seconds=1.9, repeats=99)) is None
    assert exceeded(both, Use(iterations=5, tokens=9)) == "max_iterations"
    assert exceeded(both, Use(seconds=2.0)) == "max_seconds"
    assert shown(both, Use(iterations=4, tokens=8, seconds=1.96)) == "iterations=4/5, tokens=8/9, seconds=1.9/2"


def test_a_clients_header_is_read_or_refused_by_name() -> None:
    read = read_limits(" iterations=5,tokens = 100 , seconds=1.5,repeats=2")
    assert read == SessionLimits(max_iterations=5, max_tokens=100, max_seconds=1.5, max_repeats=2)
    assert read_limits(None) == SessionLimits()
    for wrong in ("5", "steps=5", "iterations=0", "iterations=-1", "iterations=1.5", "tokens=x", "tokens=1,tokens=2"):
        with pytest.raises(BadRequest) as caught:
            read_limits(wrong)
        assert caught.value.param == "x-magnitude-limits"


def test_a_bucket_holds_a_minutes_requests_and_fills_steadily() -> None:
    bucket, wait = taken(None, 0.0, 60)
    for _ in range(59):
        bucket, wait = taken(bucket, 0.0, 60)
        assert wait == 0
    assert taken(bucket, 0.0, 60) == (Bucket(0.0, 0.0), 1.0)
    assert taken(bucket, 1.0, 60) == (Bucket(0.0, 1.0), 0.0)
    assert taken(bucket, 1e6, 60) == (Bucket(59, 1e6), 0.0)


@asynccontextmanager
async def keeping(url: str, folder: Path, clock: Callable[[], float]) -> AsyncIterator[Sessions]:
    made = Sessions(StoreConfig(url=url, timeout_s=2), folder, Telemetry(TelemetryConfig()), clock=clock)
    await made.start()
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.thorough
async def test_the_store_and_the_memory_hold_the_same_rules(tmp_path: Path) -> None:
    random, now = Random(6), [1_000.0]

    def limit(most: int) -> int | None:
        return random.choice([None, None, random.randint(1, most)])

    def some() -> SessionLimits:
        return SessionLimits(
            max_iterations=limit(8), max_tokens=limit(400), max_seconds=limit(60), max_repeats=limit(4)
        )

    def told(opened: Lease | Refused) -> object:
        return opened.message if isinstance(opened, Refused) else (opened.record, opened.limits, opened.use)

    async with (
        store.server("valkey", tmp_path) as server,
        keeping(server.url, tmp_path, lambda: now[0]) as stored,
        keeping("none", tmp_path, lambda: now[0]) as here,
    ):
        seen: list[str] = []
        late: list[tuple[Lease, Lease]] = []
        newest: dict[str, int] = {}
        fenced = 0
        for number in range(600):
            now[0] += random.random() * 10
            identity = who(f"s{number // 12}")
            terms = Terms(server=some(), client=some(), repeats=random.randint(0, 3), fresh=random.random() < 0.1)
            leases = [await opening(sessions, identity, terms) for sessions in (stored, here)]
            assert told(leases[0]) == told(leases[1])
            first, second = leases
            if isinstance(first, Refused) or isinstance(second, Refused):
                seen.append(str(first.param) if isinstance(first, Refused) else "")
                continue
            fenced += first.record.extra_steps
            newest[identity.session] = first.epoch
            late.append((first, second))
            while late and random.random() < 0.8:
                first, second = late.pop(random.randrange(len(late)))
                outcome = step(random.randint(1, 60), ok=random.random() < 0.8)
                unfenced = first.epoch == newest[first.identity.session]
                assert await stored.commit(first, outcome) is unfenced
                assert await here.commit(second, outcome) is unfenced
        assert fenced
        assert {"max_iterations", "max_tokens", "max_seconds", "max_repeats"} == set(seen)
        assert len(seen) < 500


@pytest.mark.thorough
async def test_steps_that_run_at_once_all_count(tmp_path: Path) -> None:
    async with (
        store.server("valkey", tmp_path) as server,
        keeping(server.url, tmp_path, lambda: 1_000.0) as stored,
        keeping("none", tmp_path, lambda: 1_000.0) as here,
    ):
        for sessions in (stored, here):
            first, second, third = [await sessions.open(who("a")) for _ in range(3)]
            assert not await sessions.commit(first, step(10))
            assert not await sessions.commit(first, step(10))
            assert not await sessions.commit(second, step(20, ok=False))
            assert await sessions.commit(third, step(30))
            with pytest.raises(Refused, match="2 steps were answered, and 2 are allowed"):
                await sessions.open(who("a"), Terms(server=SessionLimits(max_iterations=2)))
            fourth = await sessions.open(who("a"), Terms(server=SessionLimits(max_iterations=3, max_tokens=64)))
            assert (fourth.use.iterations, fourth.use.tokens, fourth.record.steps) == (3, 63, 1)


async def opening(sessions: Sessions, identity: Identity, terms: Terms) -> Lease | Refused:
    try:
        return await sessions.open(identity, terms)
    except Refused as refused:
        return refused


def step(tokens: int, *, ok: bool = True) -> StepOutcome:
    return StepOutcome(
        route="local",
        finish_reason="stop",
        prompt_tokens=tokens,
        completion_tokens=1,
        cached_tokens=0,
        tool_call=False,
        ok=ok,
    )


@asynccontextmanager
async def limited(folder: Path, stub: OpenAIStub, **limits: float) -> AsyncIterator[Proxy]:
    """Runs a proxy before `stub` whose sessions, in memory, have these limits."""
    async with proxying(proxy_config(folder, stub.url, limits=msgspec.convert(limits, Limits))) as proxy:
        yield proxy


@pytest.mark.thorough
async def test_two_proxies_count_one_sessions_steps_and_one_keys_day(tmp_path: Path) -> None:
    keys = parse_key_file("sk-one alice max_iterations=3\nsk-two bob tokens_per_day=10\nsk-three bob", "keys")
    async with store.server("valkey", tmp_path) as server, OpenAIStub() as stub:
        kept = StoreConfig(url=server.url, timeout_s=2)
        config = proxy_config(tmp_path, stub.url, store=kept, keys=keys, limits=Limits(max_iterations=1000))
        async with proxying(config) as one, proxying(config) as two:
            named = {"authorization": "Bearer sk-one", "x-magnitude-session": "run"}
            answers = []
            for proxy in (one, two, one, two, one):
                answers.append(await proxy.post("/chat/completions", ASK, **named))
                # A commit reaches the store a moment after its answer, and another proxy's step would fence it.
                await asyncio.sleep(0.02)
            assert [answer.status for answer in answers] == [200, 200, 200, 429, 429]
            assert [answer.header("x-magnitude-limits") for answer in answers] == [
                "iterations=1/3", "iterations=2/3", "iterations=3/3", "iterations=3/3", "iterations=3/3"
            ]  # fmt: skip
            refused = answers[-1]
            assert refused.header("x-should-retry") == "false"
            assert refused.header("x-magnitude-session") == answers[0].header("x-magnitude-session")
            assert (refused.error["code"], refused.error["param"]) == ("session_limit_exceeded", "max_iterations")
            assert "3 steps were answered, and 3 are allowed; begin another session" in refused.error["message"]
            report = (await two.get("/v1/sessions/run", x_api_key="sk-one")).json
            assert report["limits"]["iterations"] == {"used": 3, "limit": 3}
            assert report["limits"]["tokens"]["limit"] is None
            other = await two.post("/chat/completions", ASK, **{**named, "x-magnitude-session": "run-2"})
            assert other.header("x-magnitude-limits") == "iterations=1/3"

            day = []
            for proxy in (one, two, one):
                day.append(await proxy.post("/chat/completions", ASK, x_api_key="sk-two"))
                await asyncio.sleep(0.02)
            assert [answer.status for answer in day] == [200, 200, 429]
            assert (day[2].error["code"], day[2].error["param"]) == ("rate_limit_exceeded", "tokens_per_day")
            assert 0 < int(str(day[2].header("retry-after"))) <= 86_400
            assert (await one.post("/chat/completions", ASK, x_api_key="sk-three")).status == 200


async def test_a_client_lowers_its_sessions_limits_for_good_and_raises_none(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, limited(tmp_path, stub, max_iterations=4) as proxy:
        named = {"x-magnitude-session": "run"}
        first = await proxy.post("/chat/completions", ASK, **named, x_magnitude_limits="iterations=99")
        assert first.header("x-magnitude-limits") == "iterations=1/4"
        body = {**ASK, "magnitude": {"limits": {"max_iterations": 2, "max_tokens": 1000}}}
        second = await proxy.post("/chat/completions", body, **named)
        assert str(second.header("x-magnitude-limits")).startswith("iterations=2/2, tokens=")
        assert (await proxy.post("/chat/completions", ASK, **named)).error["param"] == "max_iterations"
        assert (await proxy.get("/v1/sessions/run")).json["limits"]["iterations"] == {"used": 2, "limit": 2}
        wrong = await proxy.post("/chat/completions", {**ASK, "magnitude": {"limits": {"max_steps": 1}}})
        assert (wrong.status, wrong.error["param"]) == (400, "magnitude.limits.max_steps")
        wrong = await proxy.post("/chat/completions", ASK, x_magnitude_limits="iterations=no")
        assert (wrong.status, wrong.error["param"]) == (400, "x-magnitude-limits")


async def test_every_dialect_refuses_a_call_made_too_often_in_its_own_form(tmp_path: Path) -> None:
    turns = 3
    async with OpenAIStub() as stub, limited(tmp_path, stub, max_repeats=turns) as proxy:
        chat: list[Any] = [{"role": "user", "content": "go"}]
        messages: list[Any] = [{"role": "user", "content": "go"}]
        items: list[Any] = [{"role": "user", "content": "go"}]
        for number in range(turns):
            called = {"name": "ls", "arguments": json.dumps({"a": 1})}
            made = {"id": f"c{number}", "type": "function", "function": called}
            chat += [{"role": "assistant", "tool_calls": [made]}]
            chat += [{"role": "tool", "tool_call_id": f"c{number}", "content": "x"}]
            use = {"type": "tool_use", "id": f"c{number}", "name": "ls", "input": {"a": 1}}
            messages += [{"role": "assistant", "content": [use]}]
            result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": "x"}
            messages += [{"role": "user", "content": [result]}]
            items += [{"type": "function_call", "call_id": f"c{number}", **called}]
            items += [{"type": "function_call_output", "call_id": f"c{number}", "output": "x"}]
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/chat/completions", {"messages": chat}),
            ("/responses", {"input": items}),
            ("/messages", {"messages": messages, "max_tokens": 5}),
        ]
        for path, body in asked:
            reply = await proxy.post(path, {"model": "m", **body})
            assert (reply.status, reply.header("x-should-retry")) == (429, "false"), reply.body
            assert reply.header("x-magnitude-limits") == "repeats=3/3"
            told = reply.json["error"]
            assert "max_repeats: the same tool call with the same arguments stands 3 times" in told["message"]
            assert told["type"] == "rate_limit_error"
        assert reply.json["type"] == "error"
        assert stub.requests == []


async def test_runs_that_share_a_fingerprint_are_counted_apart(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, limited(tmp_path, stub, max_iterations=2) as proxy:
        statuses = []
        for answer in ("x", "y"):
            said = [*ASK["messages"], {"role": "assistant", "content": answer}, *ASK["messages"]]
            for body in (ASK, {**ASK, "messages": said}, {**ASK, "messages": said}):
                statuses.append((await proxy.post("/chat/completions", body)).status)
    assert statuses == [200, 200, 429] * 2


@pytest.mark.thorough
async def test_with_the_store_away_a_proxy_goes_on_from_what_it_saw(tmp_path: Path) -> None:
    async with store.server("valkey", tmp_path) as server, OpenAIStub() as stub:
        kept = StoreConfig(url=server.url, timeout_s=2)
        async with proxying(proxy_config(tmp_path, stub.url, store=kept, limits=Limits(max_iterations=3))) as proxy:
            named = {"x-magnitude-session": "run"}
            assert (await proxy.post("/chat/completions", ASK, **named)).status == 200
            assert (await proxy.post("/chat/completions", ASK, **named)).status == 200
            await server.kill()
            shown = [(await proxy.post("/chat/completions", ASK, **named)) for _ in range(3)]
            assert [reply.status for reply in shown][-1] == 429
            assert shown[0].header("x-magnitude-degraded") == "store"


async def test_a_keys_requests_at_once_and_a_minute_are_limited(tmp_path: Path) -> None:
    keys = parse_key_file("sk-one a concurrent_requests=2\nsk-two b requests_per_minute=2\nsk-three a", "keys")
    route = ScriptedRoute("u0", [[started(), FOREVER]])
    async with routing(proxy_config(tmp_path, "http://127.0.0.1:9/v1", keys=keys), route) as proxy:
        held = [asyncio.create_task(proxy.post("/chat/completions", ASK, x_api_key="sk-one")) for _ in range(2)]
        async with asyncio.timeout(5):
            while len(route.seen) < 2:
                await asyncio.sleep(0.005)
        refused = await proxy.post("/messages", {**ASK, "max_tokens": 1}, x_api_key="sk-one")
        assert (refused.status, refused.header("retry-after"), refused.header("x-should-retry")) == (429, "1", None)
        assert "all that concurrent_requests allows" in refused.json["error"]["message"]
        assert (await proxy.get("/v1/models", x_api_key="sk-one")).status == 200
        held += [asyncio.create_task(proxy.post("/chat/completions", ASK, x_api_key="sk-two")) for _ in range(2)]
        async with asyncio.timeout(5):
            while len(route.seen) < 4:
                await asyncio.sleep(0.005)
        refused = await proxy.post("/chat/completions", ASK, x_api_key="sk-two")
        assert (refused.error["code"], refused.error["param"]) == ("rate_limit_exceeded", "requests_per_minute")
        assert 28 <= int(str(refused.header("retry-after"))) <= 30
        for task in held:
            task.cancel()
        await asyncio.wait(held)


async def test_answers_that_clients_leave_count_as_far_as_they_were_written(tmp_path: Path) -> None:
    route = ScriptedRoute("u0", [[started(), delta("a", 1, 2), delta("b", 3), FOREVER]])
    limits = Limits(max_tokens=10, tokens_per_day=15)
    async with routing(proxy_config(tmp_path, "http://127.0.0.1:9/v1", limits=limits), route) as proxy:
        for session in ("run", "other"):
            named = {"x-magnitude-session": session}
            body = {**ASK, "stream": True}
            async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=named) as response:
                assert response.headers["x-magnitude-limits"] == "tokens=0/10"
                await response.content.readuntil(b'"b"')
            async with asyncio.timeout(5):
                while (await proxy.get(f"/v1/sessions/{session}")).json["limits"]["tokens"]["used"] != 10:
                    await asyncio.sleep(0.005)
        refused = await proxy.post("/chat/completions", ASK, x_magnitude_session="run")
        assert refused.error["param"] == "tokens_per_day"


async def refusals(proxy: Proxy) -> float:
    """Returns how many requests the server answered with 429."""
    text = (await proxy.get(f"{proxy.admin}/metrics")).body.decode()
    lines = (line for line in text.splitlines() if line.startswith("magnitude_requests_total") and '"429"' in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.mark.thorough
async def test_the_client_raises_a_typed_error_at_once(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, limited(tmp_path, stub, max_iterations=1) as proxy:
        async with MagnitudeClient(endpoint=proxy.url) as client:
            await client.generate_optimized(session_id="run", prompt="x")
            with pytest.raises(SessionLimitExceeded) as caught:
                await client.generate_optimized(session_id="run", prompt="x")
        assert (caught.value.status, caught.value.param) == (429, "max_iterations")
        assert await refusals(proxy) == 1


@pytest.mark.slow
async def test_sdks_do_not_repeat_what_a_session_may_not(tmp_path: Path) -> None:
    import anthropic
    import openai

    named = {"x-magnitude-session": "run", "x-magnitude-limits": "iterations=1"}
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        async with openai.AsyncOpenAI(base_url=proxy.url, api_key="any", max_retries=3, default_headers=named) as sdk:
            await sdk.chat.completions.create(model="m", messages=ASK["messages"])
            with pytest.raises(openai.RateLimitError) as refused:
                await sdk.chat.completions.create(model="m", messages=ASK["messages"])
            assert refused.value.code == "session_limit_exceeded"
            with pytest.raises(openai.RateLimitError):
                await sdk.responses.create(model="m", input="x")
        assert await refusals(proxy) == 2
        async with anthropic.AsyncAnthropic(
            base_url=proxy.origin, api_key="any", max_retries=3, default_headers=named
        ) as claude:
            with pytest.raises(anthropic.RateLimitError, match="max_iterations"):
                await claude.messages.create(model="m", max_tokens=5, messages=ASK["messages"])
        assert await refusals(proxy) == 3
