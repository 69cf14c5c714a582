"""Server-Sent Events in both directions: an incremental parser and the few frames the proxy writes.

Parsing follows the HTML standard (section 9.2.6): lines end in CR, LF or CRLF, a leading byte order mark is
ignored, comments are skipped, several `data` lines are joined by LF, an empty line ends an event, an event
that the end of the stream cuts off is dropped. `id` and `retry` are ignored: nothing here reconnects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

LINE_LIMIT = 1024 * 1024
EVENT_LIMIT = 4 * LINE_LIMIT

KEEPALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
DONE_DATA = b"[DONE]"

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class OversizedEvent(ValueError):
    """A line or an event is longer than the parser accepts."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: its type (`message` unless named) and its data, undecoded."""

    data: bytes
    event: bytes = b"message"


class EventParser:
    """Turns pieces of a byte stream into events; how the bytes are cut makes no difference."""

    def __init__(self, line_limit: int = LINE_LIMIT, event_limit: int = EVENT_LIMIT) -> None:
        self._line_limit = line_limit
        self._event_limit = event_limit
        self._partial = bytearray()
        self._first_line = True
        self._skip_lf = False
        self._data: list[bytes] = []
        self._size = 0
        self._event = b""

    def feed(self, piece: bytes) -> Iterator[ServerEvent]:
        """Yields the events that `piece` completes; iterate to the end before the next call.

        Raises:
            OversizedEvent: a line is over the line limit or an event over the event limit; the events before
                it have been yielded.
        """
        start = 0
        if self._skip_lf and piece:
            # The CR that ended the last piece already ended its line; its LF belongs to it.
            start = 1 if piece[:1] == b"\n" else 0
            self._skip_lf = False
        for end in _LINE_END.finditer(piece, start):
            line = piece[start : end.start()]
            if self._partial:
                line = bytes(self._partial) + line
                self._partial.clear()
            self._check_line(len(line))
            start = end.end()
            self._skip_lf = end.group() == b"\r" and start == len(piece)
            event = self._line(line)
            if event is not None:
                yield event
        self._partial += piece[start:]
        self._check_line(len(self._partial))

    def _check_line(self, size: int) -> None:
        if size > self._line_limit:
            raise OversizedEvent(f"a line is longer than {self._line_limit} bytes")

    def _line(self, line: bytes) -> ServerEvent | None:
        """Takes one line without its end; returns the event that it completes."""
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._size += len(value) + 1
            if self._size > self._event_limit:
                raise OversizedEvent(f"an event is longer than {self._event_limit} bytes")
            self._data.append(value)
        elif field == b"event":
            self._event = value
        return None

    def _dispatch(self) -> ServerEvent | None:
        data, event = self._data, self._event
        self._data, self._event, self._size = [], b"", 0
        return ServerEvent(b"\n".join(data), event or b"message") if data else None


def format_event(data: bytes) -> bytes:
    """Returns the frame of one event; line breaks in `data` become further `data` lines."""
    if b"\n" in data or b"\r" in data:
        data = b"\ndata: ".join(_LINE_END.split(data))
    return b"data: " + data + b"\n\n"
