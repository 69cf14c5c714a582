"""Asks an OpenAI-compatible server one streamed chat question, and times the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import httpx
import msgspec

from magnitude_proxy import sse
from magnitude_proxy.bench.recorded import Message, Tool

ANSWER_S = 1800.0
_ERROR_LENGTH = 300


class StreamOptions(msgspec.Struct, frozen=True):
    """What the stream carries besides text."""

    include_usage: bool = True


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a request; drawn greedily, so that a server says the same each time."""

    model: str
    messages: Sequence[Message]
    max_tokens: int
    temperature: float
    stream: bool
    stream_options: StreamOptions
    tools: Sequence[Tool] = ()
    ignore_eos: bool = False


def question(model: str, messages: Sequence[Message], tools: Sequence[Tool], tokens: int, fixed: bool) -> Question:
    """Returns a request for at most `tokens` tokens, for exactly so many where `fixed`."""
    return Question(
        model=model,
        messages=messages,
        tools=tools,
        max_tokens=tokens,
        ignore_eos=fixed,
        temperature=0.0,
        stream=True,
        stream_options=StreamOptions(),
    )


class Said(NamedTuple):
    """A tool call in an answer; `arguments` is JSON text."""

    name: str
    arguments: str


class Counts(NamedTuple):
    """Tokens as the server counts them; None where it does not say."""

    prompt: int | None = None
    cached: int | None = None
    output: int | None = None
    drafted: int | None = None
    accepted: int | None = None


class Answer(NamedTuple):
    """What came back.

    Attributes:
        first_s: from the request's first byte out to the first text or tool call in; None without any.
        wall_s: to the end of the stream.
        finish: the `finish_reason`.
        error: why there is no complete answer; empty where there is one.
    """

    first_s: float | None
    wall_s: float
    text: str = ""
    calls: tuple[Said, ...] = ()
    counts: Counts = Counts()
    finish: str = ""
    error: str = ""


class Asker:
    """Asks one server, on a connection of its own for each question.

    Some servers close an idle connection at the moment at which the next question is sent on it.

    Args:
        url: base URL with its version path, for example `http://127.0.0.1:8000/v1`.
        key: sent as bearer token where there is one.
        clock: seconds, monotonic.
    """

    def __init__(self, url: str, key: str | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Plain HTTP needs no certificates, and to load them takes longer than to ask.
        self._client = httpx.Client(
            base_url=url,
            timeout=ANSWER_S,
            headers=headers,
            trust_env=False,
            verify=not url.startswith("http://"),
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._clock = clock

    def close(self) -> None:
        """Gives up what it holds."""
        self._client.close()

    def model(self) -> str:
        """Returns the first model that the server lists.

        Raises:
            httpx.HTTPError, msgspec.DecodeError: it does not answer, or lists none.
        """
        answer = self._client.get("models").raise_for_status()
        return msgspec.json.decode(answer.content, type=_Models).data[0].id

    def ask(self, body: Question) -> Answer:
        """Returns the answer; what goes wrong is told in it."""
        content = msgspec.json.encode(body)
        heard = _Heard(self._clock)
        headers = {"Content-Type": "application/json"}
        try:
            with self._client.stream("POST", "chat/completions", content=content, headers=headers) as reply:
                if reply.status_code != 200:
                    heard.error = f"status {reply.status_code}: {reply.read()[:_ERROR_LENGTH].decode(errors='replace')}"
                else:
                    parser = sse.EventParser()
                    for piece in reply.iter_raw():
                        for event in parser.feed(piece):
                            heard.take(event.data)
        except (httpx.HTTPError, sse.OversizedEvent, msgspec.DecodeError) as error:
            heard.error = f"{type(error).__name__}: {error}"[:_ERROR_LENGTH]
        return heard.answer()


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _CallPiece(msgspec.Struct):
    index: int = 0
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[_CallPiece] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Figures(msgspec.Struct):
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    magnitude: _Figures | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's own figures."""

    cache_n: int | None = None
    draft_n: int | None = None
    draft_n_accepted: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None


class _Heard:
    """An answer as it comes in."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._text: list[str] = []
        self._calls: dict[int, list[str]] = {}
        self._finish = ""
        self._done = False
        self._usage: _Usage | None = None
        self._timings = _Timings()
        self.error = ""

    def take(self, data: bytes) -> None:
        """Takes in one event."""
        now = self._clock() - self._began
        if data == sse.DONE_DATA:
            self._done = True
            return
        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            self.error = f"in the stream: {chunk.error}"[:_ERROR_LENGTH]
        self._usage = chunk.usage or self._usage
        self._timings = chunk.timings or self._timings
        for choice in chunk.choices:
            self._finish = choice.finish_reason or self._finish
            if choice.delta is not None and self._said(choice.delta) and self._first is None:
                self._first = now

    def _said(self, delta: _Delta) -> bool:
        """Keeps what a piece adds; whether it adds anything."""
        if delta.content:
            self._text.append(delta.content)
        for piece in delta.tool_calls or ():
            name, arguments = self._calls.setdefault(piece.index, ["", ""])
            if piece.function is not None:
                added = [name + (piece.function.name or ""), arguments + (piece.function.arguments or "")]
                self._calls[piece.index] = added
        return bool(delta.content or delta.tool_calls)

    def answer(self) -> Answer:
        """Returns all of it, at its end."""
        wall = self._clock() - self._began
        error = self.error or ("" if self._done else "the stream ended without [DONE]")
        calls = tuple(Said(name, arguments) for name, arguments in self._calls.values())
        return Answer(self._first, wall, "".join(self._text), calls, self._counts(), self._finish, error)

    def _counts(self) -> Counts:
        usage, timings = self._usage, self._timings
        if usage is None:
            return Counts(cached=timings.cache_n, drafted=timings.draft_n, accepted=timings.draft_n_accepted)
        details, own = usage.prompt_tokens_details, usage.magnitude
        return Counts(
            prompt=usage.prompt_tokens,
            cached=details.cached_tokens if details is not None else timings.cache_n,
            output=usage.completion_tokens,
            drafted=own.drafted_tokens if own is not None else timings.draft_n,
            accepted=own.accepted_tokens if own is not None else timings.draft_n_accepted,
        )
