"""What the published client returns, and how it grows out of OpenAI responses and stream chunks."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import msgspec

from magnitude_engine.errors import StreamBroken


class CalledFunction(TypedDict):
    """Name and arguments of a tool call; `arguments` is the model's own JSON text."""

    name: str
    arguments: str


class CalledTool(TypedDict):
    """One tool call in OpenAI's form, ready to stand in an assistant message."""

    id: str
    type: str
    function: CalledFunction


class GenerateResult(TypedDict):
    """One complete answer.

    Keys:
        text: the answer without the stop sequence that ended it; empty when the model only called tools.
        session_id: the session to continue and to give feedback for.
        finish_reason: `stop`, `length`, `tool_calls` or `content_filter`.
        usage: OpenAI's usage object; `usage["magnitude"]` holds the engine's own figures.
        route: `local`, `upstream:NAME` or `fallback:NAME`; empty from a server that is not Magnitude.
        request_id: what to quote when asking about this request.
        logprobs: OpenAI's logprobs object, present when asked for.
    """

    text: str
    session_id: str
    finish_reason: str
    usage: dict[str, Any]
    route: str
    request_id: str
    tool_calls: list[CalledTool]
    logprobs: NotRequired[dict[str, Any]]


class StreamItem(TypedDict):
    """A piece of a streamed answer: `text` is new text, `result` is None except in the last item."""

    text: str
    result: GenerateResult | None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Content(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: _Content | None = None
    delta: _Content | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class _Problem(msgspec.Struct):
    message: str = "no message"
    code: str | int | None = None


class _Notice(msgspec.Struct):
    route: str | None = None


class Body(msgspec.Struct):
    """A Chat Completions or Completions response, or one chunk of its stream, as far as the client reads it."""

    id: str = ""
    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: _Problem | str | None = None
    magnitude: _Notice | None = None


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What the response's headers and the request say about an answer."""

    session_id: str
    route: str
    request_id: str
    logprobs: bool


class Collector:
    """Gathers one answer from a whole response or from the chunks of a stream."""

    def __init__(self, origin: Origin, url: str) -> None:
        self._origin = origin
        self.url = url
        self._text: list[str] = []
        self._calls: dict[int, CalledTool] = {}
        self._logprobs: dict[str, Any] = {}
        self._finish: str | None = None
        self._usage: dict[str, Any] = {}
        self._route = origin.route
        self._id = origin.request_id

    def add(self, data: bytes) -> str:
        """Takes a response body or the data of one event; returns the text that is new.

        Raises:
            StreamBroken: it is not such a body, or carries an error.
        """
        try:
            body = msgspec.json.decode(data, type=Body)
        except msgspec.DecodeError as problem:
            start = data[:120].decode("utf-8", "replace")
            raise StreamBroken(f"{self.url} sent no OpenAI answer ({problem}): {start!r}") from problem
        if body.error is not None:
            error = _Problem(message=body.error) if isinstance(body.error, str) else body.error
            code = f" (code {error.code})" if error.code is not None else ""
            raise StreamBroken(f"the answer from {self.url} ended with an error: {error.message}{code}")
        self._usage = body.usage or self._usage
        self._id = self._id or body.id
        if body.magnitude is not None and body.magnitude.route:
            self._route = body.magnitude.route
        return "".join(self._add_choice(choice) for choice in body.choices if choice.index == 0)

    def result(self) -> GenerateResult:
        """Returns the answer.

        Raises:
            StreamBroken: no finish reason came, so it is not complete.
        """
        if self._finish is None:
            raise StreamBroken(
                f"the answer from {self.url} ended without a finish reason; the text so far is not complete"
            )
        result = GenerateResult(
            text="".join(self._text),
            session_id=self._origin.session_id,
            finish_reason=self._finish,
            usage=self._usage,
            route=self._route,
            request_id=self._id,
            tool_calls=[self._calls[index] for index in sorted(self._calls)],
        )
        if self._origin.logprobs:
            result["logprobs"] = self._logprobs
        return result

    def _add_choice(self, choice: _Choice) -> str:
        content = choice.message or choice.delta or _Content()
        text = (content.content or content.refusal or "") + (choice.text or "")
        self._text.append(text)
        self._finish = choice.finish_reason or self._finish
        for position, call in enumerate(content.tool_calls or ()):
            self._add_call(position if call.index is None else call.index, call)
        for name, values in (choice.logprobs or {}).items():
            if isinstance(values, list):
                self._logprobs.setdefault(name, []).extend(values)
        return text

    def _add_call(self, index: int, piece: _Call) -> None:
        empty = CalledTool(id="", type="function", function=CalledFunction(name="", arguments=""))
        call = self._calls.setdefault(index, empty)
        call["id"] = piece.id or call["id"]
        if piece.function is not None:
            call["function"]["name"] = piece.function.name or call["function"]["name"]
            call["function"]["arguments"] += piece.function.arguments or ""
