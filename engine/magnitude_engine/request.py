"""One choice of a request: its tokens, what of its text a client may see, and why it ended.

`Sequence.accept` takes each drawn token and says what a client may see of it. A resumed choice takes the tokens
that its client already has in the same way, silently, and then releases only the characters past
`Resume.chars`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from magnitude_engine import api
from magnitude_engine.decode.grammar.state import GrammarState
from magnitude_engine.decode.sample import Drawn, RawLogprobs
from magnitude_engine.decode.text import Released, TextStream
from magnitude_engine.decode.tools import ToolCallParser
from magnitude_engine.draft.record import DraftRecord
from magnitude_engine.draft.tree import DraftTree
from magnitude_engine.errors import GrammarFailure, MagnitudeError
from magnitude_engine.kv.lease import Lease
from magnitude_engine.kv.retention import SessionKey
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.prepared import PreparedRequest
from magnitude_engine.scheduler import Order

_Said = TypeVar("_Said")


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
