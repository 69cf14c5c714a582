"""One request's conversation with what was dropped from it, the answer that follows, and the sessions seen last."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_proxy.pruning.history import Line, anchor, read_lines, without_fields, without_thinking
from magnitude_proxy.pruning.plan import Cut, Wish

MAX_SESSIONS = 256
MAX_CHARS = 32_000_000
LOCAL = "local"

Given = Mapping[str, Any]


class Shown(NamedTuple):
    """Messages as the model sees them: for the worker, and as an upstream gets them."""

    messages: tuple[api.Message, ...]
    wire: tuple[Given, ...]


@dataclass(frozen=True, slots=True)
class Scene:
    """A conversation as its client sent it; `wire` are the same messages as they stand in the request."""

    chat: api.ChatInput
    wire: tuple[Given, ...]
    lines: tuple[Line, ...]
    wish: Wish

    def with_answer(self, answer: api.Message) -> Scene:
        """Returns the conversation with the answer to it."""
        calls = [{"id": c.id, "function": {"name": c.name, "arguments": c.arguments}} for c in answer.tool_calls]
        given: Given = {"role": answer.role, "content": answer.content, "tool_calls": calls}
        chat = msgspec.structs.replace(self.chat, messages=(*self.chat.messages, answer))
        return Scene(chat, (*self.wire, given), (*self.lines, *read_lines((answer,), (given,))), self.wish)

    def shown(self, cut: Cut) -> Shown:
        """Returns what is left of it."""
        messages, wire = [], []
        for index, (message, given) in enumerate(zip(self.chat.messages, self.wire, strict=True)):
            if index in cut.gone:
                continue
            if index in cut.bare:
                message, given = without_thinking(message, given, self.lines[index])
            messages.append(message)
            wire.append(without_fields(given) if index in cut.silent else given)
        return Shown(tuple(messages), tuple(wire))


def scene(chat: api.ChatInput, wire: list[dict[str, Any]], wish: Wish) -> Scene:
    """Returns the conversation of a request."""
    return Scene(chat, tuple(wire), read_lines(chat.messages, wire), wish)


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)


class Said:
    """What an answer says, gathered while it passes."""

    def __init__(self) -> None:
        self._choices: dict[int, _Choice] = {}

    def see(self, delta: api.Delta) -> None:
        """Takes in the next piece."""
        choice = self._choices.setdefault(delta.choice, _Choice())
        choice.text.append(delta.text)
        for piece in delta.tool_calls:
            call = choice.calls.setdefault(piece.index, ["", "", ""])
            call[0], call[1] = piece.id or call[0], piece.name or call[1]
            call[2] += piece.arguments

    @property
    def anchors(self) -> tuple[str, ...]:
        """What the answer is recognised by in a history: one anchor per choice, since any may be gone on with."""
        found = (anchor(m.content, [c.id for c in m.tool_calls]) for m in map(self._message, sorted(self._choices)))
        return tuple(filter(None, found))

    @property
    def answer(self) -> api.Message:
        """The first choice."""
        return self._message(0)

    def _message(self, number: int) -> api.Message:
        choice = self._choices.get(number, _Choice())
        calls = tuple(api.ToolCall(id=i, name=name, arguments=words) for i, name, words in choice.calls.values())
        return api.Message(role="assistant", content="".join(choice.text), tool_calls=calls)


@dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning did to a request.

    Attributes:
        salt: of the request's tenant.
        tokens: that its prompt is shorter by; `hidden` ones more where an upstream reads thinking beside the text.
        ahead: whether its client wants prompts to be computed ahead.
        said: gathers the answer.
    """

    scene: Scene
    salt: str
    tokens: int = 0
    hidden: int = 0
    ahead: bool = True
    said: Said = field(default_factory=Said)

    def saved(self, label: str) -> int:
        """Returns the tokens saved on the route of this label."""
        return self.tokens + (0 if label in ("", LOCAL) else self.hidden)


class Key(NamedTuple):
    """A branch of a session."""

    session: str
    branch: str


@dataclass(frozen=True, slots=True, eq=False)
class Recent:
    """A session between two steps: its conversation with the last answer."""

    key: Key
    scene: Scene
    salt: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def size(self) -> int:
        """Characters of it."""
        return sum(line.size for line in self.scene.lines)

    @property
    def length(self) -> int:
        """Messages that the next request will have at least: results of the calls, or the user's next words."""
        return len(self.scene.lines) + max(1, len(self.scene.lines[-1].calls))


class Recents:
    """The sessions between two steps whose clients asked for pruning, within bounds; those that rest longest leave."""

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._held: OrderedDict[Key, Recent] = OrderedDict()
        self._chars = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, recent: Recent) -> None:
        """A step has ended."""
        self.take(recent.key)
        self._held[recent.key] = recent
        self._chars += recent.size
        while len(self._held) > MAX_SESSIONS or self._chars > self._max_chars:
            self.take(next(iter(self._held)))

    def take(self, key: Key) -> None:
        """Another step begins."""
        gone = self._held.pop(key, None)
        self._chars -= 0 if gone is None else gone.size

    def forget(self, session: str) -> None:
        """A session has ended."""
        for recent in self.of(session):
            self.take(recent.key)

    def holds(self, recent: Recent) -> bool:
        """Whether the session still rests where it did."""
        return self._held.get(recent.key) is recent

    def of(self, session: str) -> list[Recent]:
        """Returns the branches of a session that rest."""
        return [recent for key, recent in self._held.items() if key.session == session]

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` beside the requests."""
        task = asyncio.create_task(work, name="magnitude-prune")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
