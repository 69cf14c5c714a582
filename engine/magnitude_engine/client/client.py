"""The published client: one agent's access to a Magnitude server over HTTP, without torch.

    async with MagnitudeClient(config=AgentRuntimeConfig(optimization_target="latency")) as client:
        result = await client.generate_optimized(session_id="run-1", prompt="Goal: …\\nThought:")
        print(result["text"])

With `stream=True` a call returns an `AnswerStream`: items are `{"text": new text, "result": None}`, the last is
`{"text": "", "result": {...}}` with the same dict that a call without a stream returns.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypedDict, Unpack, overload

import httpx
import msgspec

from magnitude_engine.client.answers import Collector, GenerateResult, Origin, StreamItem
from magnitude_engine.client.health import RuntimeHealth, differences, other_model
from magnitude_engine.client.requests import (
    AnswerOptions,
    Ask,
    Options,
    chat_ask,
    encode,
    encode_feedback,
    encode_tools,
    prompt_ask,
)
from magnitude_engine.client.session import AgentSession
from magnitude_engine.client.transport import EventStream, Transport, base_url, decode
from magnitude_engine.config import AgentRuntimeConfig
from magnitude_engine.errors import ConfigError, NotReady, StatusError, StreamBroken, WrongEventLoop

__all__ = ["AnswerStream", "FeedbackReceipt", "MagnitudeClient", "RuntimeHealth"]

DEFAULT_ENDPOINT = "http://localhost:8000/v1"
ANY_MODEL = "default"

log = logging.getLogger("magnitude.client")


class FeedbackReceipt(TypedDict, total=False):
    """`status` is `acknowledged`, or `rejected` with a `reason`."""

    status: str
    reason: str


class RegisteredTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the server knows ahead.

    Attributes:
        grammar: `exact` where its calls cannot break its schema; `checked` where that is made sure of before they
            are sent, for the sake of `checked_keywords`.
    """

    name: str
    status: str
    grammar: str
    checked_keywords: tuple[str, ...] = ()


