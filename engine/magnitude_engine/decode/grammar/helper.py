"""The helper process: compiles grammars and checks texts that may take forever, and is killed when they do.

    python -m magnitude_engine.decode.grammar.helper      (standard input is a socket to the engine)

It ends when the engine does: idle, it reads the end of its socket; busy, its own timers kill it, since their
signals keep their default action and need no cooperation from the code that runs.
"""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import jsonschema
import llguidance
import referencing
import referencing.exceptions
import referencing.jsonschema
from jsonschema.validators import validator_for

from magnitude_engine.decode.grammar.jobs import (
    Answer,
    Begin,
    Budget,
    Checked,
    CheckJob,
    Compiled,
    CompileJob,
    Ready,
    receive_job,
    send,
)
from magnitude_engine.decode.grammar.keywords import FORMAT_PATTERNS, FORMATS, LISTS, MAPS, SINGLE, Treatment
from magnitude_engine.decode.grammar.tokens import library_tokenizer, own_encoder

ERROR_CHARACTERS = 400


def main() -> int:
    """Serves until the engine closes the socket; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for timer in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(timer, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(fileno=sys.stdin.fileno()) as channel:
        try:
            begin = receive_job(channel)
            if not isinstance(begin, Begin):
                return 2
            vocabulary = begin.vocabulary
            tokenizer = None if vocabulary is None else library_tokenizer(vocabulary, own_encoder(vocabulary))
            _limit_memory(begin.memory)
            send(channel, Ready())
            while True:
                send(channel, _answer(receive_job(channel), tokenizer))
                _limit_time(Budget(cpu_s=0, wall_s=0))
        except (EOFError, OSError):
            return 0


def _limit_memory(more: int) -> None:
    with open("/proc/self/statm") as file:
        held = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (held + more, hard))


def _limit_time(budget: Budget) -> None:
    """Sets both timers; 0 turns one off. The kernel's limit stands behind the first one."""
    signal.setitimer(signal.ITIMER_PROF, budget.cpu_s)
    signal.setitimer(signal.ITIMER_REAL, budget.wall_s)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + budget.cpu_s) + 1
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def _answer(job: Any, tokenizer: Any) -> Answer:
    """Does one job under its limits of time."""
    _limit_time(job.budget)
    if isinstance(job, CompileJob):
        return compile_first(job, tokenizer)
    return check(job)


def compile_first(job: CompileJob, tokenizer: Any) -> Compiled:
    """Returns what became of the job's grammars, tried in order."""
    if job.schema and (problem := malformed(json.loads(job.schema))):
        return Compiled(index=-1, errors=(problem,))
    errors: list[str] = []
    for index, grammar in enumerate(job.grammars):
        if index == job.exact and (problem := uncheckable(json.loads(job.schema))):
            return Compiled(index=-1, errors=(*errors, problem))
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        warnings = tuple(matcher.get_grammar_warnings())
        if not matcher.is_error():
            follow(matcher, job.steps)
        if not matcher.is_error():
            return Compiled(index=index, errors=tuple(errors), warnings=warnings)
        errors.append(matcher.get_error()[:ERROR_CHARACTERS])
    return Compiled(index=-1, errors=tuple(errors))


def follow(matcher: Any, steps: int) -> None:
    """Walks through the grammar by allowed tokens, so that one that explodes on its way does so here."""
    state = 1
    for _ in range(steps):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            return
        # A linear congruence: the walk is the same in every run.
        state = (state * 1_103_515_245 + 12_345) % 2**31
        token = _allowed_from(mask, state)
        if token < 0 or not matcher.consume_token(token):
            return


def _allowed_from(mask: bytes, start: int) -> int:
    """Returns the first allowed token at or after a place in the mask, around its end; -1 where there is none."""
    for step in range(len(mask)):
        at = (start + step) % len(mask)
        if mask[at]:
            return at * 8 + (mask[at] & -mask[at]).bit_length() - 1
    return -1


def malformed(schema: Any) -> str:
    """Returns what makes `schema` no JSON Schema of its draft; empty where it is one."""
    try:
        validator: Any = validator_for(schema, default=jsonschema.Draft202012Validator)
        # Regular expressions are the grammar compiler's to judge: Python's syntax is another one.
        validator.check_schema(schema, format_checker=jsonschema.FormatChecker(formats=()))
    except jsonschema.SchemaError as error:
        return f"it is not a valid JSON Schema: {error.message[:ERROR_CHARACTERS]} (at {error.json_path[:100]})"
    return ""


def uncheckable(schema: Any) -> str:
    """Returns what would stop a check against `schema`: a reference that leaves it, a pattern Python cannot read."""
    try:
        resolver = referencing.jsonschema.EMPTY_REGISTRY.resolver_with_root(_dialect(schema).create_resource(schema))
        for at in _schemas(schema):
            for word in ("$ref", "$dynamicRef"):
                if isinstance(at.get(word), str):
                    _scoped(resolver, at).lookup(at[word])
            for pattern in (at.get("pattern"), *(at.get("patternProperties") or ())):
                if isinstance(pattern, str):
                    re.compile(pattern)
    except referencing.exceptions.Unresolvable as error:
        return f"$ref {error.ref!r} does not resolve within the schema; put what it refers to under $defs"
    except (re.error, OverflowError, RecursionError) as error:
        return f"a pattern cannot be read: {error}"
    return ""


def _dialect(schema: Any) -> Any:
    named = schema.get("$schema") if isinstance(schema, dict) else None
    return referencing.jsonschema.specification_with(str(named), default=referencing.jsonschema.DRAFT202012)


def _scoped(resolver: Any, schema: dict[str, Any]) -> Any:
    return resolver.in_subresource(_dialect(schema).create_resource(schema)) if "$id" in schema else resolver


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields every subschema."""
    stack = [schema]
    while stack:
        at = stack.pop()
        if not isinstance(at, dict):
            continue
        yield at
        for word, value in at.items():
            if word in SINGLE:
                stack.append(value)
            if word in LISTS and isinstance(value, list):
                stack.extend(value)
            if word in MAPS and isinstance(value, dict):
                stack.extend(value.values())


def check(job: CheckJob) -> Checked:
    """Returns whether the job's text is JSON that its schema accepts."""
    try:
        instance = json.loads(job.text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return Checked(valid=False, message=f"not JSON: {error}")
    schema = json.loads(job.schema)
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, registry=referencing.jsonschema.EMPTY_REGISTRY, format_checker=_formats())
    try:
        found = jsonschema.exceptions.best_match(validator.iter_errors(instance))
    except (RecursionError, re.error, OverflowError, referencing.exceptions.Unresolvable) as problem:
        return Checked(valid=False, message=f"the schema cannot be checked: {type(problem).__name__}: {problem}"[:400])
    if found is None:
        return Checked(valid=True)
    path = "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in found.absolute_path)
    return Checked(valid=False, message=found.message[:ERROR_CHARACTERS], path=path)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _formats() -> jsonschema.FormatChecker:
    """Returns a checker of the formats that no grammar enforces."""
    checker = jsonschema.FormatChecker(formats=("idn-email", "regex"))
    for name, pattern in FORMAT_PATTERNS.items():
        if FORMATS[name] is Treatment.CHECKED:
            checker.checks(name)(lambda text, p=pattern: not isinstance(text, str) or p.fullmatch(text) is not None)
    return checker


if __name__ == "__main__":
    sys.exit(main())
