"""Recorded agent sessions, and the requests that their agents sent.

A trace is one line of JSON with `trace_id`, `tools` and `messages` in OpenAI's form; other fields are ignored. The
product's own ones lie in `traces/` beside this file. Every message of an assistant is one step: all messages before
it are its prompt, whatever a server answers.

With `as_text` tools, calls and results are written into ordinary messages, since chat templates differ in how, and
whether, they show them: every server then computes the same prompt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from magnitude_engine.errors import ConfigError

OWN = Path(__file__).with_name("traces")
CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    f"within {CALL_BEGIN}{CALL_END} XML tags:\n"
    f'{CALL_BEGIN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CALL_END}'
)


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of what stands in a trace and is sent as it stands there."""


class Definition(Record, frozen=True, omit_defaults=True):
    """A function that may be called; `parameters` is a JSON Schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class Tool(Record, frozen=True, omit_defaults=True, tag="function"):
    """A tool."""

    function: Definition


class Called(Record, frozen=True, omit_defaults=True):
    """A function that was called; `arguments` is JSON text."""

    name: str
    arguments: str


class Call(Record, frozen=True, omit_defaults=True, tag="function"):
    """A tool call."""

    id: str
    function: Called


class Piece(Record, frozen=True, omit_defaults=True):
    """A part of a message's content."""

    text: str = ""


class Message(Record, frozen=True, omit_defaults=True):
    """A message of any role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | tuple[Piece, ...] | None = None
    tool_calls: tuple[Call, ...] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content as text, empty where there is none."""
        if isinstance(self.content, tuple):
            return "\n".join(piece.text for piece in self.content)
        return self.content or ""


class Trace(msgspec.Struct, frozen=True):
    """One session; `group` is the name of the file it is from."""

    trace_id: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    group: str = ""


class Step(NamedTuple):
    """One request of an agent and what was answered to it when it was recorded.

    Attributes:
        number: within its session, from 0.
        offered: the tools that it may call, by name; `tools` are those to be sent as such.
        answer: the recorded answer as a model writes it.
    """

    session: str
    group: str
    number: int
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    offered: tuple[Tool, ...]
    answer: str


def trace_files(places: Sequence[Path]) -> list[Path]:
    """Returns the files at `places`, of a folder all `*.jsonl` by name; the product's own without any place.

    Raises:
        ConfigError: nothing is there.
    """
    found: list[Path] = []
    for place in places or (OWN,):
        files = sorted(place.glob("*.jsonl")) if place.is_dir() else [place]
        if not files or not files[0].is_file():
            raise ConfigError(f"--traces {place}: neither a JSONL file nor a folder with some", param="traces")
        found += files
    return found


def read_traces(path: Path) -> Iterator[Trace]:
    """Yields the traces of a file.

    Raises:
        ConfigError: a line is not a trace; says which.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--traces {path}: cannot be read ({error.strerror})", param="traces") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield msgspec.structs.replace(msgspec.json.decode(line, type=Trace), group=path.stem)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{path}, line {number}: not a trace with OpenAI's `messages` and `tools`: {error}", param="traces"
            ) from error


def digest(files: Iterable[Path]) -> str:
    """Returns a SHA-256 (hex) of the files' names and contents, in their order."""
    found = hashlib.sha256()
    for path in files:
        found.update(f"{path.name} {path.stat().st_size}\n".encode())
        found.update(path.read_bytes())
    return found.hexdigest()


def steps(trace: Trace, as_text: bool) -> list[Step]:
    """Returns the steps of a trace."""
    found: list[Step] = []
    for at, message in enumerate(trace.messages):
        if message.role != "assistant" or not at:
            continue
        before = trace.messages[:at]
        found.append(
            Step(
                session=trace.trace_id,
                group=trace.group,
                number=len(found),
                messages=tuple(in_plain_messages(before, trace.tools)) if as_text else before,
                tools=() if as_text else trace.tools,
                offered=trace.tools,
                answer=written(message),
            )
        )
    return found


def written(message: Message) -> str:
    """Returns an assistant's message as a model of the Hermes form writes it."""
    calls = [
        f'{CALL_BEGIN}\n{{"name": {json.dumps(c.function.name)}, "arguments": {c.function.arguments}}}\n{CALL_END}'
        for c in message.tool_calls or ()
    ]
    return "\n".join([message.text, *calls] if message.text else calls)


def in_plain_messages(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[Message]:
    """Yields the conversation with tools, calls and results written into ordinary text."""
    rest = list(messages)
    if tools:
        own = rest.pop(0).text if rest and rest[0].role == "system" else ""
        listed = "\n".join(json.dumps(msgspec.to_builtins(tool), ensure_ascii=False) for tool in tools)
        yield Message("system", "\n\n".join(filter(None, (own, _TOOLS_BEFORE + listed + _TOOLS_AFTER))))
    results: list[str] = []
    for message in rest:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message.text}\n</tool_response>")
            continue
        if results:
            yield Message("user", "\n".join(results))
            results = []
        yield Message(message.role, written(message) if message.role == "assistant" else message.text)
    if results:
        yield Message("user", "\n".join(results))
