"""Branches of a session: hypotheses that grow from one prefix, scored, pruned, and one of them kept.

    with engine.branches("run-1") as branches:
        for branch in branches.fork(4):
            thought = branch.chat([*messages, {"role": "user", "content": "Propose one next step."}])
            branch.score(judge(thought["text"]))
        branches.select(branches.best())

            ┌─ b1 ─┬─ b4      b1.fork(2): what may follow b1
    main ───┤      └─ b5
            ├─ b2             b2.prune(): ends it, and all that was forked from it
            └─ b3             branches.select(b5): b5 becomes the main line, all others end

A branch is asked like the session itself, with whole prompts. What they begin with in common is found in the cache by
its tokens and stored once, whoever computed it first; so a fork costs nothing. What the engine learns from branches is
which pages are wanted again: those that only a pruned one used are freed, and what it was generating stops. Questions
to several branches at the same time, from threads or tasks, are computed as one batch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from magnitude_engine.client.answers import GenerateResult, StreamItem
from magnitude_engine.client.requests import AnswerOptions, Ask, Options, chat_ask, prompt_ask
from magnitude_engine.errors import BranchEnded, BranchLimit, RequestError
from magnitude_engine.inprocess.asked import Asked, alast, last
from magnitude_engine.inprocess.lines import Lines, tool_event

if TYPE_CHECKING:
    from magnitude_engine.engine import Engine

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Host:
    """The engine that branches belong to.

    Attributes:
        limit: most open branches of a session.
        load: returns the engine, loading it where it is not yet.
    """

    limit: int
    lines: Lines
    load: Callable[[], Engine]


class Branch:
    """One hypothesis; made by `Branches.fork` and `Branch.fork`, thread-safe.

    It is open until it, or one that it was forked from, is pruned, or any one of the session is selected; then every
    call but `prune` raises BranchEnded, in threads that wait for an answer too.

    Attributes:
        id: its name, of no other branch of the engine.
        parent: what it was forked from; None for the session's main line.
        value: the last score, None without one.
    """

    def __init__(self, tree: Branches, parent: Branch | None, name: str) -> None:
        self.id = name
        self.parent = parent
        self.value: float | None = None
        self._tree = tree
        self._ended: BranchEnded | None = None
        self._asked: set[Asked] = set()

    def __repr__(self) -> str:
        state = "open" if self.open else "ended"
        return f"<Branch {self.id} of {self.session_id!r}: {state}, value {self.value}>"

    @property
    def session_id(self) -> str:
        """The session that it is a branch of."""
        return self._tree.session_id

    @property
    def open(self) -> bool:
        """Whether it can be asked."""
        return self._ended is None

    @property
    def depth(self) -> int:
        """How many forks lie between it and the main line: 1 for one that was forked from there."""
        return 1 if self.parent is None else self.parent.depth + 1

    def fork(self, count: int = 1) -> list[Branch]:
        """Returns new branches that grow from this one, which stays open.

        Raises:
            BranchLimit: the session would have more than `AgentConfig.max_parallel_branches` open ones.
        """
        return self._tree._grow(self, count)

    def score(self, value: float) -> None:
        """Notes how good it is; more is better, and the last score counts."""
        self._check_open()
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise RequestError(f"a score must be a finite number, not {value!r}", param="value")
        self.value = float(value)

    def prune(self) -> None:
        """Ends it and all that was forked from it; nothing where it has ended already."""
        self._tree._prune(self)

    def tool_output(self, call_id: str, text: str, finished: bool = False) -> None:
        """Tells what a tool that this branch called has printed since the last call; see the engine's `tool_output`."""
        self._check_open()
        self._tree._host.lines.tool_output(tool_event(self.session_id, self.id, call_id, text, finished))

    @overload
    def generate(
        self, *, prompt: str, stream: Literal[False] = False, raw: bool = False, **options: Unpack[AnswerOptions]
    ) -> GenerateResult: ...

    @overload
    def generate(
        self, *, prompt: str, stream: Literal[True], raw: bool = False, **options: Unpack[AnswerOptions]
    ) -> Iterator[StreamItem]: ...

    def generate(
        self, *, prompt: str, stream: bool = False, raw: bool = False, **options: Unpack[AnswerOptions]
    ) -> GenerateResult | Iterator[StreamItem]:
        """The engine's `generate` on this branch."""
        items = self._ask(prompt_ask(prompt, self.session_id, stream, raw, Options(**options))).items(self._load())
        return items if stream else last(items)

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[AnswerOptions]
    ) -> GenerateResult: ...

    @overload
    def chat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[AnswerOptions]
    ) -> Iterator[StreamItem]: ...

    def chat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[AnswerOptions]
    ) -> GenerateResult | Iterator[StreamItem]:
        """The engine's `chat` on this branch."""
        items = self._ask(chat_ask(messages, self.session_id, stream, Options(**options))).items(self._load())
        return items if stream else last(items)

    @overload
    async def agenerate(
        self, *, prompt: str, stream: Literal[False] = False, raw: bool = False, **options: Unpack[AnswerOptions]
    ) -> GenerateResult: ...

    @overload
    async def agenerate(
        self, *, prompt: str, stream: Literal[True], raw: bool = False, **options: Unpack[AnswerOptions]
    ) -> AsyncIterator[StreamItem]: ...

    async def agenerate(
        self, *, prompt: str, stream: bool = False, raw: bool = False, **options: Unpack[AnswerOptions]
    ) -> GenerateResult | AsyncIterator[StreamItem]:
        """`generate` for an event loop."""
        asked = self._ask(prompt_ask(prompt, self.session_id, stream, raw, Options(**options)))
        items = asked.aitems(await asyncio.to_thread(self._load))
        return items if stream else await alast(items)

    @overload
    async def achat(
        self, messages: Messages, *, stream: Literal[False] = False, **options: Unpack[AnswerOptions]
    ) -> GenerateResult: ...

    @overload
    async def achat(
        self, messages: Messages, *, stream: Literal[True], **options: Unpack[AnswerOptions]
    ) -> AsyncIterator[StreamItem]: ...

    async def achat(
        self, messages: Messages, *, stream: bool = False, **options: Unpack[AnswerOptions]
    ) -> GenerateResult | AsyncIterator[StreamItem]:
        """`chat` for an event loop."""
        asked = self._ask(chat_ask(messages, self.session_id, stream, Options(**options)))
        items = asked.aitems(await asyncio.to_thread(self._load))
        return items if stream else await alast(items)

    def _ask(self, ask: Ask) -> Asked:
        self._check_open()
        return Asked(ask, self.id, self._watch)

    def _load(self) -> Engine:
        return self._tree._host.load()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise BranchEnded(self._ended.message)

    @contextmanager
    def _watch(self, asked: Asked) -> Iterator[None]:
        with self._tree._lock:
            self._check_open()
            self._asked.add(asked)
        try:
            yield
        finally:
            with self._tree._lock:
                self._asked.discard(asked)

    def _end(self, reason: str) -> None:
        """Closes it, with the tree's lock held."""
        self._ended = BranchEnded(f"branch {self.id} of session {self.session_id!r} {reason}")

    def _leave(self) -> None:
        """Stops what it still generates, and tells the engine that nothing more comes of it; it is closed."""
        lines = self._tree._host.lines
        engine = lines.engine()
        with self._tree._lock:
            open_questions = list(self._asked)
        for asked in open_questions:
            if engine is not None and self._ended is not None:
                asked.stop(engine, self._ended)
        lines.end(self.session_id, self.id, pruned=True)


