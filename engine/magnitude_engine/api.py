"""The nouns that proxy and worker share, and the frames they exchange.

Everything here is a frozen msgspec struct and needs neither torch nor the proxy. A request is one `Generate`;
its answer is a stream of `Event`s, the same vocabulary whether a worker or an upstream server produced it and
whether the client speaks Chat Completions, Responses or Messages:

    Started → Progress* → (Delta | Finished)* → Completed
                       ↘ Failed (at any point; nothing follows)

On the unix socket each frame is a 4-byte big-endian length and a msgpack map (`encode_frame`, `FrameReader`).
Frames of one request carry its `request` id and `epoch`; a receiver drops frames whose epoch is not the one it
waits for, so that late frames of a lost attempt cannot reach a client.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

PROTOCOL_VERSION = 2
MAX_FRAME_BYTES = 64 * 1024 * 1024

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]
ToolMode = Literal["auto", "none", "required", "named"]


class Frozen(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of every struct that crosses a boundary."""


class ToolCall(Frozen, frozen=True, kw_only=True):
    """One complete tool call in the history. `arguments` is the model's own text, never re-serialised."""

    id: str
    name: str
    arguments: str


class Message(Frozen, frozen=True, kw_only=True):
    """One message of a conversation; content parts are already joined to text."""

    role: Role
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


class Tool(Frozen, frozen=True, kw_only=True):
    """A function the model may call; `parameters` is its JSON Schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolChoice(Frozen, frozen=True, kw_only=True):
    """How tools may be used; `name` is set for mode `named`."""

    mode: ToolMode = "auto"
    name: str | None = None
    parallel: bool = True


class ChatInput(Frozen, tag="chat", frozen=True, kw_only=True):
    """A conversation, rendered by the worker's chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()


class TextInput(Frozen, tag="text", frozen=True, kw_only=True):
    """Raw text, tokenised as it stands with special tokens off."""

    text: str


class TokenInput(Frozen, tag="tokens", frozen=True, kw_only=True):
    """Token ids, used as they stand."""

    ids: tuple[int, ...]


Input = ChatInput | TextInput | TokenInput


class Sampling(Frozen, frozen=True, kw_only=True):
    """The distribution to draw from. Temperature 0 is greedy; `seed` is always set (see `Generate`).

    Attributes:
        logit_bias: token id → additive bias on the raw logit, within -100..100.
        top_k: 0 keeps the whole vocabulary.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0


class Resume(Frozen, frozen=True, kw_only=True):
    """What a client already has of one choice: its token ids and how many characters of its text.

    A worker continues after `ids` and releases only what lies past `chars`; keyed sampling noise makes the
    continuation equal to the lost one.
    """

    choice: int
    ids: tuple[int, ...] = ()
    chars: int = 0


class Preferences(Frozen, frozen=True, kw_only=True):
    """What a client prefers, never more than the server allows (`magnitude.config` in a body)."""

    speculation: bool = True
    predictive_caching: bool = True
    max_batch_size: int | None = None


class Generate(Frozen, tag="generate", frozen=True, kw_only=True):
    """Produce `n` answers to one input.

    Attributes:
        tenant: hex salt of the tenant; cache entries of different tenants never meet.
        session, branch, run: hashed ids (`run` is the root session with its sub-agents).
        step: the session's step this request is, from 0.
        seed: chosen by the proxy when the client sent none, so that a resumed answer is the same answer.
        logprobs: None for none, else how many alternatives per position (0: the chosen token only).
    """

    request: str
    epoch: int
    tenant: str
    session: str
    input: Input
    branch: str = "main"
    run: str = ""
    step: int = 0
    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    priority: int = 0
    preferences: Preferences = Preferences()
    resume: tuple[Resume, ...] = ()


class Cancel(Frozen, tag="cancel", frozen=True, kw_only=True):
    """Stop a request; the worker frees it within one step and sends nothing more for it."""

    request: str
    epoch: int


class ToolEvent(Frozen, tag="tool_event", frozen=True, kw_only=True):
    """What became of a tool that a session called: it started, printed more, or finished.

    Attributes:
        call: id of the tool call; `tool` is its name, where it is known.
        text: for `output` the text that came since the last event, for `finished` the rest of it.
    """

    tenant: str
    session: str
    kind: Literal["started", "output", "finished"]
    call: str
    branch: str = "main"
    tool: str = ""
    text: str = ""


class Register(Frozen, tag="register", frozen=True, kw_only=True):
    """Compute the prompt prefix of these tools and this system prompt before the first request has them."""

    tenant: str
    tools: tuple[Tool, ...] = ()
    system: str = ""


class EndSession(Frozen, tag="end_session", frozen=True, kw_only=True):
    """Nothing more comes of a session, or of one branch of it: its pages are the first to go."""

    tenant: str
    session: str
    branch: str | None = None


class Inspect(Frozen, tag="inspect", frozen=True, kw_only=True):
    """Ask for a `CacheReport`."""


class Probe(Frozen, tag="probe", frozen=True, kw_only=True):
    """Ask for a `Status`; it is answered from the server's loop also while a step runs."""


