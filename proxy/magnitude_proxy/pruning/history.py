"""A conversation as pruning sees it: its messages, the steps that they make up, and finished thinking."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from magnitude_engine import api

BEGIN, END = "<think>", "</think>"
# Where OpenAI-compatible servers put thinking beside the text.
FIELDS = ("reasoning_content", "reasoning")

_BLANKS = re.compile(r"\s*")


class Line(NamedTuple):
    """A message.

    Attributes:
        size: characters of its text and calls.
        digest: of all that the model sees of it.
        anchor: of an assistant's message the answer that it is (see `anchor`), else empty.
        calls: ids of its tool calls; `answers` is the call that a tool's message answers.
        thinking: characters at the beginning of its text that are finished thinking, zero where nothing else is in it.
        hidden: characters of thinking beside its text.
    """

    role: str
    size: int
    digest: str
    anchor: str = ""
    calls: tuple[str, ...] = ()
    answers: str = ""
    thinking: int = 0
    hidden: int = 0


def read_lines(messages: Sequence[api.Message], wire: Sequence[Mapping[str, Any]]) -> tuple[Line, ...]:
    """Returns the messages, given in the neutral form and, one for one, as they stand in the request."""
    return tuple(_line(message, given) for message, given in zip(messages, wire, strict=True))


def thoughts(text: str) -> int:
    """Returns how many characters at the beginning of `text` are finished thinking, blanks around it included.

    Only thinking that an answer begins with counts: further behind, the marks may be what it writes about.
    """
    end = 0
    while True:
        start = _after_blanks(text, end)
        close = text.find(END, start) if text.startswith(BEGIN, start) else -1
        if close < 0:
            return start if end else 0
        end = close + len(END)


def anchor(text: str, calls: Sequence[str]) -> str:
    """Returns what an answer is recognised by when it comes back in a history: its calls' ids, else its words.

    Thinking and blanks around the words do not count: clients leave them out. Empty for an empty answer.
    """
    if calls:
        return _digest("calls", *calls)
    words = text[thoughts(text) :].strip()
    return _digest("text", words) if words else ""


def together(lines: Sequence[Line]) -> str:
    """Returns the digest of messages that stand one behind the other."""
    return _digest(*(line.digest for line in lines))


def steps_of(lines: Sequence[Line]) -> dict[int, int]:
    """Returns the steps, from the assistant's message to behind the last result of its calls.

    Left out are those with a result that is missing or stands elsewhere: they cannot be cut out in one piece.
    """
    steps: dict[int, int] = {}
    latest: dict[str, int] = {}
    for start, line in enumerate(lines):
        if line.role != "assistant":
            continue
        stop = start + 1
        while stop < len(lines) and lines[stop].role == "tool":
            stop += 1
        if {each.answers for each in lines[start + 1 : stop]} == set(line.calls):
            steps[start] = stop
    for index, line in enumerate(lines):
        latest.update(dict.fromkeys(line.calls, index))
        if line.role == "tool":
            owner = latest.get(line.answers)
            if owner is not None and index >= steps.get(owner, index + 1):
                del steps[owner]
    return steps


def without_thinking(
    message: api.Message, given: Mapping[str, Any], line: Line
) -> tuple[api.Message, Mapping[str, Any]]:
    """Returns a message, in both forms, without the finished thinking that its text begins with."""
    first, content = _first_text(given), given.get("content")
    left, rest = first[line.thinking :], message.content[len(first) :]
    text = left + rest if left else rest.removeprefix("\n")
    parts = [{**content[0], "text": left}, *content[1:]] if isinstance(content, list) else left
    return msgspec.structs.replace(message, content=text), {**given, "content": parts}


def without_fields(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message of a request without thinking beside its text."""
    return {name: value for name, value in given.items() if name not in FIELDS}


def _after_blanks(text: str, start: int) -> int:
    found = _BLANKS.match(text, start)
    return start if found is None else found.end()


def _line(message: api.Message, given: Mapping[str, Any]) -> Line:
    calls = tuple(call.id for call in message.tool_calls)
    words = [part for call in message.tool_calls for part in (call.id, call.name, call.arguments)]
    assistant = message.role == "assistant"
    text = _first_text(given) if assistant else ""
    thinking = thoughts(text)
    if not (calls or message.content[thinking:].strip()):
        thinking = 0
    return Line(
        role=message.role,
        size=len(message.content) + sum(map(len, words)),
        digest=_digest(message.role, message.content, message.name or "", message.tool_call_id or "", *words),
        anchor=anchor(message.content, calls) if assistant else "",
        calls=calls,
        answers=message.tool_call_id or "",
        thinking=thinking,
        hidden=sum(len(str(given[name])) for name in FIELDS if given.get(name)) if assistant else 0,
    )


def _first_text(given: Mapping[str, Any]) -> str:
    content = given.get("content")
    if isinstance(content, list) and content and content[0].get("type") == "text":
        content = content[0].get("text")
    return content if isinstance(content, str) else ""


def _digest(*parts: str) -> str:
    """Returns 32 hex digits over `parts`, each after its length, so that no two lists of parts look alike."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "big"))
        state.update(data)
    return state.hexdigest()[:32]
