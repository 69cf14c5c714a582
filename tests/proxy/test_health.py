"""What the proxy says of itself: live, ready, the summary, the models, the metrics."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from magnitude_engine import api
from magnitude_engine.client.health import RuntimeHealth
from magnitude_proxy.config import DeadlineConfig, ListenConfig, ProxyConfig, RetryConfig, UpstreamConfig, WorkerConfig
from magnitude_proxy.keyfile import parse_key_file
from testkit import wire
from testkit.proxy import ASK, Proxy, proxy_config, proxying, routing
from testkit.routes import ScriptedRoute, answer, failed
from testkit.scripted_worker import REPORT, ScriptedWorker
from testkit.upstream import OpenAIStub, refusing_url


async def ready_within(proxy: Proxy, seconds: float = 5) -> None:
    async with asyncio.timeout(seconds):
        while (await proxy.get("/health/ready")).status != 200:
            await asyncio.sleep(0.01)


def attached(folder: Path, worker: ScriptedWorker, hang_s: float = 20) -> ProxyConfig:
    return proxy_config(
        folder,
        worker=WorkerConfig(mode="attach", socket=str(worker.socket), hang_s=hang_s),
        deadlines=DeadlineConfig(worker_start_s=0.2),
    )


@pytest.mark.thorough
async def test_a_worker_makes_the_proxy_ready_and_its_end_unready(tmp_path: Path) -> None:
    worker = ScriptedWorker(tmp_path / "w.sock")
    async with proxying(attached(tmp_path, worker)) as proxy:
        assert (await proxy.get("/health/live")).status == 200
        starting = await proxy.get("/health")
        assert (starting.status, starting.json["status"]) == (503, "starting")
        assert wire.check_error({"error": starting.json["error"]})["code"] == "starting"
        assert (await proxy.get("/health/ready")).status == 503
        waiting = await proxy.post("/chat/completions", {**ASK, "model": "magnitude"})
        assert waiting.status == 503
        assert waiting.error["code"]
        assert waiting.header("x-magnitude-route") is None
        await worker.start()
        await ready_within(proxy)
        health = await proxy.get("/health")
        assert (health.status, health.json["status"]) == (200, "ok")
        assert health.json["model"] == health.json["card"]["name"] == "scripted"
        assert health.json["worker"]["state"] == "ready"
        await worker.close()
        async with asyncio.timeout(5):
            while (await proxy.get("/health/ready")).status != 503:
                await asyncio.sleep(0.01)
        assert (await proxy.get("/health/live")).status == 200


@pytest.mark.thorough
async def test_a_worker_that_stands_still_is_not_ready(tmp_path: Path) -> None:
    worker = ScriptedWorker(tmp_path / "w.sock")
    await worker.start()
    async with proxying(attached(tmp_path, worker, hang_s=0.3)) as proxy:
        await ready_within(proxy)
        stuck = asyncio.create_task(proxy.post("/completions", {"prompt": "stick"}))
        async with asyncio.timeout(5):
            while (await proxy.get("/health/ready")).status != 503:
                await asyncio.sleep(0.01)
        stuck.cancel()
        await asyncio.wait({stuck})
    await worker.close()


async def test_an_upstream_alone_makes_the_proxy_ready_until_its_breaker_opens(tmp_path: Path) -> None:
    async with refusing_url() as url:
        config = proxy_config(tmp_path, url, retry=RetryConfig(breaker_failures=1))
        async with proxying(config) as proxy:
            assert (await proxy.get("/health/ready")).status == 200
            assert (await proxy.post("/chat/completions", ASK)).status == 503
            assert (await proxy.get("/health/ready")).status == 503
            health = (await proxy.get("/health")).json
            assert health["status"] == "unavailable"
            assert health["upstreams"] == {"u0": "held back"}
            assert any("u0" in warning for warning in health["warnings"])


async def test_health_fits_the_published_client(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        health = msgspec.json.decode((await proxy.get("/health")).body, type=RuntimeHealth)
        assert health == RuntimeHealth(status="ok", cache="none", store="memory")


async def test_models_come_from_worker_maps_and_open_upstreams(tmp_path: Path) -> None:
    worker = ScriptedWorker(tmp_path / "w.sock")
    await worker.start()
    async with OpenAIStub() as stub, refusing_url() as nowhere:
        upstreams = (
            UpstreamConfig(name="open", url=stub.url),
            UpstreamConfig(name="mapped", url=stub.url, models={"big": "big-1", "*": "small-1"}),
            UpstreamConfig(name="away", url=nowhere),
        )
        async with proxying(msgspec.structs.replace(attached(tmp_path, worker), upstreams=upstreams)) as proxy:
            await ready_within(proxy)
            async with asyncio.timeout(5):
                while (await proxy.get("/health")).json["model"] is None:
                    await asyncio.sleep(0.01)
            listed = (await proxy.get("/v1/models")).json
            wire.check("ListModelsResponse", listed)
            assert [(m["id"], m["owned_by"]) for m in listed["data"]] == [
                ("scripted", "magnitude"),
                ("stub-model", "open"),
                ("big", "mapped"),
            ]
            assert (await proxy.get("/v1/models/big")).json["id"] == "big"
            assert (await proxy.get("/v1/models/smollm2")).json["owned_by"] == "magnitude"
            missing = await proxy.get("/v1/models/org/none")
            assert (missing.status, missing.error["code"]) == (404, "model_not_found")
    await worker.close()


@pytest.mark.parametrize(
    ("host", "open_paths", "closed_paths"),
    [
        ("127.0.0.1", ("/health/live", "/health/ready", "/metrics"), ()),
        ("0.0.0.0", ("/health/live", "/health/ready"), ("/metrics",)),
    ],
)
async def test_the_second_listener(
    tmp_path: Path, host: str, open_paths: tuple[str, ...], closed_paths: tuple[str, ...]
) -> None:
    config = proxy_config(
        tmp_path,
        "http://127.0.0.1:9/v1",
        keys=parse_key_file("sk-one alice", "keys"),
        listen=ListenConfig(port=0, admin_port=0, admin_host=host),
    )
    async with routing(config, ScriptedRoute("u0", [answer()])) as proxy:
        for path in open_paths:
            assert (await proxy.get(f"{proxy.admin}{path}")).status == 200
        for path in closed_paths:
            assert (await proxy.get(f"{proxy.admin}{path}")).status == 401
            assert (await proxy.get(f"{proxy.admin}{path}", authorization="Bearer sk-one")).status == 200
        assert (await proxy.get(f"{proxy.admin}/v1/models", authorization="Bearer sk-one")).status == 404
        metrics = await proxy.get(f"{proxy.admin}/metrics", authorization="Bearer sk-one")
        assert str(metrics.header("content-type")).startswith("text/plain; version=0.0.4")


async def test_the_second_listener_says_what_the_workers_cache_holds(tmp_path: Path) -> None:
    worker = ScriptedWorker(tmp_path / "w.sock")
    async with proxying(attached(tmp_path, worker)) as proxy:
        away = await proxy.get(f"{proxy.admin}/cache")
        assert (away.status, away.error["code"]) == (503, "worker_lost")
        await worker.start()
        await ready_within(proxy)
        reply = await proxy.get(f"{proxy.admin}/cache")
        assert (reply.status, reply.header("content-type")) == (200, "application/json")
        assert msgspec.json.decode(reply.body, type=api.CacheReport) == REPORT
        assert (await proxy.get("/cache")).status == 404
    await worker.close()


async def test_the_cache_is_told_only_to_those_with_a_key_and_only_by_a_worker(tmp_path: Path) -> None:
    config = proxy_config(
        tmp_path,
        "http://127.0.0.1:9/v1",
        keys=parse_key_file("sk-one alice", "keys"),
        listen=ListenConfig(port=0, admin_port=0, admin_host="0.0.0.0"),
    )
    async with proxying(config) as proxy:
        assert (await proxy.get(f"{proxy.admin}/cache")).status == 401
        none = await proxy.get(f"{proxy.admin}/cache", authorization="Bearer sk-one")
        assert (none.status, none.error["code"]) == (404, "no_worker")


async def test_metrics_count_tokens_by_route(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url)) as proxy:
        for stream in (False, True):
            assert (await proxy.post("/chat/completions", {**ASK, "stream": stream})).status == 200
        text = (await proxy.get(f"{proxy.admin}/metrics")).body.decode()
    for line in (
        'magnitude_prompt_tokens_total{route="upstream:u0"} 10.0',
        'magnitude_cached_tokens_total{route="upstream:u0"} 4.0',
        'magnitude_completion_tokens_total{route="upstream:u0"} 6.0',
        'magnitude_first_token_seconds_count{route="upstream:u0"} 2.0',
    ):
        assert line in text


async def test_a_refused_answer_counts_no_tokens(tmp_path: Path) -> None:
    config = proxy_config(tmp_path, worker=WorkerConfig(mode="attach", socket="unused"))
    route = ScriptedRoute("local", [[failed("invalid_value", retryable=False)]])
    async with routing(config, route) as proxy:
        assert (await proxy.post("/chat/completions", {**ASK, "model": "magnitude"})).status == 400
        text = (await proxy.get(f"{proxy.admin}/metrics")).body.decode()
    assert 'magnitude_completion_tokens_total{route="local"} 0.0' in text


async def test_an_upstream_that_fails_is_named_before_its_breaker_opens(tmp_path: Path) -> None:
    async with refusing_url() as url, proxying(proxy_config(tmp_path, url)) as proxy:
        assert (await proxy.get("/health")).json["upstreams"] == {"u0": "ok"}
        assert (await proxy.post("/chat/completions", ASK)).status == 503
        health = (await proxy.get("/health")).json
        assert health["upstreams"] == {"u0": "failing"}
        assert health["status"] == "degraded"
