"""What a session's next prompt will begin with, as far as it is settled.

After a step the client sends the same conversation again with the answer and something new behind it: the results
of the tools that were called, or the user's next words. What stands before that is known at once; of a running
tool's output, what it has printed so far. The next prompt is rendered with several texts in the unknown place, and
the ids that all of them have in common are settled:

    … <|im_end|> user ⏎ <tool_response> ⏎ total 4 ⏎ src/ma│a
    … <|im_end|> user ⏎ <tool_response> ⏎ total 4 ⏎ src/ma│ 0
    … <|im_end|> user ⏎ <tool_response> ⏎ total 4 ⏎ src/  │⏎…

A wrong guess costs the time of computing it, which nobody else wanted, and changes nothing that is said.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_engine.errors import MagnitudeError
from magnitude_engine.kv.radix import common_prefix
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.model.prompt import PromptEncoder
from magnitude_engine.telemetry import worker_log

MAX_SESSIONS = 512
MAX_OUTPUT_CHARS = 400_000
CONTINUATIONS = ("a", " 0", "\n\n", "Z9")


class Settled(NamedTuple):
    """Ids that the next prompt of a session begins with.

    Attributes:
        tool: whose output follows them; "" for a user's words.
        hold: whether the session itself comes back for them; otherwise any request may.
    """

    owner: SessionKey
    ids: tuple[int, ...] = ()
    tool: str = ""
    hold: bool = True


def _nothing() -> None:
    """What to do when nobody waits."""


class _Forms(NamedTuple):
    """A conversation and the messages of which one comes behind it."""

    base: api.ChatInput
    ends: tuple[api.Message, ...]


@dataclass(slots=True)
class _Output:
    """What a tool has printed: the first `MAX_OUTPUT_CHARS` of it."""

    pieces: list[str] = field(default_factory=list)
    chars: int = 0
    finished: bool = False

    def add(self, text: str) -> None:
        """Takes in what came since the last event."""
        text = text[: MAX_OUTPUT_CHARS - self.chars]
        if text:
            self.pieces.append(text)
            self.chars += len(text)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


@dataclass(slots=True)
class _Expected:
    """A session between two steps.

    Attributes:
        chat: the conversation up to and with the answer.
        outputs: by id, for each call of the answer what its tool has printed.
    """

    chat: api.ChatInput
    outputs: dict[str, _Output]


class Predictor:
    """Renders on a thread of its own, so that neither steps nor the server's loop wait for it.

    Args:
        limit: most ids of a prompt.
        settled: called on that thread with each prediction, and with whom to tell when it is carried out.
    """

    def __init__(
        self, prompts: PromptEncoder, limit: int, settled: Callable[[Settled, Callable[[], None]], None]
    ) -> None:
        self._prompts = prompts
        self._limit = limit
        self._settled = settled
        self._sessions: OrderedDict[SessionKey, _Expected] = OrderedDict()
        # Sessions with a prediction that has not begun: it will see what comes meanwhile.
        self._due: set[SessionKey] = set()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="magnitude-predict")

    def answered(self, owner: SessionKey, chat: api.ChatInput, answer: api.Message) -> None:
        """A step of the session ended with `answer`."""
        whole = api.ChatInput(messages=(*chat.messages, answer), tools=chat.tools, tool_choice=chat.tool_choice)
        with self._lock:
            self._sessions.pop(owner, None)
            self._sessions[owner] = _Expected(whole, {call.id: _Output() for call in answer.tool_calls})
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        self._ask(owner)

    def tool_event(self, event: api.ToolEvent) -> None:
        """A tool that the session called started, printed more, or finished; unknown sessions and calls are ignored."""
        owner = SessionKey(event.tenant, event.session, event.branch)
        with self._lock:
            expected = self._sessions.get(owner)
            output = None if expected is None else expected.outputs.get(event.call)
            if output is None:
                return
            output.add(event.text)
            output.finished = output.finished or event.kind == "finished"
        if event.kind != "started":
            self._ask(owner)

    def expect(self, expect: api.Expect) -> None:
        """The session comes back with other messages before its last answer; unknown sessions are ignored."""
        owner = SessionKey(expect.tenant, expect.session, expect.branch)
        with self._lock:
            expected = self._sessions.get(owner)
            if expected is None:
                return
            messages = (*expect.messages, expected.chat.messages[-1])
            expected.chat = msgspec.structs.replace(expected.chat, messages=messages)
        self._ask(owner)

    def register(self, register: api.Register, done: Callable[[], None]) -> None:
        """Settles what every prompt with these tools and this system prompt begins with.

        `done` is called when that is known to be impossible; otherwise it goes on with the prediction.
        """
        system = (api.Message(role="system", content=register.system),) if register.system else ()
        ends = tuple(api.Message(role="user", content=text) for text in CONTINUATIONS)
        base = api.ChatInput(messages=system, tools=register.tools)
        name = hashlib.blake2b(msgspec.msgpack.encode(base), digest_size=16).hexdigest()
        settled = Settled(SessionKey(register.tenant, f"registered {name}", "main"), hold=False)
        asked = self._pool.submit(self._settle, settled, _Forms(base, ends), done)
        asked.add_done_callback(lambda future: done() if future.cancelled() else None)

    def forget(self, tenant: str, session: str, branch: str | None) -> None:
        """Nothing more comes of a session, or of one of its branches."""
        with self._lock:
            for owner in list(self._sessions):
                if owner[:2] == (tenant, session) and branch in (None, owner.branch):
                    del self._sessions[owner]

    def wait(self) -> None:
        """Returns when everything asked before is settled."""
        self._pool.submit(_nothing).result()

    def close(self) -> None:
        """Stops; what is not rendered yet never will be."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, owner: SessionKey) -> None:
        with self._lock:
            if owner in self._due:
                return
            self._due.add(owner)
        self._pool.submit(self._predict, owner)

    def _predict(self, owner: SessionKey) -> None:
        with self._lock:
            self._due.discard(owner)
            expected = self._sessions.get(owner)
            if expected is None:
                return
            done, tool, ends = _next_messages(expected)
        chat = expected.chat
        base = api.ChatInput(messages=(*chat.messages, *done), tools=chat.tools, tool_choice=chat.tool_choice)
        self._settle(Settled(owner, tool=tool), _Forms(base, ends), _nothing)

    def _settle(self, settled: Settled, forms: _Forms, done: Callable[[], None]) -> None:
        """Reports the ids that all forms of a prompt begin with."""
        try:
            ids = self._common(forms)
        except MagnitudeError as error:
            # The conversation is the client's: one that cannot be rendered, or is too long, is told when it comes.
            worker_log.debug("nothing is computed ahead: %s", error)
            ids = ()
        if ids:
            self._settled(settled._replace(ids=ids), done)
        else:
            done()

    def _common(self, forms: _Forms) -> tuple[int, ...]:
        base = forms.base
        common: tuple[int, ...] | None = None
        for end in forms.ends:
            chat = api.ChatInput(messages=(*base.messages, end), tools=base.tools, tool_choice=base.tool_choice)
            ids = self._prompts.encode(chat, self._limit)
            common = ids if common is None else common[: common_prefix(common, ids)]
        return (common or ())[: self._limit]


def _next_messages(expected: _Expected) -> tuple[tuple[api.Message, ...], str, tuple[api.Message, ...]]:
    """Returns the results that are complete, the tool that is next, and how its message may go on."""
    done: list[api.Message] = []
    for call in expected.chat.messages[-1].tool_calls:
        output = expected.outputs[call.id]
        message = api.Message(role="tool", content=output.text, tool_call_id=call.id)
        if not output.finished:
            return tuple(done), call.name, tuple(_longer(message, text) for text in CONTINUATIONS)
        done.append(message)
    user = api.Message(role="user")
    if not done:
        return (), "", tuple(_longer(user, text) for text in CONTINUATIONS)
    # All results are there: the answer follows, or the user's words behind the results.
    return tuple(done[:-1]), "", (done[-1],)


def _longer(message: api.Message, text: str) -> api.Message:
    return api.Message(role=message.role, content=message.content + text, tool_call_id=message.tool_call_id)
