"""The engine inside the caller's own process, with the calls and results of the published client.

    with MagnitudeEngine(AgentConfig(model="smollm2")) as engine:
        print(engine.generate(session_id="run-1", prompt="Goal: …\\nThought:")["text"])

`generate` and `chat` block; `agenerate` and `achat` do not hold up an event loop. With `stream=True` they return an
iterator of `{"text": new text, "result": None}` whose last item carries the result; closing it early stops the
generation.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import queue
import secrets
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack, overload

from magnitude_engine import api
from magnitude_engine.client.answers import GenerateResult, StreamItem
from magnitude_engine.client.requests import AnswerOptions, Ask, Options, chat_ask, prompt_ask
from magnitude_engine.config import AgentConfig, EngineConfig, default_data_dir
from magnitude_engine.errors import ConfigError, EngineError, ModelNotFound
from magnitude_engine.inprocess.local import EventCollector, to_generate

if TYPE_CHECKING:
    from magnitude_engine.engine import Engine

ENDS = (api.Completed, api.Failed)


def find_model(name: str, data_dir: Path) -> Path:
    """Returns the file or folder of a model: a path, or the name of one that was pulled into `data_dir`.

    Raises:
        ModelNotFound: neither; says what to do.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path.absolute()
    pulled = sorted((data_dir / "models" / name).glob("*.gguf")) if os.sep not in name else []
    if pulled:
        return pulled[0]
    raise ModelNotFound(
        f"model {name!r} is not on this machine: it is no file or folder, and {data_dir / 'models'} has none of that "
        "name. Run `magnitude pull smollm2`, and set MAGNITUDE_MODEL (or AgentConfig.model) to smollm2 or a path"
    )


class _Asked:
    """One question, in the engine's terms; made before the engine is loaded, so that a wrong one costs nothing."""

    def __init__(self, ask: Ask) -> None:
        request = f"req_{uuid.uuid4().hex}"
        session = ask.session_id or f"session_{uuid.uuid4().hex}"
        self._generate = to_generate(ask, request, session, secrets.randbits(63))
        self._collector = EventCollector(ask, request, session)

    def items(self, engine: Engine) -> Iterator[StreamItem]:
        """Asks, and yields the answer; closing the iterator cancels the request."""
        events: queue.SimpleQueue[api.AnswerEvent] = queue.SimpleQueue()
        ended = False
        engine.submit(self._generate, events.put)
        try:
            while not ended:
                event = events.get()
                ended = isinstance(event, ENDS)
                item = self._collector.add(event)
                if item is not None:
                    yield item
        finally:
            if not ended:
                engine.cancel(self._generate.request, self._generate.epoch)

    async def aitems(self, engine: Engine) -> AsyncIterator[StreamItem]:
        """The same for an event loop, which it never blocks."""
        events: asyncio.Queue[api.AnswerEvent] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        ended = False

        def deliver(event: api.AnswerEvent) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            await asyncio.to_thread(engine.submit, self._generate, deliver)
            while not ended:
                event = await events.get()
                ended = isinstance(event, ENDS)
                item = self._collector.add(event)
                if item is not None:
                    yield item
        finally:
            if not ended:
                engine.cancel(self._generate.request, self._generate.epoch)


class MagnitudeEngine:
    """One model in this process; thread-safe. Nothing is loaded before `warmup` or the first question.

    Raises:
        ModelError: from `warmup` and the first question, when the model is not there, not supported or too large.
        RequestError: from questions, for a value that cannot be used; `param` names it.
        EngineError: from questions, when the engine is closed or failed.
    """

    def __init__(self, config: AgentConfig | None = None, *, kv_memory_mb: int = 2048) -> None:
        """`kv_memory_mb` is the memory for keys and values, MiB; it is allocated by `warmup`."""
        if config is not None and not isinstance(config, AgentConfig):
            raise ConfigError(
                "config must be an AgentConfig, for example MagnitudeEngine(AgentConfig(model='smollm2')), "
                f"not {type(config).__name__}",
                param="config",
            )
        self._config = config or AgentConfig()
        self._kv_memory_mb = kv_memory_mb
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._warm = False
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def warmup(self) -> None:
        """Loads the model, allocates the cache and computes one token; a progress line on a terminal; idempotent."""
        engine = self._loaded()
        if not self._warm:
            _last(_Asked(Ask(prompt="a", options=Options(max_tokens=1))).items(engine))
            self._warm = True

    def close(self) -> None:
        """Ends open questions with an error and frees model and cache; may be called more than once."""
        with self._lock:
            self._closed = True
            engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

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
        asked = _Asked(prompt_ask(prompt, session_id, stream, raw, Options(**options)))
        items = asked.items(self._loaded())
        return items if stream else _last(items)

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
        asked = _Asked(chat_ask(messages, session_id, stream, Options(**options)))
        items = asked.items(self._loaded())
        return items if stream else _last(items)

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
        asked = _Asked(prompt_ask(prompt, session_id, stream, raw, Options(**options)))
        items = asked.aitems(await asyncio.to_thread(self._loaded))
        return items if stream else await _alast(items)

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
        asked = _Asked(chat_ask(messages, session_id, stream, Options(**options)))
        items = asked.aitems(await asyncio.to_thread(self._loaded))
        return items if stream else await _alast(items)

    def _loaded(self) -> Engine:
        with self._lock:
            if self._closed:
                raise EngineError("this MagnitudeEngine is closed; make another one")
            if self._engine is None:
                self._engine = _load(self._config, self._kv_memory_mb)
            return self._engine


def _load(config: AgentConfig, kv_memory_mb: int) -> Engine:
    """Returns a running engine for `config`."""
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "the in-process engine needs PyTorch, which is not installed: pip install 'magnitude-runtime[engine]'"
        )
    name = os.environ.get("MAGNITUDE_MODEL") or config.model
    settings = EngineConfig(
        model_path=str(find_model(name, default_data_dir())),
        model_name=name,
        optimization_level=config.optimization_level,
        kv_memory_mb=kv_memory_mb,
        max_n=config.max_parallel_branches,
    )
    from magnitude_engine.engine import Engine
    from magnitude_engine.model.loader import load_model

    terminal = sys.stderr.isatty()
    engine = Engine(load_model(settings, _show_progress if terminal else None), settings)
    if terminal:
        sys.stderr.write("\n")
    engine.start()
    return engine


def _show_progress(share: float) -> None:
    sys.stderr.write(f"\rloading the model {round(share * 100):3d} % ")
    sys.stderr.flush()


def _last(items: Iterator[StreamItem]) -> GenerateResult:
    """Returns the result at the end of `items`."""
    for item in items:
        if item["result"] is not None:
            return item["result"]
    raise EngineError("the engine ended the answer without a result")


async def _alast(items: AsyncIterator[StreamItem]) -> GenerateResult:
    async for item in items:
        if item["result"] is not None:
            return item["result"]
    raise EngineError("the engine ended the answer without a result")
