"""Requests as coding agents send them: recorded conversations under the headers and in the form of each client.

The headers are those that the clients' own command lines send (Codex 0.171, OpenCode 1.18) or are documented to send,
as far as they say who they are; ids are drawn anew.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from magnitude_proxy.bench.recorded import Message, Trace


class Turn(NamedTuple):
    """One request.

    Attributes:
        session: whose it truly is, a name of the test's own; `branch` the sub-agent of it.
        aside: it is no step of its session.
    """

    session: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    branch: str = "main"
    aside: bool = False


@dataclass(frozen=True)
class Run:
    """One run of one agent: a trace, ids from `rng`, and a name."""

    name: str
    trace: Trace
    rng: random.Random
    id: str = field(default="", init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", self.new_id())

    def new_id(self) -> str:
        """Returns a UUID."""
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def histories(self) -> Iterator[tuple[Message, ...]]:
        """Yields the messages before each of the assistant's."""
        ends = [at for at, m in enumerate(self.trace.messages) if m.role == "assistant" and at]
        for at in ends:
            yield self.trace.messages[:at]

    def compacted(self) -> Iterator[tuple[Message, ...]]:
        """Yields the same, but from the middle on a summary stands for all that was before it."""
        histories = list(self.histories())
        middle = histories[len(histories) // 2]
        summary = Message(role="user", content=f"Summary of {len(middle)} messages: {self.name} was at work.")
        for history in histories:
            late = len(history) > len(middle)
            yield (*self.instructions, summary, *history[len(middle) :]) if late else history

    @property
    def instructions(self) -> tuple[Message, ...]:
        """The messages before the user's first."""
        first = next(n for n, m in enumerate(self.trace.messages) if m.role not in ("system", "developer"))
        return self.trace.messages[:first]

    def chat(self, messages: Sequence[Message], **more: Any) -> dict[str, Any]:
        """Returns a body of Chat Completions."""
        body = {"model": "stub-model", "messages": msgspec.to_builtins(tuple(messages)), **more}
        return body | ({"tools": msgspec.to_builtins(self.trace.tools)} if self.trace.tools else {})


Shape = Callable[[Run], Iterator[Turn]]


def claude_code(run: Run) -> Iterator[Turn]:
    """Claude Code: sub-agents by name, a title and a compaction beside the conversation, hint headers."""
    base = {
        "x-claude-code-session-id": run.id,
        "anthropic-version": "2023-06-01",
        "user-agent": "claude-cli/2.1.280 (external, cli)",
        "x-app": "cli",
    }
    told = "x-claude-code-request-class"
    title = [Message(role="user", content="Write a title of five words.")]
    yield _messages(run, base | {told: "auxiliary"}, title, branch="auxiliary", aside=True)
    for number, history in enumerate(run.compacted()):
        if number % 3 == 2:
            agent = {
                "x-claude-code-agent-id": f"agent-{number}",
                told: "subagent",
                "x-claude-code-agent-type": "Explore",
            }
            alone = [Message(role="user", content=f"Look for number {number} of {run.name}.")]
            yield _messages(run, base | agent, alone, branch=f"agent-{number}")
        hints = {told: "main", "x-claude-code-prev-tool-durations": f"Bash={number * 10};Read=9"}
        yield _messages(run, base | hints, history)
    yield _messages(run, base | {told: "compaction", "x-claude-code-compaction": "auto"}, history, "compaction", True)


def codex(run: Run) -> Iterator[Turn]:
    """Codex: Responses, a sub-agent as a thread with a parent."""
    base = {"originator": "codex_exec", "user-agent": "codex_exec/0.171.0 (Debian 12.0.0)", "session-id": run.id}
    for number, history in enumerate(run.compacted()):
        if number % 3 == 2:
            thread = run.new_id()
            of_thread = {"thread-id": thread, "x-client-request-id": thread}
            parent = {"x-codex-parent-thread-id": run.id, "x-openai-subagent": "collab_spawn"}
            alone = [Message(role="user", content=f"Review {number}.")]
            yield _responses(run, base | of_thread | parent, alone, branch=thread)
        yield _responses(run, base | {"thread-id": run.id, "x-client-request-id": run.id}, history)


def opencode(run: Run) -> Iterator[Turn]:
    """OpenCode: one id in two headers, a sub-agent with its parent's, a title beside the conversation."""
    base = {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14"}

    def named(id_: str) -> dict[str, str]:
        return base | {"x-session-affinity": id_, "x-session-id": id_}

    title = {"model": "stub-model", "messages": [{"role": "user", "content": "Generate a title."}], "stream": True}
    yield Turn(run.name, "/chat/completions", named(run.id), title, branch="auxiliary", aside=True)
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    for number, history in enumerate(run.compacted()):
        if number % 3 == 2:
            child = run.new_id()
            alone = run.chat([Message(role="user", content=f"Look for number {number}.")], stream=True) | {
                "tools": [tool]
            }
            headers = named(child) | {"x-parent-session-id": run.id}
            yield Turn(run.name, "/chat/completions", headers, alone, branch=child)
        body = run.chat(history, stream=True)
        yield Turn(run.name, "/chat/completions", named(run.id), {"tools": [tool], **body})


def by_header(name: str, parent: str = "") -> Shape:
    """Returns a client of Chat Completions that names its session, and its sub-agents' parent, in headers."""

    def turns(run: Run) -> Iterator[Turn]:
        for number, history in enumerate(run.compacted()):
            if parent and number % 3 == 2:
                child = run.new_id()
                alone = run.chat([Message(role="user", content=f"Look for number {number}.")], stream=True)
                yield Turn(run.name, "/chat/completions", {name: child, parent: run.id}, alone, branch=child)
            yield Turn(run.name, "/chat/completions", {name: run.id}, run.chat(history, stream=True))

    return turns


def by_field(**fields: Any) -> Shape:
    """Returns a client that names its session in its bodies; `ID` stands for it."""

    def turns(run: Run) -> Iterator[Turn]:
        made = json.loads(json.dumps(fields).replace("ID", run.id))
        for history in run.compacted():
            yield Turn(run.name, "/chat/completions", {}, run.chat(history, **made))

    return turns


def unnamed(run: Run) -> Iterator[Turn]:
    """A client that names nothing."""
    for history in run.histories():
        yield Turn(run.name, "/chat/completions", {}, run.chat(history))


def renamed(run: Run) -> Iterator[Turn]:
    """The commonest mistake: a client that makes a new id for every call."""
    for history in run.histories():
        yield Turn(run.name, "/chat/completions", {"x-session-id": run.new_id()}, run.chat(history))


SHAPES: dict[str, Shape] = {
    "claude-code": claude_code,
    "codex": codex,
    "opencode": opencode,
    "dynamo": by_header("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    "llm-d": by_header("x-session-id"),
    "qwen-code": by_header("x-qwen-code-session-id"),
    "litellm": by_field(metadata={"session_id": "ID"}),
    "sglang": by_field(session_id="ID"),
    "cache key": by_field(prompt_cache_key="ID"),
    "unnamed": unnamed,
}


def _messages(
    run: Run, headers: dict[str, str], history: Sequence[Message], branch: str = "main", aside: bool = False
) -> Turn:
    """Returns a request of Anthropic's Messages."""
    system = "\n".join(m.text for m in history if m.role in ("system", "developer"))
    body: dict[str, Any] = {"model": "stub-model", "max_tokens": 64, "stream": True, "messages": list(_blocks(history))}
    if system:
        body["system"] = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    if run.trace.tools and branch == "main":
        body["tools"] = [
            {"name": t.function.name, "description": t.function.description, "input_schema": t.function.parameters}
            for t in run.trace.tools
        ]
    return Turn(run.name, "/messages", headers, body, branch, aside)


def _blocks(history: Sequence[Message]) -> Iterator[dict[str, Any]]:
    for message in history:
        if message.role == "tool":
            result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.text}
            yield {"role": "user", "content": [result]}
        elif message.role in ("user", "assistant"):
            said = [{"type": "text", "text": message.text}] if message.text.strip() else []
            uses = [
                {"type": "tool_use", "id": c.id, "name": c.function.name, "input": json.loads(c.function.arguments)}
                for c in message.tool_calls or ()
            ]
            yield {"role": message.role, "content": [*said, *uses] or [{"type": "text", "text": "(nothing)"}]}


def _responses(run: Run, headers: dict[str, str], history: Sequence[Message], branch: str = "main") -> Turn:
    """Returns a request of OpenAI's Responses."""
    items: list[dict[str, Any]] = []
    for message in history:
        if message.role == "tool":
            items.append({"type": "function_call_output", "call_id": message.tool_call_id, "output": message.text})
            continue
        if message.text:
            items.append({"type": "message", "role": message.role, "content": message.text})
        for call in message.tool_calls or ():
            asked = {"name": call.function.name, "arguments": call.function.arguments}
            items.append({"type": "function_call", "call_id": call.id, **asked})
    tools = [{"type": "function", **msgspec.to_builtins(tool.function)} for tool in run.trace.tools]
    body = {"model": "stub-model", "input": items, "stream": True, "store": False, "prompt_cache_key": run.id}
    return Turn(run.name, "/responses", headers, body | ({"tools": tools} if tools else {}), branch)