class Branches:
    """The open branches of one session, in the order in which they were forked; thread-safe.

    As a context manager it prunes at the end what is still open. Iterating it yields the branches that are open when
    the iteration begins.
    """

    def __init__(self, host: Host, session_id: str) -> None:
        self._host = host
        self.session_id = session_id
        self._lock = threading.Lock()
        self._open: list[Branch] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.prune()

    def __iter__(self) -> Iterator[Branch]:
        with self._lock:
            return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def fork(self, count: int = 1) -> list[Branch]:
        """Returns new branches that grow from the session's main line.

        Raises:
            BranchLimit: the session would have more than `AgentConfig.max_parallel_branches` open ones.
        """
        return self._grow(None, count)

    def best(self) -> Branch:
        """Returns the open branch with the highest score, of equals the first.

        Raises:
            RequestError: none has a score.
        """
        scored = [(branch.value, branch) for branch in self if branch.value is not None]
        if not scored:
            raise RequestError(
                f"no open branch of session {self.session_id!r} has a score: call score(...) on them first"
            )
        return max(scored, key=lambda pair: pair[0])[1]

    def select(self, branch: Branch) -> None:
        """The session goes on from `branch`: it is the main line now, all other branches are pruned.

        What is asked of the session later, with the messages of the branch, finds what the branch has computed.

        Raises:
            BranchEnded: it is not open any more.
            RequestError: it is a branch of another session.
        """
        with self._lock:
            if isinstance(branch, Branch):
                branch._check_open()
            if branch not in self._open:
                raise RequestError(f"{branch!r} is no branch of session {self.session_id!r}", param="branch")
            others = [each for each in self._open if each is not branch]
            self._close([branch], f"was selected: go on with the engine's own calls, session_id={self.session_id!r}")
            self._close(others, f"was pruned when {branch.id} was selected: fork another one")
        for each in others:
            each._leave()
        self._host.lines.go_on(self.session_id, branch.id)

    def prune(self) -> None:
        """Ends all open branches; the main line goes on."""
        for branch in self:
            branch.prune()

    def _grow(self, parent: Branch | None, count: int) -> list[Branch]:
        """Opens `count` branches."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise RequestError(f"fork takes a whole number of at least 1, not {count!r}", param="count")
        limit = self._host.limit
        with self._lock:
            if parent is not None:
                parent._check_open()
            if len(self._open) + count > limit:
                raise BranchLimit(
                    f"session {self.session_id!r} has {len(self._open)} open branches; {count} more would be over "
                    f"max_parallel_branches={limit}: prune some, or raise AgentConfig.max_parallel_branches",
                    param="count",
                )
            made = [Branch(self, parent, self._host.lines.new()) for _ in range(count)]
            self._open += made
        return made

    def _prune(self, branch: Branch) -> None:
        """Ends a branch and all that grew from it."""
        with self._lock:
            gone = [each for each in self._open if _grew_from(each, branch)]
            self._close(gone, "was pruned: fork another one")
        for each in gone:
            each._leave()

    def _close(self, gone: Sequence[Branch], reason: str) -> None:
        """Closes branches, with the lock held."""
        self._open = [each for each in self._open if each not in gone]
        for branch in gone:
            branch._end(reason)


def _grew_from(branch: Branch | None, ancestor: Branch) -> bool:
    """Whether a branch is `ancestor`, or was forked from it over any number of forks."""
    while branch is not None and branch is not ancestor:
        branch = branch.parent
    return branch is ancestor
