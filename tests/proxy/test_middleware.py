"""Access, limits and errors on real sockets: whatever comes in, the answer is OpenAI's form and the next one works."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from magnitude_proxy.config import ListenConfig
from magnitude_proxy.keyfile import parse_key_file
from magnitude_proxy.telemetry import access_log
from testkit.proxy import ASK, Proxy, proxy_config, proxying, routing
from testkit.routes import ScriptedRoute, answer
from testkit.upstream import OpenAIStub

LIMIT = 64 * 1024
KEYS = parse_key_file("sk-one alice\nsk-two bob\n", "keys")


@asynccontextmanager
async def small(folder: Path, **changes: Any) -> AsyncIterator[Proxy]:
    """Runs a proxy over one scripted upstream with a small body limit."""
    config = proxy_config(folder, "http://127.0.0.1:9/v1", **changes)
    listen = msgspec.structs.replace(config.listen, max_body_bytes=LIMIT)
    async with routing(msgspec.structs.replace(config, listen=listen), ScriptedRoute("u0", [answer("hi")])) as proxy:
        yield proxy


def request(body: bytes, *headers: str, length: int | None = None) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    if length != -1:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


GOOD = json.dumps(ASK).encode()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (request(b'{"messages": "\xff"}'), 400),
        (request(b"[" * 60_000), 400),
        (request(b'{"a":' * 12_000), 400),
        (request(b'{"temperature": NaN, "messages": [{"role": "user", "content": "x"}]}'), 400),
        (request(b'{"messages": [{"role": "user", "content": "\\ud800"}]}'), 400),
        (request(b""), 400),
        (request(b"\x00" * 100), 400),
        (request(GOOD, "Content-Encoding: gzip"), 400),
        (request(b"x" * (LIMIT + 1)), 413),
        (request(b"", length=10**12), 413),
        (request(b"5\r\nhello\r\nXX\r\n", "Transfer-Encoding: chunked", length=-1), 400),
        (
            request(b"10000\r\n" + b"x" * 65536 + b"\r\n1\r\nx\r\n0\r\n\r\n", "Transfer-Encoding: chunked", length=-1),
            413,
        ),
        (request(GOOD, "X-Bomb: " + "b" * 100_000), 400),
        (request(GOOD, *[f"X-{i}: y" for i in range(500)]), 400),
        (request(GOOD, "Content-Length: 5"), 400),
        (request(GOOD, "Bad Header: x"), 400),
        (b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n", 400),
        (b"NONSENSE\r\n\r\n", 400),
    ],
    ids=lambda value: None if isinstance(value, bytes) else str(value),
)
async def test_bad_input_gets_an_error_and_the_next_request_works(tmp_path: Path, data: bytes, status: int) -> None:
    async with small(tmp_path) as proxy:
        reply = await proxy.raw(data)
        assert reply.status == status
        assert reply.error["type"] == "invalid_request_error"
        assert reply.header("server") == "magnitude"
        good = await proxy.raw(request(GOOD))
        assert good.status == 200
        assert good.json["choices"][0]["message"]["content"] == "hi"


async def test_a_body_that_ends_early_does_not_hang_or_harm(tmp_path: Path) -> None:
    async with small(tmp_path) as proxy:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await proxy.raw(request(b'{"mess', length=500), end=True)
        assert (await proxy.post("/chat/completions", ASK)).status == 200


async def test_unknown_routes_and_methods(tmp_path: Path) -> None:
    async with small(tmp_path) as proxy:
        missing = await proxy.get("/v1/nothing")
        assert (missing.status, missing.error["code"]) == (404, "not_found")
        wrong = await proxy.get("/v1/chat/completions")
        assert (wrong.status, wrong.header("allow")) == (405, "POST")
        assert "POST" in wrong.error["message"]
        assert (await proxy.get("/metrics")).status == 404


async def test_every_route_but_live_needs_the_key(tmp_path: Path) -> None:
    async with small(tmp_path, keys=KEYS) as proxy:
        assert (await proxy.get("/health/live")).status == 200
        for path in ("/health", "/health/ready", "/v1/models", "/v1/models/x", "/v1/nothing"):
            reply = await proxy.get(path)
            assert (reply.status, reply.error["code"]) == (401, "invalid_api_key"), path
        for path in ("/chat/completions", "/completions"):
            assert (await proxy.post(path, ASK)).status == 401
            assert (await proxy.post(path, ASK, authorization="Bearer sk-on")).status == 401
            assert (await proxy.post(path, ASK, authorization="Basic sk-one")).status == 401
        assert (await proxy.get("/health", authorization="bearer sk-two")).status == 200
        assert (await proxy.get("/health", x_api_key="sk-two")).status == 200


async def test_tenants_get_different_salts_and_sessions(tmp_path: Path) -> None:
    config = proxy_config(tmp_path, "http://127.0.0.1:9/v1", keys=KEYS)
    route = ScriptedRoute("u0", [answer("hi")])
    async with routing(config, route) as proxy:
        for key in ("sk-one", "sk-two", "sk-one"):
            named = {"authorization": f"Bearer {key}", "x-magnitude-session": "same"}
            assert (await proxy.post("/chat/completions", ASK, **named)).status == 200
    tenants = [step.request.tenant for step in route.seen]
    sessions = [step.request.session for step in route.seen]
    assert tenants[0] == tenants[2] != tenants[1]
    assert sessions[0] == sessions[2] != sessions[1]
    assert len(tenants[0]) == 64


async def test_without_keys_any_key_is_accepted_and_none_too(tmp_path: Path) -> None:
    async with small(tmp_path) as proxy:
        assert (await proxy.post("/chat/completions", ASK, authorization="Bearer whatever")).status == 200
        assert (await proxy.post("/chat/completions", ASK)).status == 200


@pytest.mark.parametrize(
    ("header", "value", "code"),
    [
        ("host", "evil.example", "host_not_allowed"),
        ("host", "evil.example:8000", "host_not_allowed"),
        ("origin", "https://evil.example", "origin_not_allowed"),
        ("origin", "null", "origin_not_allowed"),
    ],
)
async def test_web_pages_elsewhere_cannot_reach_a_loopback_server(
    tmp_path: Path, header: str, value: str, code: str
) -> None:
    async with small(tmp_path) as proxy:
        reply = await proxy.post("/chat/completions", ASK, **{header: value})
        assert (reply.status, reply.error["code"]) == (403, code)
        assert (await proxy.get(f"{proxy.admin}/metrics", **{header: value})).status == 403
        assert (await proxy.post("/chat/completions", ASK, origin="http://localhost:3000")).status == 200


async def test_other_hosts_are_served_on_a_public_address(tmp_path: Path) -> None:
    config = proxy_config(
        tmp_path, "http://127.0.0.1:9/v1", listen=ListenConfig(host="0.0.0.0", port=0, admin_port=0), insecure=True
    )
    async with routing(config, ScriptedRoute("u0", [answer()])) as proxy:
        assert (await proxy.post("/chat/completions", ASK, host="agents.example")).status == 200


async def test_sane_request_ids_are_kept_and_others_replaced(tmp_path: Path) -> None:
    async with small(tmp_path) as proxy:
        kept = await proxy.post("/chat/completions", ASK, x_request_id="trace-1.2:3")
        assert kept.header("x-request-id") == "trace-1.2:3"
        for given in ("a b", "x" * 200, "ü"):
            made = await proxy.get("/health", x_request_id=given)
            assert str(made.header("x-request-id")).startswith("req_")
        failed = await proxy.get("/v1/nothing", x_request_id="trace-2")
        assert failed.header("x-request-id") == "trace-2"


async def test_metrics_and_one_log_line_per_request_without_content(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "the-secret-prompt"
    body = {**ASK, "messages": [{"role": "user", "content": secret}]}
    with caplog.at_level(logging.DEBUG):
        async with small(tmp_path, keys=KEYS) as proxy:
            assert (await proxy.post("/chat/completions", body, authorization="Bearer sk-one")).status == 200
            assert (await proxy.post("/chat/completions", body, authorization="Bearer sk-bad")).status == 401
            await proxy.get("/v1/%0d%0anothing")
            text = (await proxy.get(f"{proxy.admin}/metrics")).body.decode()
    assert 'magnitude_requests_total{endpoint="/v1/chat/completions",route="upstream:u0",status="200"} 1.0' in text
    assert 'endpoint="/v1/chat/completions",route="none",status="401"' in text
    lines = [record.getMessage() for record in caplog.records if record.name == access_log.name]
    assert len([line for line in lines if line.startswith("POST /v1/chat/completions")]) == 2
    assert all("\n" not in line for line in lines)
    logged = "\n".join(record.getMessage() for record in caplog.records)
    for word in (secret, "sk-one", "sk-bad"):
        assert word not in logged
        assert word not in text


async def test_a_failure_inside_the_proxy_is_a_500_with_an_id(tmp_path: Path) -> None:
    async with small(tmp_path) as proxy:
        surface = proxy.running.surface

        async def broken(_: object) -> None:
            raise RuntimeError("internal detail")

        surface.sessions.open = broken  # type: ignore[method-assign, assignment]
        reply = await proxy.post("/chat/completions", ASK, x_request_id="r-9")
    assert (reply.status, reply.error["code"]) == (500, "internal_error")
    assert "r-9" in reply.error["message"]
    assert "internal detail" not in reply.body.decode()


async def test_the_client_key_never_reaches_an_upstream(tmp_path: Path) -> None:
    async with OpenAIStub() as stub, proxying(proxy_config(tmp_path, stub.url, keys=KEYS)) as proxy:
        reply = await proxy.post("/chat/completions", ASK, authorization="Bearer sk-one", cookie="a=b")
        assert reply.status == 200
        sent = {name.lower(): value for name, value in stub.requests[0].headers.items()}
        assert "authorization" not in sent
        assert "cookie" not in sent
