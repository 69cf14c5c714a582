"""A request checked and tokenised, with its grammar."""

from __future__ import annotations

from dataclasses import dataclass

from magnitude_engine import api
from magnitude_engine.decode.grammar.compiler import CompiledGrammar
from magnitude_engine.decode.sample import check_sampling
from magnitude_engine.errors import ContextTooLong, FeatureUnsupported, RequestError
from magnitude_engine.kv.lease import CacheKey
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.model.tokenizer import Tokenizer

MAX_LOGPROBS = 20


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
    if wanted is None or prompt >= context:
        problem = f"prompt of {prompt} tokens leaves no room for output in the context of {context}; shorten the prompt"
    else:
        problem = (
            f"prompt of {prompt} tokens plus max_tokens {wanted} exceeds the context of {context}; "
            "shorten the prompt or lower max_tokens"
        )
    field = "max_tokens" if wanted and prompt < context else _input_field(generate)
    raise ContextTooLong(problem, param=field)


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
