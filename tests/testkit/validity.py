"""Agents with tools: one request per tool set of recorded sessions and way to call, and a judge of what comes back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import msgspec
from jsonschema.validators import validator_for

from magnitude_engine import api
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import Recorder, generate
from testkit.traces import Trace

# `begun`: as `auto`, and the model has already written the marker that begins a call.
Way = Literal["required", "auto", "begun"]
WAYS: tuple[Way, ...] = ("required", "auto", "begun")


class Asked(NamedTuple):
    """A request with the tools of a recorded session."""

    source: str
    trace: str
    way: Way
    tools: tuple[api.Tool, ...]
    request: api.Generate


class Judged(NamedTuple):
    """What came of a request.

    Attributes:
        calls: complete calls, of which `wrong` says why some are not valid.
        cut: whether the answer ended within a call.
        refused: the code of an error, if it was one.
        tokens, forced: of the answer; those about which the grammar left no choice.
    """

    calls: int
    wrong: tuple[str, ...]
    cut: bool
    refused: str
    tokens: int
    forced: int


def tool_sets(traces: Iterable[Trace]) -> list[Trace]:
    """Returns the first session of each tool set, those without tools left out."""
    found: dict[bytes, Trace] = {}
    for trace in traces:
        if trace.tools:
            found.setdefault(msgspec.json.encode(trace.tools), trace)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked: tokens of the question, draws of each answer (the first is greedy), tokens of an answer."""

    keep: int = 200
    draws: int = 1
    cap: int = 128
    described: bool = False


def ask(trace: Trace, model: LoadedModel, ways: Iterable[Way], size: Size) -> Iterator[Asked]:
    """Yields requests with the end of the session's last question.

    Descriptions assert nothing and are half of the prompt: without `described` they are left out.
    """
    question = next((m.content for m in reversed(trace.messages) if m.role == "user"), "Go on.")
    tail = model.tokenizer.encode(question)[-size.keep :]
    text = b"".join(map(model.tokenizer.token_bytes, tail)).decode(errors="ignore")
    begin = tuple(model.tokenizer.encode(model.prompts.tool_format.begin))
    for way in ways:
        chat = api.ChatInput(
            messages=(api.Message(role="user", content=text),),
            tools=trace.tools if size.described else tuple(map(_bare, trace.tools)),
            tool_choice=api.ToolChoice(mode="required" if way == "required" else "auto"),
        )
        for draw in range(size.draws):
            request = generate(
                chat,
                session=trace.name,
                sampling=api.Sampling(temperature=float(draw > 0), seed=draw),
                max_tokens=size.cap,
                ignore_eos=False,
                resume=(api.Resume(choice=0, ids=begin),) if way == "begun" else (),
                preferences=api.Preferences(predictive_caching=False),
            )
            yield Asked(trace.group, trace.name, way, trace.tools, request)


def judge(asked: Asked, told: Recorder, begin: str) -> Judged:
    """Returns what came of a request; every complete call is validated against its tool's own schema."""
    if told.failed is not None:
        return Judged(0, (), False, told.failed.code, 0, 0)
    calls = [call for delta in told.of(api.Delta) for call in delta.tool_calls]
    schemas = {tool.name: tool.parameters for tool in asked.tools}
    wrong = [problem for call in calls if (problem := _problem(call, schemas))]
    length = told.finish().reason == "length"
    cut = length and (asked.way != "auto" or begin in told.text())
    usage = told.usage
    return Judged(len(calls), tuple(wrong), cut, "", usage.completion_tokens, usage.forced_tokens)


def _bare(tool: api.Tool) -> api.Tool:
    return api.Tool(name=tool.name, parameters=_undescribed(tool.parameters))


def _undescribed(schema: Any) -> Any:
    """Returns a schema without its texts; a property may be called `description` too."""
    if isinstance(schema, dict):
        return {k: _undescribed(v) for k, v in schema.items() if k != "description" or not isinstance(v, str)}
    return [_undescribed(each) for each in schema] if isinstance(schema, list) else schema


def _problem(call: api.ToolCallDelta, schemas: dict[str, dict[str, Any]]) -> str:
    """Returns why a call is not valid; empty where it is."""
    if call.name not in schemas:
        return f"{call.name}: no such tool"
    schema = schemas[call.name]
    try:
        arguments = json.loads(call.arguments)
    except ValueError as error:
        return f"{call.name}: {error}"
    if not isinstance(arguments, dict):
        return f"{call.name}: the arguments are no object"
    first = next(validator_for(schema)(schema).iter_errors(arguments), None)
    return "" if first is None else f"{call.name}: {first.message[:200]}"
