"""Compiles what requests ask for to grammars, each new one first in a process that may be killed.

    specification → sizes checked → key → cache → schemas settled → helper compiles and follows it → compiled here

A schema is settled once, for all tool sets that hold it: the helper tries the exact form, then one in which
keywords that no grammar expresses allow anything, then the relaxed one (`schema.Survey`); for the last two the
finished text is checked (`CompiledGrammar.check`). What the helper could not compile within its limits is never
compiled here.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import llguidance

from magnitude_engine.decode.grammar import compose
from magnitude_engine.decode.grammar.jobs import Compiled, CompileJob
from magnitude_engine.decode.grammar.process import Ended, Helper, HelperLimits
from magnitude_engine.decode.grammar.recent import Recent
from magnitude_engine.decode.grammar.refusal import check_tools, parameters_field, refusal, unenforced, unknown
from magnitude_engine.decode.grammar.schema import SchemaLimits, check_size, survey
from magnitude_engine.decode.grammar.spec import JsonSchema, Lark, Regex, Spec, ToolCalls, content_key
from magnitude_engine.decode.grammar.state import GrammarState
from magnitude_engine.decode.grammar.tokens import GrammarTokenizer, describe, library_tokenizer
from magnitude_engine.decode.grammar.validate import PostCheck, Rule
from magnitude_engine.errors import EngineError, FeatureUnsupported, Overloaded, RequestError


@dataclass(frozen=True, slots=True)
class CompilerLimits:
    """Bounds on what is compiled and kept.

    Attributes:
        steps: tokens for which the helper follows each new grammar.
        source: characters of a regular expression or a Lark grammar.
        together: characters of all schemas of a request.
        entries: grammars kept.
        answers: schemas of which it is kept how the helper fared with them.
    """

    schema: SchemaLimits = field(default_factory=SchemaLimits)
    helper: HelperLimits = field(default_factory=HelperLimits)
    steps: int = 64
    source: int = 64 * 1024
    tools: int = 512
    together: int = 4 * 1024 * 1024
    entries: int = 256
    answers: int = 4_096


@dataclass(frozen=True, slots=True)
class _Settled:
    """A schema in the form that compiles, and what of it is left to be checked."""

    text: str
    unenforced: tuple[str, ...]
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """One schema of a specification: whose (None: the whole answer's), as its author wrote it, and settled."""

    tool: str | None
    schema: Any
    settled: _Settled


class CompiledGrammar:
    """A grammar ready for use; thread-safe.

    Attributes:
        key: the specification's.
        check: what the grammar does not enforce and must be checked before it is released; None for nothing.
        ignored: keywords and formats that assert nothing because no standard defines them, with their place.
        words: size of a mask.
    """

    def __init__(self, key: str, parts: Sequence[_Part], matcher: Any, words: int, eos: frozenset[int]) -> None:
        rules = tuple(
            Rule(tool=part.tool, schema=json.dumps(part.schema), keywords=part.settled.unenforced)
            for part in parts
            if part.settled.unenforced
        )
        self.key = key
        self.words = words
        self.check = PostCheck(rules=rules) if rules else None
        self.ignored = tuple(place for part in parts for place in part.settled.ignored)
        self._matcher = matcher
        self._eos = eos
        self._lock = threading.Lock()

    def begin(self) -> GrammarState:
        """Returns the state of a new sequence."""
        with self._lock:
            return GrammarState(self._matcher.deep_copy(), self.words, self._eos)


class GrammarCompiler:
    """Thread-safe; `compile` blocks, so it is not for the thread that runs the engine's steps.

    Args:
        tokenizer: the model's.
        columns: width of the model's logits where it is not the tokenizer's size.
    """

    def __init__(
        self, tokenizer: GrammarTokenizer, columns: int | None = None, limits: CompilerLimits | None = None
    ) -> None:
        vocabulary = describe(tokenizer, columns)
        self.limits = limits or CompilerLimits()
        self.words = (vocabulary.columns + 31) // 32
        self._eos = frozenset(vocabulary.eos)
        self._library = library_tokenizer(vocabulary, tokenizer.encode)
        self._helper = Helper(vocabulary, self.limits.helper)
        self._grammars: Recent[CompiledGrammar | RequestError] = Recent(self.limits.entries)
        self._answers: Recent[Compiled | Ended] = Recent(self.limits.answers)
        self._turn = threading.Lock()

    def start(self) -> None:
        """Starts the helper ahead of the first grammar."""
        self._helper.start()

    def close(self) -> None:
        """Ends the helper; new grammars are refused from then on."""
        self._helper.close()

    @property
    def helper_pid(self) -> int | None:
        """The helper's process id while it runs."""
        return self._helper.pid

    def compile(self, spec: Spec, tenant: str = "") -> CompiledGrammar:
        """Returns the grammar of `spec`, from the cache where its content was compiled for the tenant before.

        What other tenants had compiled takes as long as ever: the time tells nothing of them.

        Raises:
            RequestError: it cannot be used; `param` is its field, and the message names the keyword.
            FeatureUnsupported: the same, where another engine might serve it.
            Overloaded: too many others are waiting.
        """
        self._check(spec)
        # Refusals name the field, so it is part of the cache's key.
        key = content_key(spec.param, tenant, spec.key())
        found = self._grammars.get(key)
        if found is None:
            if not self._turn.acquire(timeout=self.limits.helper.turn_s):
                raise Overloaded("too many new grammars are waiting to be compiled; send the request again")
            try:
                found = self._grammars.get(key) or self._grammars.put(key, self._new(spec, tenant))
            finally:
                self._turn.release()
        if isinstance(found, RequestError):
            raise type(found)(found.message, param=found.param)
        return found

    def _check(self, spec: Spec) -> None:
        """Bounds what is asked for before anything walks through it."""
        limits = self.limits.schema
        if isinstance(spec, JsonSchema):
            check_size(spec.schema, limits, spec.param)
        elif isinstance(spec, ToolCalls):
            check_tools(spec, self.limits.tools)
            for i, tool in enumerate(spec.tools):
                check_size(tool.parameters, limits, parameters_field(spec, i))
            together = replace(limits, depth=limits.depth + 1, characters=self.limits.together)
            check_size([tool.parameters for tool in spec.tools], together, spec.param)
        elif isinstance(spec, Regex | Lark):
            text = spec.pattern if isinstance(spec, Regex) else spec.source
            if len(text) > self.limits.source:
                raise RequestError(
                    f"{spec.param} has {len(text)} characters; {self.limits.source} are allowed", param=spec.param
                )

    def _new(self, spec: Spec, tenant: str) -> CompiledGrammar | RequestError:
        """Returns the grammar of a specification that is not in the cache, or why there is none."""
        if isinstance(spec, Regex):
            return self._tried(compose.regex_grammar(spec.pattern), spec)
        if isinstance(spec, Lark):
            return self._tried(compose.lark_grammar(spec.source), spec)
        if isinstance(spec, ToolCalls):
            return self._calls(spec, tenant)
        schema = spec.schema if isinstance(spec, JsonSchema) else {"type": "object"}
        settled = self._settled(schema, schema, spec.param, tenant)
        if isinstance(settled, RequestError):
            return settled
        return self._compiled(compose.json_grammar(settled.text), spec, (_Part(None, schema, settled),))

    def _calls(self, spec: ToolCalls, tenant: str) -> CompiledGrammar | RequestError:
        parts: list[_Part] = []
        for i, tool in enumerate(spec.tools):
            param = parameters_field(spec, i)
            wanted = compose.arguments_schema(tool.parameters, param)
            settled = self._settled(tool.parameters, wanted, param, tenant)
            if isinstance(settled, RequestError):
                return settled
            parts.append(_Part(tool.name, tool.parameters, settled))
        return self._tried(compose.call_grammar(spec, [part.settled.text for part in parts]), spec, parts)

    def _settled(self, schema: Any, wanted: Any, param: str, tenant: str) -> _Settled | RequestError:
        """Returns the form of `wanted` that compiles; `schema` is what its author wrote."""
        found = survey(wanted, param)
        texts = [] if found.checked else [compose.json_text(found.grammar, False)]
        exact = len(texts)
        texts += [compose.json_text(found.grammar, True), compose.json_text(found.relaxed, True)]
        key = content_key("schema", tenant, wanted)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._asked(tuple(map(compose.json_grammar, texts)), json.dumps(schema), exact)
            self._answers.put(key, answer)
        if isinstance(answer, Ended) or answer.index < 0:
            return refusal(answer, param)
        if (problem := unknown(answer.warnings)) is not None:
            return FeatureUnsupported(f"{param}: {problem}; leave it out", param=param)
        left = (*found.checked, *unenforced(answer.warnings))
        if answer.index > exact:
            left += found.loosened
        return _Settled(texts[answer.index], left if answer.index >= exact else (), found.ignored)

    def _tried(self, grammar: str, spec: Spec, parts: Sequence[_Part] = ()) -> CompiledGrammar | RequestError:
        """Compiles in the helper, then here."""
        answer = self._asked((grammar,), "", 1)
        if isinstance(answer, Ended) or answer.index < 0:
            return refusal(answer, spec.param)
        return self._compiled(grammar, spec, parts)

    def _asked(self, grammars: tuple[str, ...], schema: str, exact: int) -> Compiled | Ended:
        job = CompileJob(
            grammars=grammars, budget=self.limits.helper.job, steps=self.limits.steps, schema=schema, exact=exact
        )
        answer = self._helper.ask(job)
        if not isinstance(answer, Compiled | Ended):
            raise EngineError("the grammar helper gave an answer of the wrong kind")
        return answer

    def _compiled(self, grammar: str, spec: Spec, parts: Sequence[_Part]) -> CompiledGrammar:
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._library, grammar, log_level=0, limits=limits)
        # The first mask is the costly one; what it computes is shared by all sequences.
        matcher.compute_bitmask()
        if matcher.is_error():
            problem = str(matcher.get_error())[:200]
            raise EngineError(f"{spec.param}: its grammar compiled in the helper but not here: {problem}")
        return CompiledGrammar(spec.key(), parts, matcher, self.words, self._eos)