class Hello(Frozen, tag="hello", frozen=True, kw_only=True):
    """The first frame a proxy sends."""

    protocol: int = PROTOCOL_VERSION


Command = Hello | Generate | Cancel | Probe | ToolEvent | Register | EndSession | Inspect


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


class Usage(Frozen, frozen=True, kw_only=True):
    """Token counts of one request; those after `cached_tokens` are the engine's own figures.

    Of `cached_tokens`, `cached_host_tokens` and `cached_disk_tokens` were brought back from there.
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


class Started(Frozen, tag="started", frozen=True, kw_only=True):
    """The request was admitted; its prompt is this long and this much of it was cached."""

    request: str
    epoch: int
    prompt_tokens: int = 0
    cached_tokens: int = 0


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
    extra: dict[str, Any] = {}


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
    """The model a worker serves."""

    name: str
    architecture: str
    context_length: int
    vocab_size: int
    profile: str
    tokenizer_hash: str
    weights_hash: str
    parameters: int = 0
    path: str = ""


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
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}


class CacheRun(Frozen, frozen=True, kw_only=True):
    """A stretch of the prefix tree without a fork: pages that the same sequences share.

    Attributes:
        parent: index of the run before it in `CacheReport.runs`, -1 at a tenant's root; parents come first.
        tokens: tokens in it, `pages` pages of which `in_use` are read or written by a running sequence.
        idle_s: seconds since it was last used.
        sessions: sessions whose last step ended in or below it.
    """

    parent: int
    tenant: str
    tokens: int
    pages: int
    in_use: int = 0
    idle_s: float = 0.0
    sessions: int = 0


class TierUse(Frozen, frozen=True, kw_only=True):
    """One tier: what it holds and what it was good for; sizes in bytes, `tokens_served` since the start."""

    name: Literal["device", "host", "disk"]
    blocks: int
    bytes: int
    limit_bytes: int
    tokens_served: int = 0
    evicted: int = 0
    rejected: int = 0
    failed_writes: int = 0


class SessionUse(Frozen, frozen=True, kw_only=True):
    """A session as retention sees it; `tool` is what it waits for, `due_s` when it is expected back."""

    tenant: str
    session: str
    branch: str
    state: Literal["thinking", "waiting", "ended"]
    tokens: int
    tool: str = ""
    due_s: float | None = None


class CacheReport(Frozen, tag="cache_report", frozen=True, kw_only=True):
    """What the cache holds: the answer to `Inspect`. Tokens and text are not in it.

    Attributes:
        policy: `learned` or `lru`: which one chooses what is evicted now; hit rates are those of both, 0..1.
    """

    page_tokens: int
    pages_total: int
    pages_free: int
    pages_idle: int
    policy: Literal["learned", "lru"] = "learned"
    learned_hit_rate: float = 0.0
    lru_hit_rate: float = 0.0
    tiers: tuple[TierUse, ...] = ()
    runs: tuple[CacheRun, ...] = ()
    sessions: tuple[SessionUse, ...] = ()


AnswerEvent = Started | Progress | Delta | Finished | Completed | Failed
Event = Welcome | Status | CacheReport | AnswerEvent

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_frame(frame: Command | Event) -> bytes:
    """Returns the length prefix and the msgpack body of `frame`.

    Raises:
        ValueError: the body is larger than `MAX_FRAME_BYTES`.
    """
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


class FrameReader:
    """Reads frames from a stream; one reader per connection."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream

    async def command(self) -> Command:
        """Returns the next command (see `_body` for errors)."""
        return _command_decoder.decode(await self._body())

    async def event(self) -> Event:
        """Returns the next event (see `_body` for errors)."""
        return _event_decoder.decode(await self._body())

    async def _body(self) -> bytes:
        """Raises asyncio.IncompleteReadError at the end of the stream, ValueError for an oversized frame."""
        size = int.from_bytes(await self._stream.readexactly(4), "big")
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
        return await self._stream.readexactly(size)
