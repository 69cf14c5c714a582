"""What the sessions' last prompts were, and which of their prompts were not found; bounded in all directions.

A session may run several conversations side by side; each is a line here, known by its last prompt. Known are at most
`MAX_SESSIONS` branches with `MAX_LINES` lines each, of `max_bytes` together; those that were active last stay.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from sys import getsizeof

from magnitude_engine import api
from magnitude_engine.explain.cause import Told
from magnitude_engine.kv.retention import SessionKey

MAX_SESSIONS = 512
MAX_LINES = 4
MAX_STEPS = 64
MAX_MISSES = 16
MESSAGE_BYTES = 200


class Prompts:
    """The last prompts by session and branch."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lines: OrderedDict[SessionKey, list[Told]] = OrderedDict()
        self.held = 0

    def of(self, owner: SessionKey) -> list[Told]:
        """Returns the lines of a branch, the one that was active last at the end."""
        return list(self._lines.get(owner, ()))

    def beside(self, owner: SessionKey, most: int) -> list[Told]:
        """Returns the last lines of the tenant's other branches and sessions, the last one at the end."""
        others = (lines for key, lines in reversed(self._lines.items()) if key.tenant == owner.tenant and key != owner)
        return list(islice(_newest(others), most))[::-1]

    def put(self, owner: SessionKey, told: Told, origin: Told | None) -> None:
        """Takes in a prompt that went on from `origin`, or began a line."""
        lines = self._lines.setdefault(owner, [])
        self._lines.move_to_end(owner)
        if any(line is origin for line in lines) and origin is not None:
            self._drop(lines, origin)
        lines.append(told)
        self.held += size(told)
        if len(lines) > MAX_LINES:
            self._drop(lines, lines[0])
        while self._lines and (len(self._lines) > MAX_SESSIONS or self.held > self._max_bytes):
            self.forget(next(iter(self._lines)))

    def forget(self, owner: SessionKey) -> None:
        """Drops all lines of a branch."""
        self.held -= sum(map(size, self._lines.pop(owner, ())))

    def branches(self, tenant: str, session: str) -> list[SessionKey]:
        """Returns the known branches of a session."""
        return [key for key in self._lines if key.session == session and key.tenant == tenant]

    def _drop(self, lines: list[Told], gone: Told) -> None:
        lines[:] = [line for line in lines if line is not gone]
        self.held -= size(gone)


def _newest(others: Iterable[list[Told]]) -> Iterator[Told]:
    for lines in others:
        yield from reversed(lines)


def size(told: Told) -> int:
    """Estimates the bytes that a prompt holds."""
    texts = sum(MESSAGE_BYTES + getsizeof(m.content) + _call_bytes(m) for m in told.messages or ())
    return len(told.ids) + texts + sum(map(getsizeof, told.tools)) + getsizeof(told.text)


def _call_bytes(message: api.Message) -> int:
    return sum(MESSAGE_BYTES + getsizeof(call.arguments) for call in message.tool_calls)


@dataclass(slots=True, eq=False)
class Ledger:
    """What became of one session's prompts: the last steps and misses, and totals."""

    steps: deque[api.StepCache] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    misses: deque[api.MissDetail] = field(default_factory=lambda: deque(maxlen=MAX_MISSES))
    count: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    by_cause: Counter[api.MissCause] = field(default_factory=Counter)
    wasted: Counter[api.MissCause] = field(default_factory=Counter)

    def add(self, step: api.StepCache, detail: api.MissDetail | None) -> None:
        """Takes in a step."""
        self.steps.append(step)
        self.count += 1
        self.prompt_tokens += step.prompt_tokens
        self.cached_tokens += step.cached_tokens
        if detail is not None:
            self.misses.append(detail)
            self.by_cause[detail.miss.cause] += 1
            self.wasted[detail.miss.cause] += detail.miss.wasted

    def report(self, asked: api.AskMisses) -> api.SessionMisses:
        """Returns all of it."""
        return api.SessionMisses(
            request=asked.request,
            epoch=asked.epoch,
            steps=tuple(self.steps),
            misses=tuple(self.misses),
            step_count=self.count,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            causes=tuple(
                api.CauseTotal(cause=cause, misses=number, wasted=self.wasted[cause])
                for cause, number in self.by_cause.most_common()
            ),
        )


class Ledgers:
    """The ledgers of the sessions that were active last."""

    def __init__(self) -> None:
        self._ledgers: OrderedDict[tuple[str, str], Ledger] = OrderedDict()

    def get(self, tenant: str, session: str) -> Ledger:
        """Returns the ledger of a session, empty where nothing is known."""
        return self._ledgers.get((tenant, session)) or Ledger()

    def add(self, owner: SessionKey, step: api.StepCache, detail: api.MissDetail | None) -> None:
        """Takes in a step of a session."""
        key = (owner.tenant, owner.session)
        ledger = self._ledgers.setdefault(key, Ledger())
        self._ledgers.move_to_end(key)
        ledger.add(step, detail)
        if len(self._ledgers) > MAX_SESSIONS:
            self._ledgers.popitem(last=False)

    def forget(self, tenant: str, session: str) -> None:
        """Drops the ledger of a session."""
        self._ledgers.pop((tenant, session), None)
