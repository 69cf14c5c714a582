"""What a worker answers."""

from __future__ import annotations

from typing import Any

import msgspec

from magnitude_engine.api.cache import CacheReport
from magnitude_engine.api.conversation import Frozen
from magnitude_engine.api.misses import CacheMiss, SessionMisses


class TopLogprob(Frozen, frozen=True, kw_only=True):
    """A token and its log-probability under the raw model distribution."""

    token: str
    logprob: float
    bytes: tuple[int, ...] = ()


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """The chosen token of one position with its alternatives, likeliest first."""

    top: tuple[TopLogprob, ...] = ()


class ToolCallDelta(Frozen, frozen=True, kw_only=True):
    """A piece of a tool call: `id` and `name` come with the first piece of `index`, `arguments` grow."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ProposerUse(Frozen, frozen=True, kw_only=True):
    """What one proposer drafted for a request, and how much of it was what the model says.

    Attributes:
        name: `suffix`, `prediction`, `model` or `self`.
    """

    name: str
    drafted: int = 0
    accepted: int = 0


class Usage(Frozen, frozen=True, kw_only=True):
    """Token counts of one request; those after `cached_tokens` are the engine's own figures.

    Of `cached_tokens`, `cached_host_tokens` and `cached_disk_tokens` were brought back from there.

    Attributes:
        accepted_prediction_tokens, rejected_prediction_tokens: tokens of `Generate.prediction` that were verified, and
            those of them that the answer does not have; None where there was no prediction.
        speculation: drafted and accepted tokens by proposer; those that proposed nothing are absent.
        pruned_tokens: that the proxy shortened the prompt by; None where its client did not ask for that.
        draft_decisions: what was decided in how many steps: `drafted`, `not worth it` or `nothing known`.
        miss: why not more of the prompt was cached, where there could have been more.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_host_tokens: int = 0
    cached_disk_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    forced_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None
    pruned_tokens: int | None = None
    speculation: tuple[ProposerUse, ...] = ()
    draft_decisions: dict[str, int] = msgspec.field(default_factory=dict)
    miss: CacheMiss | None = None


class Started(Frozen, tag="started", frozen=True, kw_only=True):
    """The request was admitted; its prompt is this long, this much of it was cached, and why not more."""

    request: str
    epoch: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    miss: CacheMiss | None = None


class Progress(Frozen, tag="progress", frozen=True, kw_only=True):
    """Prompt tokens computed so far; deadlines count from the last of these."""

    request: str
    epoch: int
    done: int
    total: int


class Delta(Frozen, tag="delta", frozen=True, kw_only=True):
    """New output of one choice.

    `ids` are the tokens accepted since the last delta; `text` is what they released, which lags behind while a
    stop string or a multi-byte character may still be completed. `extra` holds fields of an upstream's delta
    that this product does not know (for example `reasoning_content`).
    """

    request: str
    epoch: int
    choice: int = 0
    text: str = ""
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()
    refusal: str | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)


class Finished(Frozen, tag="finished", frozen=True, kw_only=True):
    """One choice is complete; `matched_stop` is the stop string that ended it."""

    request: str
    epoch: int
    choice: int
    reason: str
    matched_stop: str | None = None


class Completed(Frozen, tag="completed", frozen=True, kw_only=True):
    """All choices are complete; nothing follows."""

    request: str
    epoch: int
    usage: Usage = Usage()


class Failed(Frozen, tag="failed", frozen=True, kw_only=True):
    """The request ended without an answer; nothing follows.

    `code` is the `code` of a class in `magnitude_engine.errors`, or a proxy's own such as `upstream_http_400`;
    `retryable` says that the same request may succeed elsewhere; `upstream_code` is the `code` in the error body
    of an upstream that refused.
    """

    request: str
    epoch: int
    code: str
    message: str
    param: str | None = None
    retryable: bool = False
    retry_after_s: float | None = None
    upstream_code: str | None = None


class ModelCard(Frozen, frozen=True, kw_only=True):
    """The model a worker serves; `draft` names the model that drafts for it, where there is one."""

    name: str
    architecture: str
    context_length: int
    vocab_size: int
    profile: str
    tokenizer_hash: str
    weights_hash: str
    parameters: int = 0
    path: str = ""
    draft: str | None = None


class Welcome(Frozen, tag="welcome", frozen=True, kw_only=True):
    """The worker's answer to `Hello`; `incarnation` changes with every worker process."""

    protocol: int
    incarnation: str
    pid: int
    model: ModelCard


class Status(Frozen, tag="status", frozen=True, kw_only=True):
    """The worker's pulse: `steps` must advance while `running` or `waiting` is above zero.

    `counters` are running totals and `gauges` present values; names are those of the metrics table.
    """

    incarnation: str
    steps: int
    running: int
    waiting: int
    pages_free: int
    pages_total: int
    counters: dict[str, float] = msgspec.field(default_factory=dict)
    gauges: dict[str, float] = msgspec.field(default_factory=dict)


class RegisteredTool(Frozen, frozen=True, kw_only=True):
    """A tool whose schema is compiled; `checked` names keywords that are checked after a call, not by its grammar."""

    name: str
    checked: tuple[str, ...] = ()


class Registered(Frozen, tag="registered", frozen=True, kw_only=True):
    """The tools of a `Register` are compiled.

    Attributes:
        ignored: keywords that assert nothing, with their place.
        ahead: whether the prompt's beginning is computed ahead.
    """

    request: str
    epoch: int
    tools: tuple[RegisteredTool, ...] = ()
    ignored: tuple[str, ...] = ()
    ahead: bool = True


AnswerEvent = Started | Progress | Delta | Finished | Completed | Failed
Event = Welcome | Status | CacheReport | SessionMisses | Registered | AnswerEvent
