"""Coding agents' own command lines, headless and unmodified, in front of an upstream that plays two tool calls.

Each runs in a home and a folder of its own and is skipped by name where it is not on PATH (`npm install --global
@openai/codex @anthropic-ai/claude-code`). It must carry both calls out, finish, and stay one session.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from testkit.proxy import Proxy, proxy_config, proxying
from testkit.upstream import chunk, sse

pytestmark = pytest.mark.slow

LIMIT_S = 100
SHELLS = ("exec_command", "shell_command", "shell", "Bash")
CODEX = """
model = "stub-model"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{origin}/v1"
wire_api = "responses"
env_key = "KEY"
[analytics]
enabled = false
"""


@dataclass
class TwoCalls:
    """An upstream's chat: each conversation calls the shell twice, then says that all is done."""

    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Plays the next step of the conversation that is asked."""
        body = await request.json()
        self.bodies.append(body)
        results = sum(message["role"] == "tool" for message in body["messages"])
        shell = next((t["function"] for t in body.get("tools", ()) if t["function"]["name"] in SHELLS), None)
        said = [chunk("All done."), chunk(finish="stop")]
        if results < 2 and shell is not None:
            arguments = command(shell["parameters"]["properties"], f"echo step-{results}")
            name = {"name": shell["name"], "arguments": arguments[:5]}
            first = {"index": 0, "id": f"call_{results}", "type": "function", "function": name}
            rest = {"index": 0, "function": {"arguments": arguments[5:]}}
            calls = [chunk(tool_calls=[piece]) for piece in (first, rest)]
            said = [chunk("I look."), *calls, chunk(finish="tool_calls")]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sse(*said, "[DONE]"))
        return response

    @property
    def results(self) -> list[str]:
        """What the tools of the last conversation said."""
        return [str(m["content"]) for m in self.bodies[-1]["messages"] if m["role"] == "tool"]


def command(properties: dict[str, Any], line: str) -> str:
    """Returns the arguments that run `line` in a shell of any agent."""
    if "cmd" in properties:
        return json.dumps({"cmd": line})
    listed = properties["command"].get("type") == "array"
    given: dict[str, Any] = {"command": ["bash", "-lc", line] if listed else line}
    return json.dumps({**given, "description": "say it"} if "description" in properties else given)


@asynccontextmanager
async def two_calls(folder: Path) -> AsyncIterator[tuple[TwoCalls, Proxy]]:
    """Runs the upstream and a proxy in front of it."""
    upstream = TwoCalls()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/chat/completions", upstream.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with proxying(proxy_config(folder, url)) as proxy:
            yield upstream, proxy
    finally:
        await runner.cleanup()


async def run(home: Path, name: str, *arguments: str, **environment: str) -> str:
    """Runs an agent in its own home and returns what it said; fails unless it ended well, skips where it is not."""
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not on PATH")
    (home / "work").mkdir(parents=True)
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        cwd=home / "work",
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, said.decode()[-4000:]
    return said.decode()


async def check(proxy: Proxy, upstream: TwoCalls, said: str, source: str) -> None:
    """The agent saw both results and the last word, and its steps are one session, recognised by `source`."""
    assert "All done." in said
    first, second = upstream.results
    assert "step-0" in first
    assert "step-1" in second
    (session,) = (await proxy.get("/v1/sessions")).json["data"]
    assert (session["source"], session["failures"]) == (source, 0)
    assert session["steps"] >= 3


async def test_codex_speaks_responses(tmp_path: Path) -> None:
    async with two_calls(tmp_path) as (upstream, proxy):
        home = tmp_path / "home"
        (home / ".codex").mkdir(parents=True)
        (home / ".codex" / "config.toml").write_text(CODEX.format(origin=proxy.origin))
        options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        said = await run(home, "codex", *options, "Look twice.", KEY="any")
        await check(proxy, upstream, said, "codex")


async def test_claude_code_speaks_messages(tmp_path: Path) -> None:
    async with two_calls(tmp_path) as (upstream, proxy):
        quiet = {
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
        }
        options = ("-p", "Look twice.", "--model", "stub-model", "--allowedTools", "Bash")
        said = await run(
            tmp_path / "home", "claude", *options, ANTHROPIC_BASE_URL=proxy.origin, ANTHROPIC_API_KEY="any", **quiet
        )
        await check(proxy, upstream, said, "claude-code")
