"""A request inside the engine: `prepare` checks and tokenises it, `Sequence` is one of its choices.

`Sequence.accept` takes each drawn token and says what a client may see of it. A resumed choice takes the tokens
that its client already has in the same way, silently, and then releases only the characters past
`Resume.chars`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch

from magnitude_engine import api
from magnitude_engine.decode.grammar.compiler import CompiledGrammar
from magnitude_engine.decode.grammar.state import GrammarState
from magnitude_engine.decode.sample import Drawn, RawLogprobs, check_sampling
from magnitude_engine.decode.text import Released, TextStream
from magnitude_engine.decode.tools import ToolCallParser
from magnitude_engine.draft.record import DraftRecord
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.errors import ContextTooLong, FeatureUnsupported, GrammarFailure, MagnitudeError, RequestError
from magnitude_engine.kv.lease import CacheKey, Lease
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.model.tokenizer import Tokenizer
from magnitude_engine.scheduler import Order

MAX_LOGPROBS = 20

_Said = TypeVar("_Said")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the engine allows: tokens per sequence (prompt and output) and choices per request."""

    context: int
    max_n: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A checked request.

    Attributes:
        prompt: token ids, at least one.
        limit: most tokens generated per choice.
        echo: text that precedes each choice's own.
        parses_tools: whether tool calls are looked for in the output.
        grammar: what the output may be; None for anything.
        prediction: token ids of the text that the client expects; None where it sent none.
    """

    generate: api.Generate
    prompt: tuple[int, ...]
    limit: int
    echo: str
    parses_tools: bool
    grammar: CompiledGrammar | None = None
    prediction: tuple[int, ...] | None = None

    @property
    def chat(self) -> api.ChatInput | None:
        """The conversation, where the input is one."""
        return self.generate.input if isinstance(self.generate.input, api.ChatInput) else None

    @property
    def calls_only(self) -> bool:
        """Whether the answer is tool calls without any text."""
        return self.parses_tools and self.chat is not None and self.chat.tool_choice.mode in ("required", "named")

    @property
    def open_tools(self) -> frozenset[str]:
        """The tools whose calls may be shown as they are written, since the grammar enforces all of them."""
        # A stop string may cut a call off, and a part of a call is no call.
        cut = bool(self.generate.stop) and not self.calls_only
        if self.chat is None or self.grammar is None or cut or not self.generate.partial_calls:
            return frozenset()
        check = self.grammar.check
        return frozenset(t.name for t in self.chat.tools if check is None or check.rule(t.name) is None)

    def cache_key(self, choice: int) -> CacheKey:
        """Returns whose the tokens of a choice are."""
        return CacheKey(self.generate.tenant, self.generate.session, self.generate.branch, choice)


class Finish(NamedTuple):
    """Why a choice ended; with `error` it has failed, and its request with it."""

    reason: api.FinishReason
    matched_stop: str | None = None
    error: MagnitudeError | None = None


class Emission(NamedTuple):
    """What a client sees of one token; fields as in `api.Delta`."""

    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[api.TokenLogprob, ...] = ()
    tool_calls: tuple[api.ToolCallDelta, ...] = ()


def prepare(generate: api.Generate, model: LoadedModel, limits: RequestLimits) -> PreparedRequest:
    """Returns the request tokenised, checked and with its grammar. Thread-safe; blocks while that is compiled.

    Raises:
        ContextTooLong: prompt and output do not fit; the message has both numbers.
        FeatureUnsupported: a field that this engine does not serve.
        Overloaded: too many other new grammars are waiting.
        RequestError: a value out of bounds; `param` names the field.
    """
    source = generate.input
    vocab = model.tokenizer.vocab_size
    check_sampling(generate.sampling, vocab)
    _check_fields(generate, limits)
    _check_resume(generate, vocab)
    prompt = model.prompts.encode(source, limits.context)
    if not prompt:
        raise RequestError("the prompt is empty; it must hold at least one token", param=_input_field(generate))
    chat = source if isinstance(source, api.ChatInput) else None
    return PreparedRequest(
        generate=generate,
        prompt=prompt,
        limit=_output_limit(generate, len(prompt), limits.context),
        echo=_echo(generate, model.tokenizer),
        parses_tools=chat is not None and bool(chat.tools) and chat.tool_choice.mode != "none",
        grammar=model.constraints.grammar(generate),
        prediction=_prediction(generate, model.tokenizer, limits.context),
    )


def _prediction(generate: api.Generate, tokenizer: Tokenizer, context: int) -> tuple[int, ...] | None:
    text = generate.prediction
    return None if text is None else tuple(tokenizer.encode(text)[:context])


def _input_field(generate: api.Generate) -> str:
    return "messages" if isinstance(generate.input, api.ChatInput) else "prompt"


def _check_resume(generate: api.Generate, vocab: int) -> None:
    choices = [resume.choice for resume in generate.resume]
    if len(set(choices)) < len(choices) or any(not 0 <= c < generate.n for c in choices):
        raise RequestError(
            f"resume names choices {choices}; each of 0 to {generate.n - 1} may come once", param="resume"
        )
    wrong = next((i for resume in generate.resume for i in resume.ids if not 0 <= i < vocab), None)
    if wrong is not None:
        raise RequestError(f"resume holds token id {wrong}; the model's ids are 0 to {vocab - 1}", param="resume")


def _check_fields(generate: api.Generate, limits: RequestLimits) -> None:
    if not 1 <= generate.n <= limits.max_n:
        raise RequestError(f"n must be between 1 and {limits.max_n}, not {generate.n}", param="n")
    if generate.max_tokens is not None and generate.max_tokens < 0:
        raise RequestError(f"max_tokens must be at least 0, not {generate.max_tokens}", param="max_tokens")
    if generate.logprobs is not None and not 0 <= generate.logprobs <= MAX_LOGPROBS:
        raise RequestError(f"logprobs must be between 0 and {MAX_LOGPROBS}, not {generate.logprobs}", param="logprobs")
    if any(not stop for stop in generate.stop):
        raise RequestError("stop holds an empty string; remove it", param="stop")
    batch = generate.preferences.max_batch_size
    if batch is not None and batch < 1:
        raise RequestError(f"max_batch_size must be at least 1, not {batch}", param="max_batch_size")


def _output_limit(generate: api.Generate, prompt: int, context: int) -> int:
    wanted = generate.max_tokens
    if wanted is None and prompt < context:
        return context - prompt
    if wanted is not None and prompt + wanted <= context:
        return wanted
    if wanted is None or prompt > context:
        problem = f"prompt of {prompt} tokens leaves no room for output in the context of {context}"
    else:
        problem = f"prompt of {prompt} tokens plus max_tokens {wanted} exceeds the context of {context}"
    field = "max_tokens" if wanted and prompt < context else _input_field(generate)
    raise ContextTooLong(f"{problem}; shorten the prompt or lower max_tokens", param=field)


def _echo(generate: api.Generate, tokenizer: Tokenizer) -> str:
    if not generate.echo:
        return ""
    if isinstance(generate.input, api.ChatInput):
        raise FeatureUnsupported("echo is for completions; leave it out of chat requests", param="echo")
    if generate.logprobs is not None:
        raise FeatureUnsupported("echo together with logprobs is not served; ask for one of them", param="echo")
    if isinstance(generate.input, api.TextInput):
        return generate.input.text
    return b"".join(tokenizer.token_bytes(i) for i in generate.input.ids).decode(errors="replace")


class Sequence:
    """One choice of a request: its tokens, its text so far and its lease on the cache.

    Attributes:
        tokens: prompt and output ids.
        output: output ids; the end of `tokens`.
        lease: pages while it runs; None while it waits and when it is finished. The engine sets it.
        width: itself and the choices that wait to be forked from its prompt.
        finish: why it ended; None while it goes on.
        opening: what a client sees before the first new token: echo, and what a resumed choice had held back.
        drafted, accepted, forced: tokens that were proposed, those of them that it took, and those that its grammar
            left no choice about.
        drafting: what drafting knows of it.
    """

    def __init__(self, prepared: PreparedRequest, choice: int, arrival: int, model: LoadedModel) -> None:
        generate = prepared.generate
        self.prepared = prepared
        self.choice = choice
        self.order = Order(generate.priority, arrival, choice)
        self.tokens = list(prepared.prompt)
        self.output: list[int] = []
        self.lease: Lease | None = None
        self.width = 1
        self.finish: Finish | None = None
        self._tokenizer = model.tokenizer
        # Stop strings end text: where there is none, nothing of a call is taken for one.
        self._text = TextStream(model.tokenizer.token_bytes, () if prepared.calls_only else generate.stop)
        self._tools = _tool_parser(prepared, choice, model)
        self._logprobs: deque[api.TokenLogprob] = deque()
        resume = next((r for r in generate.resume if r.choice == choice), api.Resume(choice=choice))
        self._skip = resume.chars
        self._grammar = prepared.grammar.begin() if prepared.grammar is not None else None
        self._failure: GrammarFailure | None = None
        self.drafted = self.accepted = self.forced = 0
        self.drafting = DraftRecord()
        self._said: list[str] = []
        self._calls: dict[int, api.ToolCall] = {}
        self._known = deque(resume.ids)
        opening = self._visible(prepared.echo)
        # With log-probabilities the known tokens are computed anew, so that those of held-back tokens are there.
        while self._known and self.finish is None and generate.logprobs is None:
            opening += self._take(Drawn(self._known.popleft(), True, None)).text
        self.opening = opening
        if self.finish is None and len(self.output) >= prepared.limit:
            self.finish = Finish("length")

    @property
    def owner(self) -> SessionKey:
        """The session that it belongs to."""
        return self.prepared.cache_key(self.choice).owner

    @property
    def missing(self) -> int:
        """Tokens whose keys and values are not in the cache."""
        return len(self.tokens) - (self.lease.length if self.lease else 0)

    @property
    def answer(self) -> api.Message:
        """What it has said so far, in the form in which a client repeats it in its next request."""
        calls = tuple(self._calls[index] for index in sorted(self._calls))
        return api.Message(role="assistant", content="".join(self._said), tool_calls=calls)

    @property
    def room(self) -> int:
        """Tokens that it may still generate."""
        return self.prepared.limit - len(self.output)

    @property
    def in_call(self) -> bool:
        """Whether it is writing a tool call."""
        return self.prepared.calls_only or (self._tools is not None and self._tools.inside)

    @property
    def leeway(self) -> int | None:
        """How many tokens its grammar allows next; None for all."""
        masks = self.masks(DraftTree())
        return None if masks is None else int.from_bytes(masks[0].numpy().tobytes(), "little").bit_count()

    def allowed(self, draft: DraftTree) -> DraftTree:
        """Returns a draft without the nodes that the grammar does not allow, and without what is below them."""
        if self._grammar is None:
            return draft
        found = self._followed(lambda grammar: grammar.masks(draft.tokens, draft.parents))
        return draft.kept(() if found is None else found.allowed)

    def masks(self, draft: DraftTree) -> torch.Tensor | None:
        """Returns which tokens may come next and after each node of `draft`, int32 [1 + nodes, words]; None for all.

        `draft` is one that the grammar allows.
        """
        found = self._followed(lambda grammar: grammar.masks(draft.tokens, draft.parents))
        # After a failure the next token ends the choice, whatever it is.
        return None if found is None else found.masks

    def settled(self) -> tuple[int, ...]:
        """Returns the tokens that must come next, whatever the model says."""
        # Their log-probabilities would be missing; known tokens of a resumed choice come in their own order.
        if self.prepared.generate.logprobs is not None or self._known:
            return ()
        return self._followed(lambda grammar: grammar.forced()) or ()

    def _followed(self, ask: Callable[[GrammarState], _Said]) -> _Said | None:
        """Returns what the grammar says, None without one; one that cannot be followed fails this choice alone."""
        if self._grammar is None or self._failure is not None:
            return None
        try:
            return ask(self._grammar)
        except GrammarFailure as error:
            self._failure = error
            return None

    def accept(self, drawn: Drawn) -> Emission | None:
        """Appends the drawn token; returns what the client sees of it, None for one that it has already."""
        if not self._known:
            return self._take(drawn)
        shown = self._take(drawn._replace(token=self._known.popleft()))
        return Emission(text=shown.text) if shown.text else None

    def _take(self, drawn: Drawn) -> Emission:
        """Appends a token, and ends the choice where it does."""
        generate, token = self.prepared.generate, drawn.token
        self._followed(lambda grammar: grammar.accept(token))
        if self._failure is not None:
            self.finish = Finish("stop", error=self._failure)
            return Emission()
        self.tokens.append(token)
        self.output.append(token)
        shown = Emission(ids=(token,))
        if token in self._tokenizer.eos_ids and not generate.ignore_eos:
            return self._close(shown, Finish("stop"))
        self.drafting.confidence = drawn.confidence
        if drawn.logprobs is not None:
            self._logprobs.append(self._named(drawn.logprobs))
        released = self._text.push(token)
        shown = self._show(shown, released)
        chat = self.prepared.chat
        if released.stopped is not None:
            return self._close(shown, Finish("stop", released.stopped))
        if self._tools is not None and self._tools.called and chat is not None and not chat.tool_choice.parallel:
            return self._close(shown, Finish("stop"))
        if len(self.output) >= self.prepared.limit:
            return self._close(shown, Finish("length"))
        return shown

    def _show(self, shown: Emission, released: Released) -> Emission:
        """Adds what the text stream released to `shown`."""
        text, calls = (released.text, ()) if self._tools is None else self._tools.push(released.text)
        self._keep(text, calls)
        count = min(released.tokens, len(self._logprobs))
        return Emission(
            ids=shown.ids,
            text=shown.text + self._visible(text),
            logprobs=shown.logprobs + tuple(self._logprobs.popleft() for _ in range(count)),
            tool_calls=shown.tool_calls + calls,
        )

    def _close(self, shown: Emission, finish: Finish) -> Emission:
        """Ends the choice; adds what was held back to `shown`."""
        released = self._text.finish()
        shown = self._show(shown, released)
        if released.stopped is not None:
            finish = Finish("stop", released.stopped)
        if self._tools is not None:
            text, calls = self._tools.finish()
            self._keep(text, calls)
            shown = shown._replace(text=shown.text + self._visible(text), tool_calls=shown.tool_calls + calls)
            # As OpenAI has it, an answer that had to be a call of one named tool ends with "stop".
            chat = self.prepared.chat
            named = chat is not None and chat.tool_choice.mode == "named"
            if self._tools.called and finish.reason == "stop" and not named:
                finish = finish._replace(reason="tool_calls")
        self.finish = finish
        return shown

    def _keep(self, text: str, calls: tuple[api.ToolCallDelta, ...]) -> None:
        self._said.append(text)
        self.drafting.heard(text)
        for piece in calls:
            before = self._calls.get(piece.index, api.ToolCall(id="", name="", arguments=""))
            self._calls[piece.index] = api.ToolCall(
                id=piece.id or before.id,
                name=piece.name or before.name,
                arguments=before.arguments + piece.arguments,
            )

    def _visible(self, text: str) -> str:
        """Returns what of `text` the client does not have yet."""
        skipped = min(self._skip, len(text))
        self._skip -= skipped
        return text[skipped:]

    def _named(self, raw: RawLogprobs) -> api.TokenLogprob:
        top = tuple(self._entry(token, logprob) for token, logprob in raw.top)
        entry = self._entry(raw.token, raw.logprob)
        return api.TokenLogprob(token=entry.token, logprob=entry.logprob, bytes=entry.bytes, top=top)

    def _entry(self, token: int, logprob: float) -> api.TopLogprob:
        text, data = self._tokenizer.token_text(token), self._tokenizer.token_bytes(token)
        return api.TopLogprob(token=text, logprob=logprob, bytes=tuple(data))


def _tool_parser(prepared: PreparedRequest, choice: int, model: LoadedModel) -> ToolCallParser | None:
    chat = prepared.chat
    if chat is None or not prepared.parses_tools:
        return None
    request = prepared.generate.request

    def call_id(index: int) -> str:
        # Derived, not drawn, so that a resumed request gives the same call the same id.
        return "call_" + hashlib.sha256(f"{request}:{choice}:{index}".encode()).hexdigest()[:24]

    return ToolCallParser(model.prompts.tool_format, chat.tools, call_id, prepared.open_tools)