class RegisteredTools(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a registration; `ignored_keywords` assert nothing, because no standard defines them."""

    tools: tuple[RegisteredTool, ...] = msgspec.field(name="data")
    ignored_keywords: tuple[str, ...] = ()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class AnswerStream:
    """A streamed answer: iterate with `async for`; leaving it early with `aclose` stops the generation.

    The last item carries the result. A stream that breaks raises StreamBroken or RequestTimeout instead of it.
    """

    def __init__(self, events: EventStream, collector: Collector, check_loop: Callable[[], None]) -> None:
        self._events = events
        self._collector = collector
        self._check_loop = check_loop
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamItem:
        self._check_loop()
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._next_item()
        except BaseException:
            await self.aclose()
            raise
        if item["result"] is not None:
            await self.aclose()
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection; the server stops generating."""
        self._ended = True
        await self._events.aclose()

    async def _next_item(self) -> StreamItem:
        async for data in self._events:
            if data == b"[DONE]":
                return StreamItem(text="", result=self._collector.result())
            text = self._collector.add(data)
            if text:
                return StreamItem(text=text, result=None)
        raise StreamBroken(f"{self._collector.url} ended its stream without [DONE]; the text so far is not complete")


class MagnitudeClient:
    """Talks to one Magnitude server; use it in one event loop.

    Args:
        endpoint: base URL with its version path; default MAGNITUDE_ENDPOINT, then http://localhost:8000/v1.
        api_key: default MAGNITUDE_API_KEY; a server without configured keys accepts any.
        config: expectations and preferences, sent with each request.
        timeout: seconds without a byte from the server before RequestTimeout.
        max_retries: further attempts after failures that may pass (see `transport`).

    Raises:
        ConfigError: the endpoint is not a URL, the key cannot stand in a header, or `config` is something else.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        api_key: str | None = None,
        config: AgentRuntimeConfig | None = None,
        *,
        timeout: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
            raise ConfigError(f"timeout must be seconds above 0, not {timeout!r}", param="timeout")
        if isinstance(max_retries, bool) or not isinstance(max_retries, int) or max_retries < 0:
            raise ConfigError(f"max_retries must be 0, 1, 2 …, not {max_retries!r}", param="max_retries")
        if config is not None and not isinstance(config, AgentRuntimeConfig):
            raise ConfigError(f"config must be an AgentRuntimeConfig(...), not {type(config).__name__}", param="config")
        key = api_key if api_key is not None else os.environ.get("MAGNITUDE_API_KEY")
        if key is not None and not (isinstance(key, str) and key.isascii() and key.isprintable()):
            raise ConfigError("api_key must be printable ASCII text without line breaks", param="api_key")
        known = os.environ.get("MAGNITUDE_ENDPOINT") or DEFAULT_ENDPOINT
        where = base_url(known if endpoint is None or endpoint == "" else endpoint)
        self._config = config or AgentRuntimeConfig()
        self._transport = Transport(where, key, timeout, max_retries)
        self._model: str | None = None
        self._warned: set[str] = set()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None

    async def __aenter__(self) -> Self:
        self._check_loop()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes all connections. Optional: a program may end without it."""
        self._check_loop()
        await self._transport.aclose()

    async def verify_runtime_health(self) -> RuntimeHealth:
        """Returns the server's state, checked against the config; differences are warnings, also in the log.

        Raises:
            NotReady: the server answers but cannot serve, or its draft does not fit its model.
            ClientError: see `MagnitudeClient.chat`.
        """
        self._check_loop()
        url = self._transport.base.copy_with(path=self._transport.base.path.removesuffix("/v1") + "/health")
        try:
            response = await self._transport.request("GET", url)
        except StatusError as problem:
            if problem.status == 503:
                raise NotReady(f"{problem.message}. Wait for the model to load, or see the server's log") from problem
            raise
        health = decode(response, RuntimeHealth)
        served = await self._served_models()
        warnings = (*health.warnings, *differences(self._config, served, health))
        for warning in warnings:
            self._warn_once(warning)
        return msgspec.structs.replace(health, warnings=warnings)

    @overload
    async def generate_optimized(
        self,
        *,
        prompt: str,
        session_id: str | None = None,
        stream: Literal[False] = False,
        raw: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult: ...

    @overload
    async def generate_optimized(
        self,
        *,
        prompt: str,
        session_id: str | None = None,
        stream: Literal[True],
        raw: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> AnswerStream: ...

    async def generate_optimized(
        self,
        *,
        prompt: str,
        session_id: str | None = None,
        stream: bool = False,
        raw: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult | AnswerStream:
        """Returns the answer to `prompt`, which is the user's text of a chat, or with `raw` the model's own input.

        Args:
            session_id: one id for all steps of a run; the server keeps its cache. None lets the server guess.
            stream: return an `AnswerStream` instead.
            options: temperature, max_tokens, stop_sequences, track_feedback, tools and more (`AnswerOptions`).

        Raises:
            RequestError: an argument cannot be sent.
            ClientError: see `MagnitudeClient.chat`.
        """
        return await self._answer(prompt_ask(prompt, session_id, stream, raw, Options(**options)))

    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stream: Literal[False] = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stream: Literal[True],
        **options: Unpack[AnswerOptions],
    ) -> AnswerStream: ...

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str | None = None,
        stream: bool = False,
        **options: Unpack[AnswerOptions],
    ) -> GenerateResult | AnswerStream:
        """Returns the answer to OpenAI `messages`; arguments as in `generate_optimized`.

        Raises:
            RequestError: an argument cannot be sent.
            ClientError: ConnectionFailed, RequestTimeout, AuthenticationFailed, StatusError for any other HTTP
                error, StreamBroken for an answer that is not complete, WrongEventLoop.
        """
        return await self._answer(chat_ask(messages, session_id, stream, Options(**options)))

    async def register_tools(self, tools: Sequence[Mapping[str, Any]], *, system: str = "") -> RegisteredTools:
        """Has the server compile the schemas of OpenAI tool definitions, and compute what prompts with them begin with.

        Later requests with the same `tools`, in the same order, and the same system message find that done.

        Raises:
            RequestError: an argument cannot be sent.
            StatusError: 400 for a schema that can be neither enforced nor checked, naming tool and keyword.
        """
        self._check_loop()
        response = await self._transport.request("POST", self._transport.url("/tools"), encode_tools(tools, system))
        return decode(response, RegisteredTools)

    def session(self, session_id: str) -> AgentSession:
        """Returns one session of the server: its report, its end, and a stream of events of its tools."""
        return AgentSession(session_id, self._transport, self._check_loop)

    async def submit_telemetry_feedback(self, feedback: Mapping[str, Any]) -> FeedbackReceipt:
        """Tells the server how a session ended: `session_id`, `success`, `error_reason`, `timestamp` (ISO 8601).

        With `branch` it is about that branch, which is dead where `success` is False.

        Raises:
            RequestError: a field is missing, unknown or wrong.
            StatusError: with `error_code` `feedback_unsupported` when this server has no feedback route.
        """
        self._check_loop()
        url = self._transport.url("/feedback")
        try:
            response = await self._transport.request("POST", url, encode_feedback(feedback))
        except StatusError as problem:
            if problem.status != 404:
                raise
            raise StatusError(
                f"this server has no feedback route (POST {url} answered 404): the feedback was not stored; "
                "update the server, or leave feedback out",
                status=404,
                error_code="feedback_unsupported",
                param=None,
                request_id=problem.request_id,
            ) from problem
        return decode(response, FeedbackReceipt)

    async def _answer(self, ask: Ask) -> GenerateResult | AnswerStream:
        self._check_loop()
        body = encode(ask, self._model or ANY_MODEL, self._config)
        if self._model is None:  # what cannot be written was refused by now, before anything is sent
            body = encode(ask, await self._choose_model(), self._config)
        url = self._transport.url(ask.path)
        try:
            if ask.stream:
                response, events = await self._transport.stream(url, body)
                return AnswerStream(events, _collector(ask, response), self._check_loop)
            response = await self._transport.request("POST", url, body)
        except StatusError as problem:
            if problem.error_code == "model_not_found":
                self._model = None  # the server serves another one by now: look again at the next call
            raise
        collector = _collector(ask, response)
        collector.add(response.content)
        return collector.result()

    async def _choose_model(self) -> str:
        """Returns the model to ask for: the config's where the server lists it, else the served one.

        A server in front of an upstream that takes any name lists none.
        """
        served = await self._served_models()
        wanted = self._config.target_model_path
        if not served:
            chosen = wanted or ANY_MODEL
        elif wanted in served:
            chosen = wanted
        else:
            chosen = served[0]
            if wanted is not None:
                self._warn_once(other_model(wanted, served))
        self._model = chosen
        return chosen

    async def _served_models(self) -> tuple[str, ...]:
        response = await self._transport.request("GET", self._transport.url("/models"))
        return tuple(model.id for model in decode(response, _Models).data)

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise WrongEventLoop(
                "this MagnitudeClient belongs to another event loop: make one inside each asyncio.run(...)"
            )

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            log.warning("%s", warning)


def _collector(ask: Ask, response: httpx.Response) -> Collector:
    headers = response.headers
    origin = Origin(
        session_id=ask.session_id or headers.get("x-magnitude-session", ""),
        route=headers.get("x-magnitude-route", ""),
        request_id=headers.get("x-request-id", ""),
        logprobs=ask.options.logprobs is not None and ask.options.logprobs is not False,
    )
    return Collector(origin, str(response.request.url))
