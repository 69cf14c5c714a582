"""An answer as a sequence of parts, one open at a time: what Responses calls items and Messages content blocks.

A part is a thought (an upstream's `reasoning_content` or `reasoning`), a text, a refusal or a tool call. A delta closes
the open part where it begins another kind or another call; what was closed never grows again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from magnitude_engine import api

PartKind = Literal["thought", "text", "refusal", "call"]
_THOUGHTS = ("reasoning_content", "reasoning")


class Interleaved(ValueError):
    """A tool call grew after another part had begun; no client of these forms could read it."""


@dataclass(slots=True)
class Part:
    """One part; `index` counts from 0 over the answer.

    Attributes:
        call: place of a tool call among the answer's calls, as its pieces name it.
        id, name: of a tool call.
        pieces: its thought, text, refusal or arguments so far.
    """

    kind: PartKind
    index: int
    call: int = -1
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[api.TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Everything it holds."""
        return "".join(self.pieces)


class Opened(NamedTuple):
    """A part begins; of a call, id and name are known."""

    part: Part


class Grown(NamedTuple):
    """A part has more: `piece` is not empty unless only `logprobs` came."""

    part: Part
    piece: str
    logprobs: tuple[api.TokenLogprob, ...] = ()


class Closed(NamedTuple):
    """A part is complete."""

    part: Part


Change = Opened | Grown | Closed


class Parts:
    """The parts of one choice, in the order in which they began; thoughts are left out unless the client reads them."""

    def __init__(self, thoughts: bool = True) -> None:
        self._thoughts = thoughts
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._unnamed = False

    def add(self, delta: api.Delta) -> Iterator[Change]:
        """Takes new output and yields what changes; iterate to the end.

        Raises:
            Interleaved: a piece belongs to a call that is closed.
        """
        thought = next((piece for name in _THOUGHTS if isinstance(piece := delta.extra.get(name), str)), "")
        if thought and self._thoughts:
            yield from self._words("thought", thought)
        if delta.text or (delta.logprobs and not delta.tool_calls):
            yield from self._words("text", delta.text, delta.logprobs)
        if delta.refusal:
            yield from self._words("refusal", delta.refusal)
        for piece in delta.tool_calls:
            yield from self._piece(piece)

    def close(self) -> Iterator[Change]:
        """Closes the open part."""
        if self._open is not None:
            part, self._open = self._open, None
            if self._unnamed:
                yield from self._announce(part)
            yield Closed(part)

    def _words(self, kind: PartKind, piece: str, logprobs: tuple[api.TokenLogprob, ...] = ()) -> Iterator[Change]:
        part = self._open
        if part is None or part.kind != kind:
            yield from self.close()
            part = self._begin(Part(kind, len(self.parts)))
            yield Opened(part)
        part.pieces.append(piece)
        part.logprobs.extend(logprobs)
        yield Grown(part, piece, logprobs)

    def _piece(self, piece: api.ToolCallDelta) -> Iterator[Change]:
        part = self._open
        if part is None or part.call != piece.index:
            if any(known.call == piece.index for known in self.parts):
                raise Interleaved(f"tool call {piece.index} went on after another part had begun")
            yield from self.close()
            part = self._begin(Part("call", len(self.parts), call=piece.index))
            self._unnamed = True
        part.id = part.id or piece.id or ""
        part.name = part.name or piece.name or ""
        if piece.arguments:
            part.pieces.append(piece.arguments)
        if self._unnamed:
            # Some servers send the id first and the name with a later piece.
            if part.name:
                yield from self._announce(part)
        elif piece.arguments:
            yield Grown(part, piece.arguments)

    def _announce(self, part: Part) -> Iterator[Change]:
        self._unnamed = False
        yield Opened(part)
        if part.pieces:
            yield Grown(part, part.text)

    def _begin(self, part: Part) -> Part:
        self.parts.append(part)
        self._open = part
        return part
