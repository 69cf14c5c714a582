"""The JSON that an OpenAI-compatible server speaks, and its meaning as neutral events; pure functions.

Shapes are strict where meaning depends on them (a wrong type raises `msgspec.ValidationError`) and open
elsewhere: fields of a delta that this product does not know go on as `Delta.extra`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from magnitude_engine import api
from magnitude_proxy.config import UpstreamConfig
from magnitude_proxy.routing.route import Step

# OpenAI's own value for a token without a known log-probability, such as the first token of an echoed prompt.
UNKNOWN_LOGPROB = -9999.0


class TokenDetails(msgspec.Struct, frozen=True):
    """The parts of `usage.*_tokens_details` that are passed on."""

    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class WireUsage(msgspec.Struct, frozen=True):
    """`usage`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None
    reasoning_tokens: int | None = None


class WireTimings(msgspec.Struct, frozen=True):
    """llama.cpp's `timings`; `cache_n` tokens of the prompt were in the slot already."""

    cache_n: int | None = None


class WireTopLogprob(msgspec.Struct, frozen=True):
    """One alternative in chat log-probabilities."""

    token: str
    logprob: float | None = None
    bytes: list[int] | None = None


class WireTokenLogprob(msgspec.Struct, frozen=True):
    """One position in chat log-probabilities."""

    token: str
    logprob: float | None = None
    bytes: list[int] | None = None
    top_logprobs: list[WireTopLogprob] | None = None


class WireLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a choice: `content` in chat, the parallel lists in completions."""

    content: list[WireTokenLogprob] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class WireFunction(msgspec.Struct, frozen=True):
    """`function` of a tool call, whole or in part."""

    name: str | None = None
    arguments: str | None = None


class WireToolCall(msgspec.Struct, frozen=True):
    """A tool call of a message (without `index`) or a piece of one."""

    index: int | None = None
    id: str | None = None
    function: WireFunction | None = None


class WireChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk (`delta`), a whole answer (`message`) or a completion (`text`)."""

    index: int = 0
    delta: dict[str, Any] | None = None
    message: dict[str, Any] | None = None
    text: str | None = None
    logprobs: WireLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: Any = None


class WireAnswer(msgspec.Struct, frozen=True):
    """A chunk of a stream, or a whole answer."""

    choices: list[WireChoice] | None = None
    usage: WireUsage | None = None
    timings: WireTimings | None = None
    error: Any = None


class WireError(msgspec.Struct, frozen=True):
    """The object under `error`; servers differ in the type of `code`."""

    message: str = ""
    code: str | int | None = None
    param: str | None = None


answer_decoder = msgspec.json.Decoder(WireAnswer)
_KNOWN_FIELDS = frozenset({"role", "content", "tool_calls", "refusal"})


