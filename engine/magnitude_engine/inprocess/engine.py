"""The engine inside the caller's own process, with the calls and results of the published client.

    with MagnitudeEngine(AgentConfig(model="smollm2")) as engine:
        print(engine.generate(session_id="run-1", prompt="Goal: …\\nThought:")["text"])

`generate` and `chat` block; `agenerate` and `achat` do not hold up an event loop. With `stream=True` they return an
iterator of `{"text": new text, "result": None}` whose last item carries the result; closing it early stops the
generation. The calls about sessions, tools and branches never wait for the model.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload
from weakref import WeakValueDictionary

from magnitude_engine import api
from magnitude_engine.client.answers import GenerateResult, StreamItem
from magnitude_engine.client.requests import AnswerOptions, Ask, Options, chat_ask, prompt_ask
from magnitude_engine.config import AgentConfig
from magnitude_engine.errors import ConfigError, EngineError, RequestError
from magnitude_engine.inprocess.asked import Asked, alast, last
from magnitude_engine.inprocess.branches import Branches, Host
from magnitude_engine.inprocess.lines import Lines, check_session, tool_event
from magnitude_engine.inprocess.local import TENANT, read_tools
from magnitude_engine.inprocess.registered import Registrations
from magnitude_engine.inprocess.start import Memory, start_engine

if TYPE_CHECKING:
    from magnitude_engine.engine import Engine

ANSWER_CHECK_S = 0.1


class MagnitudeEngine:
    """One model in this process; thread-safe. Nothing is loaded before `warmup` or the first question.

    Raises:
        ModelError: from `warmup` and the first question, when the model is not there, not supported or too large.
        RequestError: from all calls, for a value that cannot be used; `param` names it.
        EngineError: from all calls, when the engine is closed; from questions, when it failed.
    """

    def __init__(
        self,
        config: AgentConfig | None = None,
        *,
        kv_memory_mb: int = 2048,
        kv_host_mb: int = 0,
        kv_disk_mb: int = 2048,
        speculation: bool = True,
    ) -> None:
        """Sizes are those of the cache of keys and values, MiB. Nothing here changes an answer.

        Args:
            kv_memory_mb: on the device; `warmup` allocates it.
            kv_host_mb: in host memory below a GPU; on a CPU the device's memory is that already.
            kv_disk_mb: in `kv/inprocess` of the data folder, where it stays for the next process; 0 writes nothing.
                Where another engine uses that folder, this one goes on without it and logs a warning.
            speculation: drafts tokens and verifies them, where that is measured to be faster.
        """
        if config is not None and not isinstance(config, AgentConfig):
            raise ConfigError(
                "config must be an AgentConfig, for example MagnitudeEngine(AgentConfig(model='smollm2')), "
                f"not {type(config).__name__}",
                param="config",
            )
        if not isinstance(speculation, bool):
            raise ConfigError(f"speculation must be True or False, not {speculation!r}", param="speculation")
        self._config = config or AgentConfig()
        self._speculation = speculation
        self._memory = Memory(kv_memory_mb=kv_memory_mb, kv_host_mb=kv_host_mb, kv_disk_mb=kv_disk_mb)
        self._lock = threading.Lock()
        self._naming = threading.Lock()
        self._engine: Engine | None = None
        self._warm = False
        self._closed = False
        self._stopped = threading.Event()
        self._registered = Registrations(self._stopped)
        self._lines = Lines(lambda: self._engine)
        self._host = Host(self._config.max_parallel_branches, self._lines, self._loaded)
        self._branches: WeakValueDictionary[str, Branches] = WeakValueDictionary()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def warmup(self) -> None:
        """Loads the model, allocates the cache, computes what was registered, and one token; idempotent.

        Progress is shown on a terminal.
        """
        engine = self._loaded()
        self._registered.wait()
        if not self._warm:
            last(Asked(Ask(prompt="a", options=Options(max_tokens=1))).items(engine))
            self._warm = True

    def close(self) -> None:
        """Ends open questions with an error and frees model and cache; may be called more than once.

        With a disk tier it takes up to some seconds to write what is not there yet.
        """
        with self._lock:
            self._closed = True
            engine, self._engine = self._engine, None
        self._stopped.set()
        if engine is not None:
            engine.close()

    def register_tools(self, tools: Sequence[Mapping[str, Any]], *, system: str = "") -> None:
        """Has what prompts with exactly these tools, and this system message, begin with computed ahead.

        Later requests with the same `tools`, in the same order, find it in the cache; it does not become their default,
        each names its tools itself. Given before `warmup`, that waits for it; given later, it is computed as soon as
        nothing else runs, and another `warmup` waits for it. `optimization_level="off"` computes nothing ahead.

        Args:
            tools: OpenAI tool definitions; may be empty where `system` is given.
        """
        chat_ask((), None, False, Options(tools=tools))
        if not isinstance(system, str):
            raise RequestError(f"system must be text, not {type(system).__name__}", param="system")
        if not tools and not system:
            raise RequestError("tools are empty: give OpenAI tool definitions, or a system text", param="tools")
        register = api.Register(tenant=TENANT, tools=read_tools(tools), system=system)
        self._check_open()
        if self._config.optimization_level != "off":
            self._registered.add(register)
            # Read after it was added: an engine that is being loaded meanwhile takes it up itself.
            engine = self._engine
            if engine is not None:
                self._registered.submit(engine)

    def tool_output(self, session_id: str, call_id: str, text: str, finished: bool = False) -> None:
        """Tells what a tool that the session called prints, as it comes, so that it is computed while the tool runs.

        It costs a request nothing: what is computed ahead makes way. The next request carries the whole result as
        ever. Unknown sessions and calls are ignored.

        Args:
            call_id: the `id` of the tool call in the session's last answer.
            text: what came since the last call.
            finished: whether that was all.
        """
        check_session(session_id)
        self._check_open()
        self._lines.tool_output(tool_event(session_id, self._lines.main(session_id), call_id, text, finished))

    def end_session(self, session_id: str) -> None:
        """Says that nothing more comes of a session: its pages, and those of its branches, are the first to go."""
        check_session(session_id)
        self._check_open()
        branches = self._branches.get(session_id)
        if branches is not None:
            branches.prune()
        self._lines.end(session_id, None)

    def branches(self, session_id: str) -> Branches:
        """Returns the session's branches, of which none is open at first; see `Branches`.

        The same object as long as anybody holds it.
        """
        check_session(session_id)
        self._check_open()
        with self._naming:
            found = self._branches.get(session_id)
            if found is None:
                found = self._branches[session_id] = Branches(self._host, session_id)
            return found

    def inspect(self) -> api.CacheReport:
        """Returns what the cache holds: pages, tiers, shared prefixes, sessions; it waits for a running step."""
        reports: queue.SimpleQueue[api.CacheReport] = queue.SimpleQueue()
        self._loaded().inspect(reports.put)
        while True:
            try:
                return reports.get(timeout=ANSWER_CHECK_S)
            except queue.Empty:
                if self._stopped.is_set():
                    raise EngineError("the engine stopped before it could be inspected; make another one") from None

    def misses(self, session_id: str) -> api.SessionMisses:
        """Returns what the prompts of a session found in the cache and why not more; it waits for nothing."""
        check_session(session_id)
        return self._loaded().misses(api.AskMisses(request="", epoch=0, tenant=TENANT, session=session_id))

    @overload
    def generate(
        self,
        *,
        prompt: str,
        session_id: str | None = None,
        stream: Literal[False] = False,
        raw: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult: ...

    @overload
    def generate(
        self,
        *,
        prompt: str,
        session_id: str | None = None,
        stream: Literal[True],
        raw: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> Iterator[StreamItem]: ...

    def generate(
        self,
        *,
        prompt: str,
        session_id: str | None = None,
        stream: bool = False,
        raw: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult | Iterator[StreamItem]:
        """Returns the answer to `prompt`, the user's text of a chat, or with `raw` the model's own input.

        Arguments and result are those of `MagnitudeClient.generate_optimized`; logprobs always have the form of Chat
        Completions.
        """
        asked = self._ask(prompt_ask(prompt, session_id, stream, raw, Options(**options)))
        items = asked.items(self._loaded())
        return items if stream else last(items)

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stream: Literal[False] = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult: ...

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stream: Literal[True],
        **options: Unpack[AnswerOptions],
    ) -> Iterator[StreamItem]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stream: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult | Iterator[StreamItem]:
        """Returns the answer to OpenAI `messages`; see `generate`."""
        asked = self._ask(chat_ask(messages, session_id, stream, Options(**options)))
        items = asked.items(self._loaded())
        return items if stream else last(items)

    @overload
    async def agenerate(
        self,
        *,
        prompt: str,
        session_id: str | None = None,
        stream: Literal[False] = False,
        raw: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult: ...

    @overload
    async def agenerate(
        self,
        *,
        prompt: str,
        session_id: str | None = None,
        stream: Literal[True],
        raw: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> AsyncIterator[StreamItem]: ...

    async def agenerate(
        self,
        *,
        prompt: str,
        session_id: str | None = None,
        stream: bool = False,
        raw: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult | AsyncIterator[StreamItem]:
        """`generate` for an event loop."""
        asked = self._ask(prompt_ask(prompt, session_id, stream, raw, Options(**options)))
        items = asked.aitems(await asyncio.to_thread(self._loaded))
        return items if stream else await alast(items)

    @overload
    async def achat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stream: Literal[False] = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult: ...

    @overload
    async def achat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stream: Literal[True],
        **options: Unpack[AnswerOptions],
    ) -> AsyncIterator[StreamItem]: ...

    async def achat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stream: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult | AsyncIterator[StreamItem]:
        """`chat` for an event loop."""
        asked = self._ask(chat_ask(messages, session_id, stream, Options(**options)))
        items = asked.aitems(await asyncio.to_thread(self._loaded))
        return items if stream else await alast(items)

    def _ask(self, ask: Ask) -> Asked:
        return Asked(ask, self._lines.main(ask.session_id))

    def _loaded(self) -> Engine:
        """Returns the engine, which it loads the first time."""
        with self._lock:
            self._check_open()
            if self._engine is None:
                self._engine = start_engine(self._config, self._memory, self._speculation, self._stopped.set)
                self._registered.submit(self._engine)
            return self._engine

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this MagnitudeEngine is closed; make another one")
