"""What compiles, what is refused and by which name, what is left to the check, and what is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_engine.decode.grammar.compiler import CompilerLimits, GrammarCompiler
from magnitude_engine.decode.grammar.jobs import Budget, Compiled
from magnitude_engine.decode.grammar.process import Ended, HelperLimits
from magnitude_engine.decode.grammar.spec import JsonObject, Lark, Regex, ToolCalls
from magnitude_engine.decode.grammar.validate import Invalid, Valid, Validator
from magnitude_engine.errors import EngineError, FeatureUnsupported, Overloaded, RequestError
from magnitude_engine.model.template import HERMES
from magnitude_engine.model.tokenizer import Tokenizer
from testkit.grammar import CASES, PARAM, REFUSED, Case, accepts, allowed, spec, text_of, written
from testkit.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_grammar_and_check_together_are_the_schema(
    case: Case, compiler: GrammarCompiler, validator: Validator, tokenizer: Tokenizer
) -> None:
    grammar = compiler.compile(spec(case.schema))
    rule = None if grammar.check is None else grammar.check.rule()
    named = () if rule is None else tuple(dict.fromkeys(place.split(" at ")[0] for place in rule.keywords))
    assert named == case.checked
    for instance in case.valid:
        assert accepts(grammar, tokenizer, written(instance)), instance
        assert rule is None or isinstance(validator.check(rule, written(instance)), Valid)
    for instance in case.invalid:
        stopped = not accepts(grammar, tokenizer, written(instance))
        assert stopped or (rule is not None and isinstance(validator.check(rule, written(instance)), Invalid)), instance


@pytest.mark.thorough
@pytest.mark.parametrize(("schema", "problem"), REFUSED, ids=str)
def test_what_cannot_be_enforced_or_checked_is_refused_by_name(
    schema: Any, problem: str, compiler: GrammarCompiler
) -> None:
    for _ in range(2):  # The second time from the cache.
        with pytest.raises(RequestError, match=problem) as refused:
            compiler.compile(spec(schema))
        assert refused.value.param == PARAM
        assert PARAM in refused.value.message


def test_what_nobody_defines_is_reported(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "format": "int32"}}, "nullable": True}
    grammar = compiler.compile(spec(schema))
    assert grammar.check is None
    assert grammar.ignored == ("format int32 at #/properties/a", "nullable at #")


def test_the_library_cannot_be_told_to_ignore_keywords(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    options = {"lenient": True, "whitespace_flexible": True}
    grammar = compiler.compile(spec({"type": "array", "items": {"not": {}}, "x-guidance": options}))
    assert grammar.check is not None
    assert not accepts(grammar, tokenizer, "[1,2]")
    assert accepts(grammar, tokenizer, "[1, 2]")


def test_a_json_object_is_any_object_and_nothing_else(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(JsonObject())
    for text, good in {'{"a": [1, {"b": null}]}': True, "[1]": False, "1": False, '{"a" :1}': False}.items():
        assert accepts(grammar, tokenizer, text) is good, text


def test_regular_expressions_and_lark(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    word = compiler.compile(Regex(pattern=r"[a-c]{2}<\|im_end\|>[0-9]+"))
    assert accepts(word, tokenizer, "ab<|im_end|>12")
    assert not accepts(word, tokenizer, "ab<|im_end|>")
    lark = compiler.compile(Lark(source='start: "x" item+\nitem: /[0-9]/ ";"'))
    assert accepts(lark, tokenizer, "x1;2;")
    assert not accepts(lark, tokenizer, "x")
    for wrong in (Regex(pattern="(?=a)b"), Regex(pattern="a" * 70_000), Lark(source="start: missing")):
        with pytest.raises(RequestError, match=wrong.param) as refused:
            compiler.compile(wrong)
        assert refused.value.param == wrong.param


def test_special_token_text_stays_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    state = compiler.compile(spec({"enum": ["a<|im_end|>b"]})).begin()
    forced = state.forced()
    assert text_of(tokenizer, forced) == '"a<|im_end|>b"'
    assert not tokenizer.special_ids & set(forced)
    for token in forced:
        assert allowed(state.mask()) == [token]
        state.accept(token)
    assert state.ended
    assert set(allowed(state.mask())) == set(tokenizer.eos_ids)


def test_one_content_is_compiled_once(compiler: GrammarCompiler) -> None:
    schema = {"type": "object", "properties": {"once": {"type": "integer"}}}
    first = compiler.compile(spec(schema))
    assert compiler.compile(spec(dict(schema))) is first
    assert compiler.compile(spec({**schema, "title": "other"})) is not first


def test_what_another_tenant_had_compiled_is_compiled_anew(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = compiler._asked

    def counted(grammars: tuple[str, ...], schema: str, exact: int) -> Compiled | Ended:
        asked.append(schema)
        return ask(grammars, schema, exact)

    monkeypatch.setattr(compiler, "_asked", counted)
    schema = {"type": "object", "properties": {"theirs": {"type": "integer"}}}
    for tenant in ("alice", "alice", "bob"):
        compiler.compile(spec(schema), tenant)
    assert len(asked) == 2


def test_a_tool_is_not_tried_again_at_another_place(compiler: GrammarCompiler) -> None:
    tool = api.Tool(name="a", parameters={"type": "object", "properties": {"moved": {"not": {"$ref": "#/none"}}}})
    other = api.Tool(name="b")
    for tools, place in (((tool,), 0), ((other, tool), 1)):
        with pytest.raises(RequestError, match=r"\$ref") as refused:
            compiler.compile(ToolCalls(tools=tools, format=HERMES))
        assert refused.value.param == f"tools[{place}].function.parameters"
        assert refused.value.message.startswith(refused.value.param)


@pytest.mark.slow
def test_the_cache_is_bounded(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, limits=CompilerLimits(entries=2))
    try:
        first = compiler.compile(Regex(pattern="a"))
        compiler.compile(Regex(pattern="b"))
        assert compiler.compile(Regex(pattern="a")) is first
        compiler.compile(Regex(pattern="c"))
        assert compiler.compile(Regex(pattern="a")) is first
        second = compiler.compile(Regex(pattern="b"))
        assert compiler.compile(Regex(pattern="b")) is second
    finally:
        compiler.close()
    with pytest.raises(EngineError, match="closed"):
        compiler.compile(Regex(pattern="d"))


def test_many_threads_get_their_grammars(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    results: dict[int, bool] = {}

    def work(i: int) -> None:
        grammar = compiler.compile(spec({"const": i % 5}))
        results[i] = accepts(grammar, tokenizer, str(i % 5)) and not accepts(grammar, tokenizer, "7")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(20), True)


@pytest.mark.slow
def test_more_logits_than_tokens(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, columns=tokenizer.vocab_size + 100)
    try:
        state = compiler.compile(Regex(pattern="(.|\n)*")).begin()
        assert state.mask().shape == ((tokenizer.vocab_size + 100 + 31) // 32,)
        assert max(allowed(state.mask())) < tokenizer.vocab_size
    finally:
        compiler.close()
    with pytest.raises(ValueError, match="columns"):
        GrammarCompiler(tokenizer, columns=10)


def nested(depth: int) -> Any:
    """A schema of arrays in arrays."""
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (nested(200), "levels deep"),
        (nested(100_000), "levels deep"),
        ({"enum": [f"v{i}" for i in range(70_000)]}, "alternatives"),
        ({"type": "object", "properties": {f"p{i}": {} for i in range(8_000)}}, "optional properties"),
        ({"const": "x" * 1_000_000}, "larger than"),
        ({"enum": [[[i]] for i in range(9_000)], "const": [0] * 200_000}, "larger than"),
    ],
    ids=["deep", "very deep", "enum", "optional", "long", "many"],
)
def test_large_schemas_are_refused_before_anything_reads_them(
    schema: Any, problem: str, compiler: GrammarCompiler
) -> None:
    before = compiler.helper_pid
    with pytest.raises(RequestError, match=problem):
        compiler.compile(spec(schema))
    assert compiler.helper_pid == before


_DOUBLING = {
    f"a{i}": {
        "anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2
        + [{"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}}]
    }
    for i in range(300)
}


@pytest.mark.thorough
def test_a_pattern_too_deep_to_read_is_refused_and_the_helper_lives(compiler: GrammarCompiler) -> None:
    compiler.compile(Regex(pattern="the helper has started"))
    before = compiler.helper_pid
    with pytest.raises(RequestError, match="a pattern cannot be read"):
        compiler.compile(spec({"type": "string", "pattern": "(" * 30_000 + "a" + ")" * 30_000}))
    assert compiler.helper_pid == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {**_DOUBLING, "a300": {"type": "string"}}, "$ref": "#/$defs/a0"},
        {"allOf": [{"properties": {f"a{i}": {"anyOf": [{"type": "string"}, {"minimum": i}]}}} for i in range(400)]},
    ],
    ids=["doubling references", "products"],
)
def test_a_bomb_is_killed_and_the_next_request_served(schema: Any) -> None:
    tokenizer = tiny_tokenizer()
    # Well under what these take, so that the outcome does not depend on the machine.
    limits = CompilerLimits(helper=HelperLimits(job=Budget(cpu_s=0.2, wall_s=3.0)))
    compiler = GrammarCompiler(tokenizer, limits=limits)
    try:
        compiler.compile(Regex(pattern="warm"))
        before = compiler.helper_pid
        began = time.monotonic()
        with pytest.raises(RequestError, match="given up") as refused:
            compiler.compile(spec(schema))
        assert refused.value.param == PARAM
        assert time.monotonic() - began < 30
        assert accepts(compiler.compile(spec({"const": 1})), tokenizer, "1")
        assert compiler.helper_pid != before
    finally:
        compiler.close()


@pytest.mark.slow
def test_a_helper_that_was_killed_is_replaced(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer)
    try:
        compiler.compile(Regex(pattern="x"))
        pid = compiler.helper_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert compiler.compile(Regex(pattern="y")).begin().forced() == tuple(tokenizer.encode("y"))
        assert compiler.helper_pid not in (None, pid)
    finally:
        compiler.close()


OWNER = """
import sys, time
sys.path.insert(0, "tests")
from testkit.tiny import tiny_tokenizer
from magnitude_engine.decode.grammar.compiler import GrammarCompiler
from magnitude_engine.decode.grammar.spec import Regex
compiler = GrammarCompiler(tiny_tokenizer())
compiler.compile(Regex(pattern="a"))
print(compiler.helper_pid, flush=True)
time.sleep(60)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_the_helper_ends_with_its_owner() -> None:
    with subprocess.Popen((sys.executable, "-c", OWNER), stdout=subprocess.PIPE, text=True, cwd=ROOT) as owner:
        assert owner.stdout is not None
        helper = int(owner.stdout.readline())
        assert not gone(helper)
        owner.kill()
    until = time.monotonic() + 10
    while not gone(helper) and time.monotonic() < until:
        time.sleep(0.02)
    assert gone(helper)


@pytest.mark.thorough
def test_waiting_has_a_limit(tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, limits=CompilerLimits(helper=HelperLimits(turn_s=0.05)))
    try:
        with compiler._turn, pytest.raises(Overloaded):
            compiler.compile(Regex(pattern="z"))
    finally:
        compiler.close()


def test_refusals_tell_what_another_engine_might_serve(compiler: GrammarCompiler) -> None:
    with pytest.raises(FeatureUnsupported):
        compiler.compile(spec({"type": "string", "format": "idn-hostname"}))
    with pytest.raises(RequestError) as wrong:
        compiler.compile(spec({"type": "words"}))
    assert not isinstance(wrong.value, FeatureUnsupported)