def outgoing(config: UpstreamConfig, step: Step) -> dict[str, Any]:
    """Returns the body to send: the client's own with the model's name mapped and usage asked for in streams."""
    body = dict(step.body)
    model = body.get("model")
    mapped = config.models.get(model) if isinstance(model, str) else None
    mapped = mapped or config.models.get("*")
    if mapped:
        body["model"] = mapped
    body["stream"] = step.stream
    options = body.pop("stream_options", None)
    if step.stream:
        body["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return body


def choice_events(choice: WireChoice, request: api.Generate) -> Iterator[api.Delta | api.Finished]:
    """Yields the delta of `choice`, when it holds something, and its finish."""
    fields = choice.delta or choice.message or {}
    # A chunk that only opens or closes a choice often carries "", null or []; they say nothing.
    extra = {name: value for name, value in fields.items() if name not in _KNOWN_FIELDS and value not in (None, "", [])}
    delta = api.Delta(
        request=request.request,
        epoch=request.epoch,
        choice=choice.index,
        text=_text(fields.get("content")) or choice.text or "",
        logprobs=_logprobs(choice.logprobs),
        tool_calls=_tool_calls(fields.get("tool_calls")),
        refusal=_text(fields.get("refusal")) or None,
        extra=extra,
    )
    if delta.text or delta.logprobs or delta.tool_calls or delta.refusal or extra:
        yield delta
    # Some servers send "" where others send null.
    if choice.finish_reason:
        yield api.Finished(
            request=request.request,
            epoch=request.epoch,
            choice=choice.index,
            reason=choice.finish_reason,
            matched_stop=choice.stop_reason if isinstance(choice.stop_reason, str) else None,
        )


def neutral_usage(usage: WireUsage | None, timings: WireTimings | None = None) -> api.Usage:
    """Returns the counts; a server that sent none counts as zero."""
    if usage is None:
        return api.Usage()
    prompt = usage.prompt_tokens_details or TokenDetails(cached_tokens=timings.cache_n if timings else None)
    completion = usage.completion_tokens_details or TokenDetails(reasoning_tokens=usage.reasoning_tokens)
    return api.Usage(
        prompt_tokens=usage.prompt_tokens or 0,
        completion_tokens=usage.completion_tokens or 0,
        cached_tokens=prompt.cached_tokens or 0,
        reasoning_tokens=completion.reasoning_tokens or 0,
        accepted_prediction_tokens=completion.accepted_prediction_tokens,
        rejected_prediction_tokens=completion.rejected_prediction_tokens,
    )


class Tally:
    """What one answer has given so far."""

    def __init__(self, request: api.Generate) -> None:
        self._request = request
        self._finished: set[int] = set()
        self._seen: set[int] = set()
        self.content = False
        self.usage: WireUsage | None = None
        self.timings: WireTimings | None = None

    def note(self, event: api.Delta | api.Finished) -> None:
        """Counts one event."""
        self.content = True
        self._seen.add(event.choice)
        if isinstance(event, api.Finished):
            self._finished.add(event.choice)

    def complete(self) -> bool:
        """True when no choice is missing or cut off."""
        return len(self._finished) >= self._request.n and self._finished >= self._seen

    def completed(self) -> api.Completed:
        """Returns the end mark with the server's counts."""
        usage = neutral_usage(self.usage, self.timings)
        return api.Completed(request=self._request.request, epoch=self._request.epoch, usage=usage)


def read_error(error: Any) -> WireError:
    """Returns what an `error` value says, whatever its form."""
    if isinstance(error, str):
        return WireError(message=error)
    try:
        return msgspec.convert(error, WireError)
    except msgspec.ValidationError:
        message = error.get("message") if isinstance(error, dict) else None
        return WireError(message=message if isinstance(message, str) else "")


def read_error_body(body: bytes) -> WireError:
    """Returns what the body of an HTTP error says: OpenAI's form, `message` or `detail` on top, or nothing."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return WireError()
    if not isinstance(decoded, dict):
        return WireError()
    if decoded.get("error"):
        return read_error(decoded["error"])
    return read_error({**decoded, "message": decoded.get("message") or decoded.get("detail")})


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.convert(value, str)


def _tool_calls(value: Any) -> tuple[api.ToolCallDelta, ...]:
    if value is None:
        return ()
    calls = msgspec.convert(value, list[WireToolCall])
    return tuple(
        api.ToolCallDelta(
            index=place if call.index is None else call.index,
            id=call.id,
            name=call.function.name if call.function else None,
            arguments=(call.function.arguments if call.function else None) or "",
        )
        for place, call in enumerate(calls)
    )


def _logprobs(value: WireLogprobs | None) -> tuple[api.TokenLogprob, ...]:
    if value is None:
        return ()
    if value.content is not None:
        return tuple(_chat_logprob(one) for one in value.content)
    tokens = value.tokens or []
    chosen = value.token_logprobs or []
    tops = value.top_logprobs or []
    return tuple(
        api.TokenLogprob(
            token=token,
            logprob=_known(chosen[place] if place < len(chosen) else None),
            top=_alternatives(tops[place] if place < len(tops) else None),
        )
        for place, token in enumerate(tokens)
    )


def _chat_logprob(one: WireTokenLogprob) -> api.TokenLogprob:
    top = tuple(
        api.TopLogprob(token=other.token, logprob=_known(other.logprob), bytes=tuple(other.bytes or ()))
        for other in one.top_logprobs or ()
    )
    return api.TokenLogprob(token=one.token, logprob=_known(one.logprob), bytes=tuple(one.bytes or ()), top=top)


def _alternatives(top: dict[str, float] | None) -> tuple[api.TopLogprob, ...]:
    ordered = sorted((top or {}).items(), key=lambda item: -item[1])
    return tuple(api.TopLogprob(token=token, logprob=logprob) for token, logprob in ordered)


def _known(logprob: float | None) -> float:
    return UNKNOWN_LOGPROB if logprob is None else logprob
