"""A whole running product with upstreams that answer, refuse, stall, reset or lie."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from testkit.model import smollm2_path
from testkit.serve import Server, lend_model, serving
from testkit.upstream import (
    HANG,
    RESET,
    STREAM_HEAD,
    OpenAIStub,
    Script,
    ScriptedServer,
    chunk,
    head,
    refusing_url,
    sse,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
BEGUN = sse(chunk("Par"))


def sdk(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.base_url, api_key="any", max_retries=0, timeout=60)


async def streamed(client: openai.AsyncOpenAI, seen: list[str] | None = None) -> str:
    """Returns the text of a stream; its pieces are added to `seen` as they come."""
    pieces = seen if seen is not None else []
    stream = await client.chat.completions.create(model="any-model", messages=QUESTION, stream=True, max_tokens=64)
    async for part in stream:
        pieces += [c.delta.content for c in part.choices if c.delta.content]
    return "".join(pieces)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([RESET], id="reset at once"),
        pytest.param([head(503, length=0)], id="503"),
        pytest.param([STREAM_HEAD], id="empty stream"),
        pytest.param([STREAM_HEAD, b"data: {broken\n\n"], id="broken JSON"),
        pytest.param([STREAM_HEAD, b"data: \xff\xfe\n\n"], id="broken UTF-8"),
        pytest.param([STREAM_HEAD, sse({"error": {"message": "inside", "type": "server_error"}})], id="error in a 200"),
        pytest.param([HANG], id="never answers"),
    ],
)
async def test_a_failing_upstream_is_left_for_the_next(tmp_path: Path, script: Script) -> None:
    async with ScriptedServer([script]) as bad, OpenAIStub(text="Paris it is") as good:
        config = tmp_path / "magnitude.toml"
        config.write_text(
            f'[[upstreams]]\nname = "bad"\nurl = "{bad.url}"\nfirst_token_s = 1.0\n'
            f'[[upstreams]]\nname = "good"\nurl = "{good.url}"\n'
        )
        with serving(tmp_path, "--no-worker", "--config", str(config), wait=False) as server:
            await asyncio.to_thread(server.wait_ready)
            async with sdk(server) as client:
                assert await streamed(client) == "Paris it is"
                raw = await client.chat.completions.with_raw_response.create(model="x", messages=QUESTION)
                assert raw.headers["x-magnitude-route"] == "fallback:good"


@pytest.mark.parametrize(
    "script",
    [
        pytest.param([STREAM_HEAD, BEGUN, RESET], id="reset"),
        pytest.param([STREAM_HEAD, BEGUN], id="end without finish"),
        pytest.param([STREAM_HEAD, BEGUN, b"data: {broken\n\n"], id="broken JSON"),
        pytest.param([STREAM_HEAD, BEGUN, HANG], id="silence"),
    ],
)
async def test_a_stream_broken_after_content_ends_with_one_typed_error(tmp_path: Path, script: Script) -> None:
    async with ScriptedServer([script]) as bad, OpenAIStub() as good:
        config = tmp_path / "magnitude.toml"
        config.write_text(
            f'[[upstreams]]\nname = "bad"\nurl = "{bad.url}"\nidle_s = 1.0\n'
            f'[[upstreams]]\nname = "good"\nurl = "{good.url}"\n'
        )
        with serving(tmp_path, "--no-worker", "--config", str(config), wait=False) as server:
            await asyncio.to_thread(server.wait_ready)
            async with sdk(server) as client:
                seen: list[str] = []
                with pytest.raises(openai.APIError) as caught:
                    await streamed(client, seen=seen)
                # What came in one piece with the failure may be withheld for a clean HTTP error.
                assert seen in (["Par"], [])
                assert caught.value.code
                assert good.requests == []


async def test_a_refusing_upstream_alone_gives_a_typed_error(tmp_path: Path) -> None:
    async with refusing_url() as url:
        with serving(tmp_path, "--no-worker", "--upstream", url, wait=False) as server:
            await asyncio.to_thread(_listening, server)
            async with sdk(server) as client:
                with pytest.raises(openai.InternalServerError) as caught:
                    await client.chat.completions.create(model="any-model", messages=QUESTION)
                assert caught.value.status_code == 503
                assert caught.value.code


async def test_an_upstream_takes_over_when_the_worker_dies_and_hands_back(tmp_path: Path) -> None:
    lend_model(tmp_path / "data", smollm2_path())
    async with OpenAIStub(text="from the upstream") as stub:
        with serving(tmp_path, "--upstream", f"backup={stub.url}", wait=False) as server:
            await asyncio.to_thread(server.wait_ready)
            await _routes(server, ["local"])
            os.kill(server.child("magnitude_engine.main"), signal.SIGKILL)
            assert await _routes(server, ["fallback:backup"]) == "fallback:backup"
            for _ in range(300):
                if await _routes(server, ["local", "fallback:backup"]) == "local":
                    return
                await asyncio.sleep(0.2)
            pytest.fail("the worker did not take over again")


async def test_what_the_worker_cannot_do_goes_to_the_upstream(tmp_path: Path) -> None:
    lend_model(tmp_path / "data", smollm2_path())
    long: Any = [{"role": "user", "content": "word " * 9000}]
    async with OpenAIStub(text="long answer") as stub:
        with serving(tmp_path, "--upstream", f"big={stub.url}", wait=False) as server:
            await asyncio.to_thread(server.wait_ready)
            await _routes(server, ["local"])
            async with sdk(server) as client:
                raw = await client.chat.completions.with_raw_response.create(model="smollm2", messages=long)
                assert raw.parse().choices[0].message.content == "long answer"
                assert raw.headers["x-magnitude-fallback-reason"] == "context_length_exceeded"


def _listening(server: Server) -> None:
    for _ in range(200):
        with contextlib.suppress(httpx.TransportError):
            server.health()
            return
        time.sleep(0.1)


async def _routes(server: Server, allowed: Sequence[str]) -> str:
    """Asks once the worker may answer and returns the route that did, one of `allowed`."""
    async with sdk(server) as client:
        for _ in range(300):
            raw = await client.chat.completions.with_raw_response.create(
                model="smollm2", messages=QUESTION, max_tokens=4
            )
            if raw.headers["x-magnitude-route"] in allowed:
                return str(raw.headers["x-magnitude-route"])
            await asyncio.sleep(0.2)
    raise AssertionError(f"no answer from {allowed}")
