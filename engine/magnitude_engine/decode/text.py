"""Turns tokens into text that can be shown: whole characters only, and never a part of a stop string.

Characters are examined from left to right. The answer stops at the first character that completes a stop
string, and of several completed there at the longest: the text before it is released, the stop string and
everything after it is not. This is what engines do that look for stops after each token, except that here the
result does not depend on where tokens begin and end.

Held back is the longest end of the text that may still become a stop string, and the bytes of an unfinished
character. Bytes that are not UTF-8 become U+FFFD, as `bytes.decode(errors="replace")` has it.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable
from typing import NamedTuple


class Released(NamedTuple):
    """What one step released.

    Attributes:
        text: new text, to be appended to what was released before.
        tokens: how many further tokens, in order, are now released with their whole text; after `finish` the sum
            over all steps is the number of tokens pushed, unless a stop string cut some off.
        stopped: the stop string that ended the text, if one did; nothing is released after it.
    """

    text: str
    tokens: int
    stopped: str | None


class _Matcher:
    """Follows one stop string through a text, character by character (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = _borders(stop)

    def push(self, character: str) -> bool:
        """Returns True when `character` completes the stop string; `matched` is how much of it the text ends in."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._shorter[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.stop)


class TextStream:
    """The text of one choice.

    Args:
        token_bytes: the bytes of a token; may be empty (special tokens).
        stop: stop strings; empty ones are ignored.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: tuple[str, ...]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matchers = [_Matcher(s) for s in stop if s]
        self._held = ""
        self._decoded = 0
        self._ends: deque[int] = deque()
        self._stopped: str | None = None

    def push(self, token: int) -> Released:
        """Takes the next token; after a stop it is ignored."""
        if self._stopped is not None:
            return Released("", 0, self._stopped)
        text = self._decoder.decode(self._token_bytes(token))
        # Bytes of an unfinished character become part of the one character that comes next.
        unfinished = bool(self._decoder.getstate()[0])
        self._ends.append(self._decoded + len(text) + unfinished)
        return self._take(text)

    def finish(self) -> Released:
        """Ends the text: releases what was held back, an unfinished character as U+FFFD."""
        if self._stopped is not None:
            return Released("", 0, self._stopped)
        released = self._take(self._decoder.decode(b"", final=True))
        if released.stopped is not None:
            return released
        rest, self._held = self._held, ""
        return Released(released.text + rest, released.tokens + self._account(), None)

    def _take(self, text: str) -> Released:
        """Appends decoded text and releases what is safe."""
        for i, character in enumerate(text):
            completed = [m.stop for m in self._matchers if m.push(character)]
            if completed:
                self._stopped = max(completed, key=len)
                seen = self._held + text[: i + 1]
                self._decoded += i + 1
                self._held = self._stopped
                return Released(seen[: -len(self._stopped)], self._account(), self._stopped)
        self._decoded += len(text)
        seen = self._held + text
        safe = len(seen) - max((m.matched for m in self._matchers), default=0)
        self._held = seen[safe:]
        return Released(seen[:safe], self._account(), None)

    def _account(self) -> int:
        """Returns how many further tokens end in released text."""
        released = self._decoded - len(self._held)
        count = 0
        while self._ends and self._ends[0] <= released:
            self._ends.popleft()
            count += 1
        return count


def _borders(pattern: str) -> list[int]:
    """Returns for each prefix of `pattern` the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders
