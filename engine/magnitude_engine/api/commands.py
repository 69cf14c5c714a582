"""What a proxy asks of a worker."""

from __future__ import annotations

from typing import Literal

import msgspec

from magnitude_engine.api.conversation import Format, Frozen, Input, Message, Tool
from magnitude_engine.api.misses import AskMisses

PROTOCOL_VERSION = 5


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
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
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
        format: what the answer must look like; None for anything.
        partial_calls: tool calls are given as they are written, where nothing of them is left to be checked;
            otherwise each as a whole.
        tool_seconds: how long the tools of the session's last step ran, by name, as far as the client says.
        prediction: text that the client expects the answer to follow; it decides how fast the answer comes, never
            what it says. None where the client sent none.
    """

    request: str
    epoch: int
    tenant: str
    session: str
    input: Input
    branch: str = "main"
    run: str = ""
    step: int = 0
    tool_seconds: dict[str, float] = msgspec.field(default_factory=dict)
    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    format: Format | None = None
    partial_calls: bool = False
    prediction: str | None = None
    priority: int = 0
    preferences: Preferences = Preferences()
    resume: tuple[Resume, ...] = ()


class Cancel(Frozen, tag="cancel", frozen=True, kw_only=True):
    """Stop a request; the worker frees it within one step and sends nothing more for it."""

    request: str
    epoch: int


class Count(Frozen, tag="count", frozen=True, kw_only=True):
    """Ask how many tokens a prompt has.

    Nothing is generated: the answer is one `Completed` with `usage.prompt_tokens`, or `Failed`.
    """

    request: str
    epoch: int
    input: Input


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
    """Compile these tools' schemas and compute the prompt prefix of them and this system prompt ahead of requests.

    With a `request` id it is answered, once the schemas are compiled: with `Registered`, or with `Failed` where they
    cannot be used.
    """

    tenant: str
    request: str = ""
    epoch: int = 0
    tools: tuple[Tool, ...] = ()
    system: str = ""


class EndSession(Frozen, tag="end_session", frozen=True, kw_only=True):
    """Nothing more comes of a session, or of one branch of it: its pages are the first to go.

    Attributes:
        pruned: the branch is dead: what it generates stops, and pages that only it has used are freed at once.
    """

    tenant: str
    session: str
    branch: str | None = None
    pruned: bool = False


class Expect(Frozen, tag="expect", frozen=True, kw_only=True):
    """A session's next prompt will hold these messages before the last answer, in place of those that it answered."""

    tenant: str
    session: str
    branch: str = "main"
    messages: tuple[Message, ...]


class Inspect(Frozen, tag="inspect", frozen=True, kw_only=True):
    """Ask for a `CacheReport`."""


class Probe(Frozen, tag="probe", frozen=True, kw_only=True):
    """Ask for a `Status`; it is answered from the server's loop also while a step runs."""


class Hello(Frozen, tag="hello", frozen=True, kw_only=True):
    """The first frame a proxy sends."""

    protocol: int = PROTOCOL_VERSION


Command = Hello | Generate | Count | Cancel | Probe | ToolEvent | Register | EndSession | Expect | Inspect | AskMisses
