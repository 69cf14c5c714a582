"""Recorded agent sessions, and the requests that their agents would send.

The product's own traces are those that `magnitude bench` carries; public ones are read from
`../shared/data/traces/public` where they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from magnitude_engine import api
from magnitude_engine.model.loader import LoadedModel
from magnitude_proxy.bench import recorded

OWN = recorded.OWN
PUBLIC = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces" / "public"


class Trace(NamedTuple):
    """One session; `group` is the file it is from."""

    name: str
    group: str
    tools: tuple[api.Tool, ...]
    messages: tuple[api.Message, ...]


class Turn(NamedTuple):
    """One step of an agent: a request, its prompt's ids, and the ids of the recorded answer as a model writes them."""

    trace: Trace
    number: int
    chat: api.ChatInput
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def computed(self) -> tuple[int, ...]:
        """What a server has computed when the step is over."""
        return self.prompt + self.answer


def own_traces() -> list[Trace]:
    """Returns the traces of this repository."""
    return [trace for path in sorted(OWN.glob("*.jsonl")) for trace in read_traces(path)]


def public_traces() -> list[Trace]:
    """Returns the public traces; none where they are absent."""
    return [trace for path in sorted(PUBLIC.glob("*.jsonl")) for trace in read_traces(path)]


def public_traces_or_skip() -> list[Trace]:
    """Returns the public traces; skips the test where they are absent."""
    return public_traces() or pytest.skip("the public traces (../shared/data/traces/public) are not here")


def read_traces(path: Path) -> Iterator[Trace]:
    """Yields the traces of a file."""
    for trace in recorded.read_traces(path):
        functions = [tool.function for tool in trace.tools]
        tools = tuple(api.Tool(name=f.name, description=f.description, parameters=f.parameters) for f in functions)
        yield Trace(trace.trace_id, trace.group, tools, tuple(map(_message, trace.messages)))


def turns(trace: Trace, model: LoadedModel) -> list[Turn]:
    """Returns the steps of a trace: one per message of the assistant, with all messages before it as its prompt."""
    found: list[Turn] = []
    for at, message in enumerate(trace.messages):
        if message.role == "assistant" and at:
            # Recorded answers owe nothing to a grammar: they are not constrained.
            free = api.ToolChoice(mode="none")
            chat = api.ChatInput(messages=trace.messages[:at], tools=trace.tools, tool_choice=free)
            answer = tuple(model.tokenizer.encode(written(message)))
            found.append(Turn(trace, len(found), chat, model.prompts.encode(chat), answer))
    return found


def written(message: api.Message) -> str:
    """Returns an assistant's message as a model of the Hermes form writes it."""
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}\n</tool_call>'
        for c in message.tool_calls
    ]
    return "\n".join([message.content, *calls] if message.content else calls)


def request(turn: Turn, ahead: bool = False, forced: bool = True) -> api.Generate:
    """Returns the request of a step.

    Its recorded answer is forced: the engine takes it as the ids that the client already has (`api.Resume`), computes
    them, and draws one more. Without `forced` only one token is drawn, and the answer is new to the next step.
    """
    known = turn.answer if forced else ()
    return api.Generate(
        request=f"{turn.trace.name}/{turn.number}",
        epoch=1,
        tenant="replay",
        session=turn.trace.name,
        step=turn.number,
        input=turn.chat,
        sampling=api.Sampling(temperature=0.0),
        max_tokens=len(known) + 1,
        ignore_eos=True,
        resume=(api.Resume(choice=0, ids=known),) if known else (),
        preferences=api.Preferences(predictive_caching=ahead),
    )


def _message(message: recorded.Message) -> api.Message:
    return api.Message(
        role=message.role,
        content=message.text,
        tool_calls=tuple(
            api.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
    )
