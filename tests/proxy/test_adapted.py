"""Upstreams of each kind over real sockets: what they are sent, and what a client gets of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnitude_proxy.config import UpstreamConfig, UpstreamKind
from testkit.dialects import worker_and_upstream
from testkit.proxy import proxy_config, proxying, routing
from testkit.routes import ScriptedRoute, answer
from testkit.servers import SERVERS
from testkit.tenants import keyed
from testkit.upstream import OpenAIStub

SAY: dict[str, Any] = {"model": "stub-model", "messages": [{"role": "user", "content": "Hi"}]}


def stub(kind: UpstreamKind, **changes: Any) -> OpenAIStub:
    """Returns a server that answers as one of this kind."""
    return OpenAIStub(owner=SERVERS[kind].owner, pages=SERVERS[kind].pages, **changes)


async def test_tenants_are_kept_apart_and_sessions_are_named_by_ids_that_nobody_can_guess(tmp_path: Path) -> None:
    async with stub("vllm") as server, proxying(keyed(proxy_config(tmp_path, server.url), "a", "b")) as proxy:
        for tenant, session, extra in (("a", "s", {}), ("a", "t", {}), ("b", "s", {}), ("a", "s", {"cache_salt": "x"})):
            headers = {"authorization": f"Bearer key-{tenant}", "x_magnitude_session": session}
            assert (await proxy.post("/chat/completions", {**SAY, **extra}, **headers)).status == 200
    salts = [sent.body["cache_salt"] for sent in server.requests]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    names = [sent.headers["X-Session-ID"] for sent in server.requests]
    assert names[0] == names[3]
    assert len(set(names)) == 3
    secret = (tmp_path / "data" / "secret").read_text().strip()
    assert not any(told in (secret, "a", "b", "s", "t") for told in (*salts, *names))


@pytest.mark.thorough
async def test_a_session_keeps_its_slot_and_nobody_waits_for_a_busy_one(tmp_path: Path) -> None:
    server = stub("llamacpp", timings={"cache_n": 3, "prompt_n": 2})
    async with server as started, proxying(proxy_config(tmp_path, started.url)) as proxy:
        replies = [
            await proxy.post("/chat/completions", {**SAY, "stream": stream}, x_magnitude_session=session)
            for session, stream in (("s", False), ("t", True), ("s", True), ("t", False))
        ]
        server.delay_s = 0.2
        await asyncio.gather(*(proxy.post("/chat/completions", SAY, x_magnitude_session="s") for _ in range(2)))
    slots = [sent.body.get("id_slot") for sent in server.requests]
    assert slots[:4] == [0, 1, 0, 1]
    assert sorted(slots[4:], key=str) == [0, None]
    assert all(sent.body["cache_prompt"] is True for sent in server.requests)
    # The figures of the server's own form are passed on.
    assert replies[0].json["usage"]["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize(("shared", "cached"), [(False, False), (True, True)])
async def test_several_tenants_share_no_slots_cache_unless_the_operator_lets_them(
    tmp_path: Path, shared: bool, cached: bool
) -> None:
    async with stub("llamacpp") as server:
        config = proxy_config(tmp_path)
        upstreams = (UpstreamConfig(name="u0", url=server.url, shared_cache=shared),)
        config = keyed(msgspec.structs.replace(config, upstreams=upstreams), "a", "b")
        async with proxying(config) as proxy:
            await proxy.post("/chat/completions", SAY, authorization="Bearer key-a")
    assert server.requests[0].body["cache_prompt"] is cached


@pytest.mark.thorough
async def test_a_field_without_words_goes_to_the_server_that_has_them_or_is_a_400(tmp_path: Path) -> None:
    body = {**SAY, "guided_regex": "[ab]+"}
    async with stub("openai") as plain, stub("vllm") as able:
        async with proxying(proxy_config(tmp_path, plain.url, able.url)) as proxy:
            reply = await proxy.post("/chat/completions", body)
            assert reply.status == 200
            assert reply.header("x-magnitude-route") == "fallback:u1"
            assert reply.header("x-magnitude-fallback-reason") == "unsupported_feature"
        async with proxying(proxy_config(tmp_path, plain.url)) as proxy:
            refused = await proxy.post("/chat/completions", body)
            message = await proxy.post("/messages", {**SAY, "max_tokens": 9, "top_k": 5, "stream": True})
            response = await proxy.post("/responses", {"model": "stub-model", "input": "Hi", "stream": True})
    assert plain.requests[0].body["messages"] == [{"role": "user", "content": "Hi"}]
    assert len(plain.requests) == 1
    assert able.requests[0].body["structured_outputs"] == {"regex": "[ab]+"}
    assert refused.status == 400
    assert (refused.error["code"], refused.error["param"]) == ("unsupported_feature", "guided_regex")
    assert message.status == 400
    assert message.json["error"]["type"] == "invalid_request_error"
    assert "top_k" in message.json["error"]["message"]
    assert response.status == 200


async def test_a_server_that_was_replaced_is_recognised_anew(tmp_path: Path) -> None:
    async with stub("vllm") as server:
        port = int(server.url.split(":")[2].split("/")[0])
        async with proxying(proxy_config(tmp_path, server.url)) as proxy:
            await proxy.post("/chat/completions", SAY)
            assert "cache_salt" in server.requests[-1].body
            await server.__aexit__(None, None, None)
            assert (await proxy.post("/chat/completions", SAY)).status == 503
            async with stub("llamacpp", port=port) as other:
                await proxy.post("/chat/completions", SAY)
                assert "id_slot" in other.requests[-1].body


PRIORITIES: list[tuple[dict[str, Any], dict[str, str], int]] = [
    ({}, {}, 0),
    ({"priority": 7}, {}, 7),
    ({"priority": 7, "magnitude": {"priority": 3}}, {"x_magnitude_priority": "9"}, 3),
    ({}, {"x_magnitude_priority": "9", "x_vllm_priority": "2"}, 9),
    ({}, {"x_vllm_priority": "2"}, 2),
    ({"priority": -50}, {}, -10),
    ({"priority": 10**15}, {}, 100),
]


async def test_a_client_may_ask_for_a_priority_within_bounds(tmp_path: Path) -> None:
    async with stub("vllm") as server:
        config = msgspec.structs.replace(proxy_config(tmp_path, server.url), most_urgent=-10)
        async with proxying(config) as proxy:
            for body, headers, _ in PRIORITIES:
                assert (await proxy.post("/chat/completions", {**SAY, **body}, **headers)).status == 200
            await proxy.post("/responses", {"model": "stub-model", "input": "Hi", "magnitude": {"priority": 4}})
            await proxy.post("/messages", {**SAY, "max_tokens": 9}, x_magnitude_priority="5")
            await proxy.post("/completions", {"model": "stub-model", "prompt": ["a", "b"], "priority": 6})
            wrong = await proxy.post("/chat/completions", {**SAY, "priority": "high"})
            soon = await proxy.post("/chat/completions", SAY, x_vllm_priority="soon")
    wanted = [*(priority for _, _, priority in PRIORITIES), 4, 5, 6, 6]
    assert [sent.body.get("priority", 0) for sent in server.requests] == wanted
    assert (wrong.status, wrong.error["param"]) == (400, "priority")
    assert (soon.status, soon.error["param"]) == (400, "x-vllm-priority")


async def test_the_worker_is_told_the_priority_too(tmp_path: Path) -> None:
    route = ScriptedRoute("local", [answer()])
    async with routing(worker_and_upstream(tmp_path), route) as proxy:
        await proxy.post("/chat/completions", {**SAY, "model": "magnitude", "priority": 7})
    assert route.seen[0].request.priority == 7
