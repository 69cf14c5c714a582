"""The answers of Chat Completions, Completions and Models as they stand on the wire.

Fields that OpenAI's schema requires but allows to be null are null when empty; optional ones are left out (UNSET).
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from magnitude_engine import api


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what clients receive."""


class PromptDetails(Reply, frozen=True, kw_only=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int = 0


class OutputDetails(Reply, frozen=True, kw_only=True):
    """What the output's tokens were; the prediction's share is told only to clients that sent one."""

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class MissReply(Reply, frozen=True, kw_only=True):
    """Why a prompt was not cached, the first token that differs, and how many were computed again for that."""

    cause: api.MissCause
    at: int
    wasted: int


class EngineFigures(Reply, frozen=True, kw_only=True):
    """The engine's own figures of one request, zero where an upstream answered.

    Attributes:
        cached_tokens: all that were found; of these, those that came back from host memory and from disk follow.
        pruned_tokens: that the prompt is shorter by; only of requests that asked for pruning.
        cache_miss: why not more were found, where there could have been more.
    """

    drafted_tokens: int
    accepted_tokens: int
    forced_tokens: int
    cached_tokens: int
    cached_host_tokens: int
    cached_disk_tokens: int
    pruned_tokens: int | UnsetType = UNSET
    cache_miss: MissReply | UnsetType = UNSET


class UsageReply(Reply, frozen=True, kw_only=True):
    """OpenAI's usage object with the engine's figures under `magnitude`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: OutputDetails
    magnitude: EngineFigures


class RouteNote(Reply, frozen=True, kw_only=True):
    """In the last chunk when the route changed after the headers were sent."""

    route: str
    fallback_reason: str | None


class TopToken(Reply, frozen=True, kw_only=True):
    """An alternative token."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class TokenReply(TopToken, frozen=True, kw_only=True):
    """A chosen token with its alternatives."""

    top_logprobs: tuple[TopToken, ...]


class LogprobsReply(Reply, frozen=True, kw_only=True):
    """Log-probabilities of one choice's content."""

    content: tuple[TokenReply, ...]
    refusal: None = None


class FunctionReply(Reply, frozen=True, kw_only=True):
    """A called function, or a piece of one."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallReply(Reply, frozen=True, kw_only=True):
    """A complete tool call."""

    id: str
    function: FunctionReply
    type: Literal["function"] = "function"


class ToolCallChunk(Reply, frozen=True, kw_only=True):
    """A piece of a tool call; `id`, `type` and the name come with the first."""

    index: int
    function: FunctionReply
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageReply(Reply, frozen=True, kw_only=True):
    """The assistant's message."""

    content: str | None
    refusal: str | None = None
    role: Literal["assistant"] = "assistant"
    tool_calls: tuple[ToolCallReply, ...] | UnsetType = UNSET


class ChatChoice(Reply, frozen=True, kw_only=True):
    """One answer of a chat."""

    index: int
    message: MessageReply
    finish_reason: str
    logprobs: LogprobsReply | None = None


class ChatReply(Reply, frozen=True, kw_only=True):
    """Body of a chat that is not streamed."""

    id: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: UsageReply
    object: Literal["chat.completion"] = "chat.completion"


class DeltaReply(Reply, frozen=True, kw_only=True):
    """What a chunk adds to a message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET
    tool_calls: tuple[ToolCallChunk, ...] | UnsetType = UNSET


class ChunkChoice(Reply, frozen=True, kw_only=True):
    """One choice in a chunk."""

    index: int
    delta: DeltaReply
    logprobs: LogprobsReply | None = None
    finish_reason: str | None = None


class ChatChunk(Reply, frozen=True, kw_only=True):
    """One event of a streamed chat; `usage` is null but in the last when the client asked for it."""

    id: str
    created: int
    model: str
    choices: tuple[ChunkChoice, ...]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    usage: UsageReply | UnsetType | None = UNSET
    magnitude: RouteNote | UnsetType = UNSET


class TextLogprobs(Reply, frozen=True, kw_only=True):
    """Completions' own form: parallel lists; `text_offset` counts characters of the answer."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    text_offset: tuple[int, ...]
    top_logprobs: tuple[dict[str, float], ...] | UnsetType = UNSET


class TextChoice(Reply, frozen=True, kw_only=True):
    """One answer of a completion, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class TextReply(Reply, frozen=True, kw_only=True):
    """Body, or one event, of a completion."""

    id: str
    created: int
    model: str
    choices: tuple[TextChoice, ...]
    object: Literal["text_completion"] = "text_completion"
    usage: UsageReply | UnsetType | None = UNSET
    magnitude: RouteNote | UnsetType = UNSET


class ModelReply(Reply, frozen=True, kw_only=True):
    """One entry of the list of models."""

    id: str
    created: int
    owned_by: str
    object: Literal["model"] = "model"


class ModelsReply(Reply, frozen=True, kw_only=True):
    """Body of `GET /v1/models`."""

    data: tuple[ModelReply, ...]
    object: Literal["list"] = "list"


def usage_reply(usage: api.Usage, predicted: bool) -> UsageReply:
    """Returns the usage object; `predicted` says that the client sent a prediction."""
    details = OutputDetails(reasoning_tokens=usage.reasoning_tokens)
    if predicted:
        details = OutputDetails(
            reasoning_tokens=usage.reasoning_tokens,
            accepted_prediction_tokens=usage.accepted_prediction_tokens or 0,
            rejected_prediction_tokens=usage.rejected_prediction_tokens or 0,
        )
    return UsageReply(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=details,
        magnitude=EngineFigures(
            drafted_tokens=usage.drafted_tokens,
            accepted_tokens=usage.accepted_tokens,
            forced_tokens=usage.forced_tokens,
            cached_tokens=usage.cached_tokens,
            cached_host_tokens=usage.cached_host_tokens,
            cached_disk_tokens=usage.cached_disk_tokens,
            pruned_tokens=UNSET if usage.pruned_tokens is None else usage.pruned_tokens,
            cache_miss=UNSET if usage.miss is None else miss_reply(usage.miss),
        ),
    )


def miss_reply(miss: api.CacheMiss) -> MissReply:
    """Returns a miss as clients see it."""
    return MissReply(cause=miss.cause, at=miss.at, wasted=miss.wasted)


def logprobs_reply(entries: tuple[api.TokenLogprob, ...]) -> LogprobsReply | None:
    """Returns Chat Completions' form, None without entries."""
    if not entries:
        return None
    return LogprobsReply(
        content=tuple(
            TokenReply(
                token=entry.token,
                logprob=entry.logprob,
                bytes=entry.bytes,
                top_logprobs=tuple(TopToken(token=t.token, logprob=t.logprob, bytes=t.bytes) for t in entry.top),
            )
            for entry in entries
        )
    )


def text_logprobs(entries: tuple[api.TokenLogprob, ...], offset: int) -> TextLogprobs | None:
    """Returns Completions' form, None without entries; the first token starts at character `offset`."""
    if not entries:
        return None
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry.token)
    tops = tuple({t.token: t.logprob for t in entry.top} for entry in entries)
    return TextLogprobs(
        tokens=tuple(entry.token for entry in entries),
        token_logprobs=tuple(entry.logprob for entry in entries),
        text_offset=tuple(offsets),
        top_logprobs=tops if any(tops) else UNSET,
    )
