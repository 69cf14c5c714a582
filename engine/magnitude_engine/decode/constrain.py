"""What a request demands of its answer, as a compiled grammar, and the check of what no grammar expresses.

| request | grammar |
|---|---|
| tools, `tool_choice` auto | free text; from the begin marker on, a valid call |
| tools, `tool_choice` required or named | calls only |
| `format` | the answer as a whole |
| both, `tool_choice` required or named | calls only: there is no text that the format could apply to |
| both, `tool_choice` auto | refused |
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

from magnitude_engine import api
from magnitude_engine.decode.grammar.compiler import CompiledGrammar, GrammarCompiler
from magnitude_engine.decode.grammar.spec import JsonObject, JsonSchema, Lark, Regex, Spec, ToolCalls
from magnitude_engine.decode.grammar.tokens import GrammarTokenizer
from magnitude_engine.decode.grammar.validate import Rule, TimedOut, Valid, Validator
from magnitude_engine.decode.tools import ToolFormat
from magnitude_engine.errors import AnswerInvalid, FeatureUnsupported


class Constraints:
    """Thread-safe; calls block while its processes work, which start with `start` or when something needs them.

    Args:
        columns: width of the model's logits.
        format: how the model writes tool calls.
    """

    def __init__(self, tokenizer: GrammarTokenizer, columns: int, format: ToolFormat) -> None:
        self._tokenizer = tokenizer
        self._columns = columns
        self._format = format
        self._lock = threading.Lock()
        self._closes = 0
        self._compiler: GrammarCompiler | None = None
        self._validator: Validator | None = None

    def start(self) -> None:
        """Has the compiler and its process get ready ahead of the first grammar; does not wait for them."""
        # Without a token that ends an answer no request can have a grammar; it is told so.
        if self._tokenizer.eos_ids:
            start = threading.Thread(target=self._start, args=(self._closes,), name="magnitude-grammar", daemon=True)
            start.start()

    def grammar(self, generate: api.Generate) -> CompiledGrammar | None:
        """Returns what the answers may be; None for anything.

        Raises:
            RequestError: it cannot be used; `param` is its field, and the message names the keyword.
            FeatureUnsupported: the same, where another engine might serve it.
            Overloaded: too many others are waiting.
        """
        spec = specification(generate, self._format)
        grammar = None if spec is None else self._compilers().compile(spec, generate.tenant)
        if grammar is not None and grammar.check is not None:
            # Ready by the time the answer is.
            self._checker()
        return grammar

    def prepare(self, tools: Sequence[api.Tool], tenant: str) -> CompiledGrammar | None:
        """Compiles what the tenant's requests with these tools will need (see `grammar`)."""
        spec = ToolCalls(tools=tuple(tools), format=self._format)
        return self._compilers().compile(spec, tenant) if tools else None

    def check(self, rule: Rule, text: str) -> None:
        """Raises AnswerInvalid where finished text breaks the rule, or checking it takes too long."""
        verdict = self._checker().check(rule, text)
        if isinstance(verdict, Valid):
            return
        where = "the answer" if rule.tool is None else f"the arguments for tool {rule.tool!r}"
        reason = verdict.message if isinstance(verdict, TimedOut) else f"{verdict.path or '/'}: {verdict.message}"
        raise AnswerInvalid(
            f"{where} did not satisfy the schema ({reason}); no grammar enforces {', '.join(rule.keywords)[:200]}: "
            "send the request again, or remove the keyword"
        )

    def close(self) -> None:
        """Ends its processes; they start anew when something needs them."""
        with self._lock:
            compiler, validator = self._compiler, self._validator
            self._compiler = self._validator = None
            self._closes += 1
        if compiler is not None:
            compiler.close()
        if validator is not None:
            validator.close()

    def _start(self, closes: int) -> None:
        with self._lock:
            compiler = self._made() if self._closes == closes else None
        if compiler is not None:
            compiler.start()

    def _compilers(self) -> GrammarCompiler:
        with self._lock:
            return self._made()

    def _made(self) -> GrammarCompiler:
        """Returns the compiler; to be called under the lock."""
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._tokenizer, self._columns)
            weakref.finalize(self, self._compiler.close)
        return self._compiler

    def _checker(self) -> Validator:
        with self._lock:
            if self._validator is None:
                self._validator = Validator()
                weakref.finalize(self, self._validator.close)
                self._validator.start()
            return self._validator


def specification(generate: api.Generate, format: ToolFormat) -> Spec | None:
    """Returns what a request demands of its answers; None for nothing.

    Raises:
        FeatureUnsupported: tools that the model may or may not call together with a format.
    """
    chat = generate.input if isinstance(generate.input, api.ChatInput) else None
    choice = chat.tool_choice if chat is not None else api.ToolChoice(mode="none")
    wanted = generate.format
    if chat is None or choice.mode == "none" or (choice.mode == "auto" and not chat.tools):
        return None if wanted is None else _text(wanted)
    if wanted is not None and choice.mode == "auto":
        field = wanted.param.partition(".")[0]
        raise FeatureUnsupported(
            f"{field} together with tools needs tool_choice 'none', 'required' or a named tool: the local model "
            "cannot choose between a call and a formatted answer",
            param=field,
        )
    return ToolCalls(tools=chat.tools, format=format, mode=choice.mode, name=choice.name, parallel=choice.parallel)


def _text(wanted: api.Format) -> Spec:
    match wanted:
        case api.JsonObjectFormat():
            return JsonObject(param=wanted.param)
        case api.JsonSchemaFormat():
            return JsonSchema(schema=wanted.schema, param=wanted.param)
        case api.RegexFormat():
            return Regex(pattern=wanted.pattern, param=wanted.param)
        case api.LarkFormat():
            return Lark(source=wanted.source, param=wanted.param)
