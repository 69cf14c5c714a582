"""Pure decisions: what may leave a prompt, when that pays, and what a prompt is without it.

    system … first user │ step │ step │ … │ step │ the last KEEP messages │ (results that are awaited)
    never touched       │ whole steps, finished thinking │ never touched

Whatever is decided stays decided: a new decision is carried out after all earlier ones, so that none of them changes
as the conversation grows. Messages are cut out only where a message of the user or a tool then stands before one of the
assistant, or the other way round, as chat templates demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from magnitude_proxy.pruning.history import Line, steps_of, together
from magnitude_proxy.store.pruned import Drop, Kind

KEEP = 4
# A token of English or code, and what a template writes around a message.
CHARS_PER_TOKEN = 4.0
MESSAGE_TOKENS = 5.0
# What it costs to keep one cached token before a generated one, in tokens of prefill: attention to 3,584 tokens more
# took 14 ms a token, and prefill 1 ms a token.
CARRY = 0.004
# What a token of prefill costs while nothing else runs: the next step does not wait for it, but live work may come.
IDLE = 0.1
# An agent that has taken many steps will probably take about as many again.
LEFT_LEAST, LEFT_MOST = 2, 50

Word = Literal["dead-ends", "observations", "thinking"]
_FOLLOWS = {("user", "assistant"), ("tool", "assistant"), ("assistant", "user")}


class Wish(NamedTuple):
    """What a client wants dropped.

    Attributes:
        dead_ends: steps that failed: the assistant's message and the results of its calls.
        observations: of those without a call, the user's message behind it as well, which tells what came of it.
        thinking: finished thinking of earlier steps.
    """

    dead_ends: bool = False
    observations: bool = False
    thinking: bool = False


class DeadStep(NamedTuple):
    """A step that came to nothing, and by which anchors and at which place its answer is found in a history."""

    step: int
    anchors: tuple[str, ...]
    place: int
    reason: str


@dataclass(frozen=True, slots=True)
class Idea:
    """Something that may be dropped: `tokens` is an estimate."""

    kind: Kind
    start: int
    count: int
    tokens: float
    reason: str
    step: int | None = None


class Pace(NamedTuple):
    """How a session goes.

    Attributes:
        steps: answered so far.
        hit: share of its prompt tokens that were cached.
        output: tokens of an answer, on average.
        idle: nobody waits for what is computed now.
    """

    steps: int
    hit: float
    output: float
    idle: bool = False


class Cut(NamedTuple):
    """A conversation without what was dropped, by the messages' indices.

    Attributes:
        gone: messages left out; `bare` ones lose the thinking in their text, `silent` ones that beside it.
        drops: the decisions that apply to this conversation.
    """

    gone: frozenset[int] = frozenset()
    bare: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()
    drops: tuple[Drop, ...] = ()


def read_words(words: Iterable[str]) -> Wish:
    """Returns the wish that these words express; other words are not looked at."""
    given = set(words)
    seen = "observations" in given
    return Wish(dead_ends="dead-ends" in given or seen, observations=seen, thinking="thinking" in given)


def settle(lines: Sequence[Line], drops: Sequence[Drop], wish: Wish, length: int | None = None) -> Cut:
    """Returns the conversation as these decisions leave it.

    `length` is how many messages it will have once the results that are awaited stand in it; default: it is complete.
    """
    cutting = _Cutting(lines, wish, length)
    applied = tuple(drop for drop in drops if cutting.carry_out(drop))
    return Cut(frozenset(cutting.gone), frozenset(cutting.bare), frozenset(cutting.silent), applied)


def propose(
    lines: Sequence[Line], drops: Sequence[Drop], wish: Wish, dead: Sequence[DeadStep], length: int | None = None
) -> list[Idea]:
    """Returns what might be dropped beyond `drops`, in the order of the messages; see `settle`."""
    cutting = _Cutting(lines, wish, length)
    for drop in drops:
        cutting.carry_out(drop)
    ideas = []
    for each in dead:
        start = _place(lines, each)
        count = 0 if start is None else cutting.extent(start)
        if start is not None and cutting.take("dead-end", start, count):
            tokens = sum(cutting.tokens(index) for index in range(start, start + count))
            ideas.append(Idea("dead-end", start, count, tokens, f"step {each.step} {each.reason}", each.step))
    for index, line in enumerate(lines):
        if cutting.take("thinking", index, 1):
            ideas.append(Idea("thinking", index, 1, line.thinking / CHARS_PER_TOKEN, "finished thinking"))
        if cutting.take("reasoning", index, 1):
            ideas.append(Idea("reasoning", index, 1, line.hidden / CHARS_PER_TOKEN, "finished thinking"))
    return sorted(ideas, key=lambda idea: (idea.start, idea.kind))


def choose(ideas: Sequence[Idea], lines: Sequence[Line], cut: Cut, pace: Pace) -> list[Idea]:
    """Returns the ideas from that message on from which most is won; none where nothing is.

    The further to the front something is dropped, the more must be computed once more.
    """
    visible = [_tokens(line) if index not in cut.gone else 0.0 for index, line in enumerate(lines)]
    saved, behind, end = 0.0, 0.0, len(lines)
    best, first = 0.0, len(ideas)
    for number in range(len(ideas) - 1, -1, -1):
        idea = ideas[number]
        behind += sum(visible[idea.start : end])
        end = idea.start
        saved += idea.tokens
        won = worth(pace, saved, max(0.0, behind - saved))
        if won > best:
            best, first = won, number
    return list(ideas[first:])


def worth(pace: Pace, saved: float, again: float) -> float:
    """Returns what is won, in tokens of prefill, when `saved` tokens leave each prompt to come and `again` tokens are
    computed once more.

    A token that would not have been cached is worth itself in each step to come; a cached one what attention to it
    costs. Both are counted over as many steps as the session has behind it, within bounds.
    """
    left = min(max(pace.steps, LEFT_LEAST), LEFT_MOST)
    each = (1.0 - pace.hit) + pace.hit * min(1.0, CARRY * pace.output)
    return left * saved * each - pace.hit * again * (IDLE if pace.idle else 1.0)


def shares(ideas: Sequence[Idea], total: int | None) -> list[int]:
    """Returns whole tokens for each idea that add up to `total`; by their own estimates where it is None."""
    if total is None:
        return [round(idea.tokens) for idea in ideas]
    whole = sum(idea.tokens for idea in ideas)
    made, given, passed = [], 0, 0.0
    for idea in ideas:
        passed += idea.tokens
        reached = round(total * passed / whole) if whole else total
        made.append(reached - given)
        given = reached
    return made


class _Cutting:
    """A conversation while decisions are carried out on it, one by one."""

    def __init__(self, lines: Sequence[Line], wish: Wish, length: int | None) -> None:
        self.gone: set[int] = set()
        self.bare: set[int] = set()
        self.silent: set[int] = set()
        self._lines = lines
        self._wish = wish
        self._steps = steps_of(lines)
        users = [index for index, line in enumerate(lines) if line.role == "user"]
        self._first = users[0] + 1 if users else len(lines)
        self._turn = users[-1] if users else 0
        self._last = min(len(lines), (len(lines) if length is None else length) - KEEP)
        self._by_digest: dict[int, dict[str, list[int]]] = {}

    def tokens(self, index: int) -> float:
        """Returns an estimate of a message's tokens as it is now."""
        line = self._lines[index]
        return _tokens(line) - (line.thinking / CHARS_PER_TOKEN if index in self.bare else 0.0)

    def extent(self, start: int) -> int:
        """Returns how many messages the step that begins here has, 0 where none does."""
        stop = self._steps.get(start, start)
        if stop > start and self._observed(start, stop):
            stop += 1
        return stop - start

    def carry_out(self, drop: Drop) -> bool:
        """Drops what was decided before, where it is found and may go."""
        start = self._found(drop)
        return start is not None and self.take(drop.kind, start, drop.count)

    def take(self, kind: Kind, start: int, count: int) -> bool:
        """Drops something; False where it must stay."""
        if not (count and self._first <= start and start + count <= self._last):
            return False
        if any(index in self.gone for index in range(start, start + count)):
            return False
        if kind == "dead-end":
            return self._take_step(start, start + count)
        line, taken = self._lines[start], self.bare if kind == "thinking" else self.silent
        there = line.thinking if kind == "thinking" else line.hidden if start < self._turn else 0
        if not (self._wish.thinking and there) or start in taken:
            return False
        taken.add(start)
        return True

    def _take_step(self, start: int, stop: int) -> bool:
        if not self._wish.dead_ends or stop - start not in (self._steps.get(start, start) - start, self.extent(start)):
            return False
        before = next((i for i in range(start - 1, -1, -1) if i not in self.gone), None)
        after = next((i for i in range(stop, len(self._lines)) if i not in self.gone), None)
        if before is None or after is None:
            return False
        if (self._lines[before].role, self._lines[after].role) not in _FOLLOWS:
            return False
        self.gone.update(range(start, stop))
        return True

    def _observed(self, start: int, stop: int) -> bool:
        asked = self._wish.observations and not self._lines[start].calls
        return asked and stop < len(self._lines) and self._lines[stop].role == "user"

    def _found(self, drop: Drop) -> int | None:
        """Returns where the messages of a decision stand: where they stood, or else at the only place there is."""
        if together(self._lines[drop.index : drop.index + drop.count]) == drop.digest:
            return drop.index
        places = self._by_digest.get(drop.count)
        if places is None:
            places = self._by_digest[drop.count] = {}
            for start in range(len(self._lines) - drop.count + 1):
                places.setdefault(together(self._lines[start : start + drop.count]), []).append(start)
        found = places.get(drop.digest, [])
        return found[0] if len(found) == 1 else None


def _tokens(line: Line) -> float:
    return line.size / CHARS_PER_TOKEN + MESSAGE_TOKENS


def _place(lines: Sequence[Line], dead: DeadStep) -> int | None:
    """Returns where a dead step's answer stands; None where that is not certain."""
    found = [index for index, line in enumerate(lines) if line.anchor and line.anchor in dead.anchors]
    if dead.place in found:
        return dead.place
    return found[0] if len(found) == 1 else None
