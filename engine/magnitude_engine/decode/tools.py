"""Recognises tool calls in what a model wrote, as it writes:

    Some text <tool_call>{"name": "search", "arguments": {"query": "tea"}}</tool_call>

A block is a call when it is one complete JSON object with a declared tool's `name` and an object as
`arguments`, followed by the end marker or the end of the output. The arguments are handed on as the model's own
text. Every other block, markers included, is ordinary text. White space between a call and the next one, or the
end, belongs to the format and is dropped. How the text is cut into pieces changes nothing.

Calls of tools whose every call a grammar makes valid (`open_tools`) are shown as they are written: id and name as
soon as the arguments begin, then the arguments' text as it comes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from magnitude_engine import api

_WHITE = " \t\n\r"
# A call up to its arguments, in the form that grammars give it.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)')


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes a tool call: `begin`, a JSON object with `name` and `arguments`, `end`."""

    name: str
    begin: str
    end: str


class _Written(msgspec.Struct, frozen=True):
    name: str
    arguments: msgspec.Raw


class _Block(Enum):
    """What is known of a block: it may still become an object, it holds one, it cannot be a call."""

    OPEN = "open"
    OBJECT = "object"
    BROKEN = "broken"


class _BlockScanner:
    """Finds where the JSON object of a block ends, in one pass; a marker inside a string does not count."""

    def __init__(self, text: str, start: int) -> None:
        self.start = start
        self.end = start
        self.state = _Block.OPEN
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.push(text)

    def push(self, text: str) -> None:
        """Reads on in `text`, which has grown at its end since the last call."""
        while self.state is _Block.OPEN and self.end < len(text):
            self.state = self._step(text[self.end])
            self.end += 1

    def _step(self, character: str) -> _Block:
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            elif character < " ":
                return _Block.BROKEN
        elif character == '"' and self._depth:
            self._in_string = True
        elif character in "{[" and (self._depth or character == "{"):
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            return _Block.OBJECT if self._depth == 0 else _Block.OPEN
        elif character not in _WHITE and not (self._depth and (character.isalnum() or character in ":,+-.")):
            return _Block.BROKEN
        return _Block.OPEN


@dataclass(slots=True)
class _Open:
    """A call that is shown while it is written; its arguments up to `at` in the pending text were given."""

    index: int
    at: int


