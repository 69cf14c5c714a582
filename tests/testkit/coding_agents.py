"""An upstream that plays a coding agent's session, and how agents' own command lines are run against it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from magnitude_proxy.identity import Identity, IdentityHints
from magnitude_proxy.limits import Terms
from magnitude_proxy.session import Lease, Sessions
from testkit.loopback import leading_to, unshare
from testkit.proxy import Proxy, proxy_config, proxying
from testkit.upstream import chunk, sse

LIMIT_S = 100
TASK = "Look twice."
SUB_TASK = "Look as a sub-agent."
SHELLS = ("exec_command", "shell_command", "shell", "Bash", "bash", "run_shell_command", "terminal")
# Tools that start a sub-agent, and of which kind.
DELEGATES = {"multi_agent_v1__spawn_agent": "", "Agent": "general-purpose", "task": "general"}
WAIT = "multi_agent_v1__wait_agent"
EDIT = "note.txt\n```\n<<<<<<< SEARCH\n=======\na line\n>>>>>>> REPLACE\n```\nAll done."


@dataclass
class Played:
    """A server of chats: each conversation calls the shell twice, then a sub-agent where there are any, then ends.

    Requests without tools get an edit that adds a line to `note.txt` where they ask for edits, else a title.

    Attributes:
        bodies: what was asked.
        last: what the shell is called for in the end, by agents that end by that.
    """

    bodies: list[dict[str, Any]] = field(default_factory=list)
    last: str | None = None

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Plays the next step of the conversation that is asked."""
        body = await request.json()
        self.bodies.append(body)
        if not body.get("stream"):
            return web.json_response(_whole(_next(body, self.last)))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(sse(*_next(body, self.last), "[DONE]"))
        return response

    @property
    def steps(self) -> list[dict[str, Any]]:
        """What was asked but for titles and the like."""
        return [body for body in self.bodies if body.get("tools") or "SEARCH" in str(body["messages"])]

    @property
    def results(self) -> list[str]:
        """What the tools of the last conversation said, and its user."""
        return [str(m["content"]) for m in self.steps[-1]["messages"] if m["role"] in ("tool", "user")]


def _next(body: dict[str, Any], last: str | None) -> list[dict[str, Any]]:
    """Returns the chunks of the next answer."""
    messages = body["messages"]
    tools = {tool["function"]["name"]: tool["function"] for tool in body.get("tools", ())}
    results = [message for message in messages if message["role"] == "tool"]
    shell = next((tools[name] for name in SHELLS if name in tools), None)
    if any(SUB_TASK in str(message["content"]) for message in messages if message["role"] == "user"):
        return _said("The sub-agent has looked.")
    if shell is None:
        return _said(EDIT if "SEARCH" in str(messages) else "A title")
    number = len(results)
    line = f"echo step-{number}" if number < 2 else last
    if line is not None:
        return _called(number, shell["name"], _command(shell["parameters"]["properties"], line))
    delegate = next((name for name in DELEGATES if name in tools), None)
    if len(results) == 2 and delegate is not None:
        return _called(2, delegate, _delegation(DELEGATES[delegate]))
    if len(results) == 3 and WAIT in tools:
        child = json.loads(results[2]["content"])["agent_id"]
        return _called(3, WAIT, {"targets": [child], "timeout_ms": 20_000})
    return _said("All done.")


def _whole(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns chunks as an answer that is not streamed."""
    choices = [choice for piece in chunks for choice in piece["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        arguments = "".join(call["function"]["arguments"] for call in calls)
        message["tool_calls"] = [{**calls[0], "function": {**calls[0]["function"], "arguments": arguments}}]
    last = {"index": 0, "message": message, "finish_reason": choices[-1]["finish_reason"]}
    return {**chunks[0], "object": "chat.completion", "choices": [last]}


def _said(text: str) -> list[dict[str, Any]]:
    return [chunk(text), chunk(finish="stop")]


def _called(number: int, name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a call as it comes in pieces."""
    text = json.dumps(arguments)
    first = {"index": 0, "id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": text[:5]}}
    rest = {"index": 0, "function": {"arguments": text[5:]}}
    return [chunk("I look."), *(chunk(tool_calls=[piece]) for piece in (first, rest)), chunk(finish="tool_calls")]


def _command(properties: dict[str, Any], line: str) -> dict[str, Any]:
    """Returns the arguments that run `line` in a shell of any agent."""
    if "cmd" in properties:
        return {"cmd": line}
    listed = properties["command"].get("type") == "array"
    given: dict[str, Any] = {"command": ["bash", "-lc", line] if listed else line}
    told = {"description": "say it", "is_background": False}
    return given | {name: value for name, value in told.items() if name in properties}


def _delegation(kind: str) -> dict[str, Any]:
    """Returns the arguments that start a sub-agent."""
    return {"description": "look", "prompt": SUB_TASK, "subagent_type": kind} if kind else {"message": SUB_TASK}


def noted(sessions: Sessions) -> list[Identity]:
    """Returns the identities of the requests that come from now on."""
    enter, found = sessions.enter, list[Identity]()

    async def entered(tenant: str, headers: Mapping[str, str], hints: IdentityHints, terms: Terms) -> Lease:
        lease = await enter(tenant, headers, hints, terms)
        found.append(lease.identity)
        return lease

    sessions.enter = entered  # type: ignore[method-assign]
    return found


@dataclass(frozen=True)
class Stage:
    """The upstream, the proxy in front of it, and where an agent works.

    Attributes:
        seen: whom the requests belonged to.
        command: what gives an agent no way but to the proxy.
    """

    upstream: Played
    proxy: Proxy
    seen: list[Identity]
    home: Path
    command: Sequence[str]

    @property
    def work(self) -> Path:
        """The agent's folder."""
        return self.home / "work"

    def write(self, path: str, text: str) -> None:
        """Writes a file of the agent's home."""
        target = self.home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    async def run(self, *arguments: str | Path, **environment: str) -> str:
        """Runs an agent and returns what it said; fails unless it ended well."""
        process = await asyncio.create_subprocess_exec(
            *self.command,
            *map(str, arguments),
            cwd=self.work,
            env={"PATH": os.environ["PATH"], "HOME": str(self.home), "TERM": "dumb", **environment},
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

    async def check(self, said: str, source: str, *, sub_agent: bool = False) -> None:
        """The agent got both results, ended, and is one session recognised by `source`, its sub-agent a branch."""
        assert "All done." in said
        results = "\n".join(self.upstream.results)
        assert results.index("step-0") < results.index("step-1")
        (session,) = (await self.proxy.get("/v1/sessions")).json["data"]
        assert (session["source"], session["failures"]) == (source, 0)
        assert session["steps"] == len(self.upstream.steps) >= 3
        branches = {identity.branch for identity in self.seen if not identity.aside}
        assert len(branches) == (2 if sub_agent else 1), branches
        assert len({(identity.session, identity.run) for identity in self.seen}) == 1


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[Stage]:
    """Sets a stage; skips where programs cannot be given networks of their own."""
    if unshare() is None:
        pytest.skip("programs cannot be given networks of their own here (unshare --net)")
    upstream = Played()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_post("/v1/chat/completions", upstream.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    home = folder / "home"
    (home / "work").mkdir(parents=True)
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        async with proxying(proxy_config(folder, url)) as proxy:
            seen = noted(proxy.running.surface.sessions)
            async with leading_to(proxy.running.bound.port, folder) as command:
                yield Stage(upstream, proxy, seen, home, command)
    finally:
        await runner.cleanup()