class ToolCallParser:
    """The tool calls of one choice.

    Args:
        format: how the model writes calls.
        tools: the declared tools.
        ids: returns the id of the choice's n-th call, from 0.
        open_tools: names of tools whose calls are shown as they are written; what begins as one must become one.
    """

    def __init__(
        self,
        format: ToolFormat,
        tools: Iterable[api.Tool],
        ids: Callable[[int], str],
        open_tools: frozenset[str] = frozenset(),
    ) -> None:
        self._format = format
        self._open_tools = open_tools
        self._open: _Open | None = None
        self._names = frozenset(tool.name for tool in tools)
        self._ids = ids
        self._pending = ""
        self._block: _BlockScanner | None = None
        self._after_call = False
        self._count = 0
        self._complete = 0

    @property
    def called(self) -> bool:
        """Whether a call was recognised and is complete."""
        return self._complete > 0

    @property
    def inside(self) -> bool:
        """Whether what may be a call has begun and not ended."""
        return self._block is not None

    def push(self, text: str) -> tuple[str, tuple[api.ToolCallDelta, ...]]:
        """Takes more text; returns what of it is certainly plain, and the calls that it completed or went on with."""
        return self._read(text, final=False)

    def finish(self) -> tuple[str, tuple[api.ToolCallDelta, ...]]:
        """Ends the text; returns what was held back."""
        return self._read("", final=True)

    def _read(self, text: str, final: bool) -> tuple[str, tuple[api.ToolCallDelta, ...]]:
        self._pending += text
        plain: list[str] = []
        calls: list[api.ToolCallDelta] = []
        while True:
            if self._block is None:
                plain.append(self._outside(final))
                if self._block is None:
                    return "".join(plain), tuple(calls)
            self._block.push(self._pending)
            calls += self._written(self._block)
            end = self._block_end(self._block, final)
            if end is None:
                return "".join(plain), tuple(calls)
            call = None
            if end and self._open is None:
                call = self._call(self._pending[self._block.start : self._block.end])
            self._block = None
            if call is not None or self._open is not None:
                calls += (call,) if call is not None else ()
                self._complete += end > 0
                # A call that was shown and then cut off is nothing else any more.
                self._pending = self._pending[end:] if end else ""
                self._open = None
                self._after_call = True
            else:
                # The marker itself is plain, and another block may begin right after it.
                plain.append(self._plain(len(self._format.begin)))

    def _written(self, block: _BlockScanner) -> tuple[api.ToolCallDelta, ...]:
        """Returns what is new of a call that is shown while it is written."""
        pieces: list[api.ToolCallDelta] = []
        if self._open is None:
            head = _HEAD.match(self._pending, block.start) if self._open_tools else None
            name = msgspec.json.decode(head[1], type=str) if head is not None else ""
            if head is None or name not in self._open_tools:
                return ()
            self._open = _Open(self._count, head.end())
            self._count += 1
            pieces.append(api.ToolCallDelta(index=self._open.index, id=self._ids(self._open.index), name=name))
        # The last brace closes the call; white space in front of it is not the arguments' own.
        limit = block.end - (block.state is not _Block.OPEN)
        text = self._pending[self._open.at : limit].rstrip(_WHITE)
        if text:
            self._open.at += len(text)
            pieces.append(api.ToolCallDelta(index=self._open.index, arguments=text))
        return tuple(pieces)

    def _outside(self, final: bool) -> str:
        """Takes plain text up to the next begin marker, or to an end that may become one, and returns it."""
        begin = self._format.begin
        found = self._pending.find(begin)
        safe = found
        if found < 0:
            safe = len(self._pending) - (0 if final else _partial(self._pending, begin))
        if self._after_call and not self._pending[:safe].strip(_WHITE):
            if found < 0 and not final:
                return ""
            self._pending = self._pending[safe:]
            safe = 0
        text = self._plain(safe)
        if found >= 0:
            self._block = _BlockScanner(self._pending, len(begin))
        return text

    def _plain(self, length: int) -> str:
        """Takes `length` characters of pending text and returns them."""
        text, self._pending = self._pending[:length], self._pending[length:]
        if text:
            self._after_call = False
        return text

    def _block_end(self, block: _BlockScanner, final: bool) -> int | None:
        """Returns where the block ends in the pending text; 0 where it is no call, None where it is undecided."""
        if block.state is _Block.BROKEN:
            return 0
        if block.state is _Block.OPEN:
            return 0 if final else None
        rest = self._pending[block.end :].lstrip(_WHITE)
        if rest.startswith(self._format.end):
            return len(self._pending) - len(rest) + len(self._format.end)
        if self._format.end.startswith(rest):
            return len(self._pending) if final else None
        return 0

    def _call(self, body: str) -> api.ToolCallDelta | None:
        """Returns the call that `body` is, if it is one."""
        try:
            written = msgspec.json.decode(body, type=_Written)
            # A number beyond every range is JSON too, and a grammar may have written it.
            arguments: Any = json.loads(bytes(written.arguments), parse_int=float, parse_constant=_no_constant)
        except (msgspec.DecodeError, RecursionError, ValueError):
            return None
        if written.name not in self._names or not isinstance(arguments, dict):
            return None
        index = self._count
        self._count += 1
        text = bytes(written.arguments).decode()
        return api.ToolCallDelta(index=index, id=self._ids(index), name=written.name, arguments=text)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _partial(text: str, marker: str) -> int:
    """Returns the length of the longest end of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
