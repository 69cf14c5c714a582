"""Answers under a grammar, from the request to the client: a random model, which keeps to no form by itself."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import jsonschema
import msgspec
import pytest
import torch

from magnitude_engine import api
from magnitude_engine.decode.grammar.state import DraftMasks, GrammarState
from magnitude_engine.engine import Engine
from magnitude_engine.errors import GrammarFailure
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.request import Sequence
from testkit.drafting import Oracle, drafted_by
from testkit.engine import Recorder, alone, drain, engine_config, generate, run, submit
from testkit.grammar import allowed
from testkit.steps import Walk, step
from testkit.steps import run as pages

pytestmark = pytest.mark.thorough

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["left", "right"]}},
    "required": ["x", "kind"],
    "additionalProperties": False,
}
UNEVEN: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [1, 2]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "not": {"properties": {"a": {"const": 1}}},
}
MOVE = api.Tool(name="move", parameters=POINT)
WAIT = api.Tool(name="wait")
TURN = api.Tool(
    name="on", parameters={"properties": {"a": {"enum": ["ü", "in"]}}, "required": ["a"], "additionalProperties": False}
)
PICK = api.Tool(name="pick", parameters=UNEVEN)
FORMATS: tuple[tuple[api.Format, Callable[[str], bool]], ...] = (
    (api.JsonSchemaFormat(schema=POINT, strict=True), lambda text: _valid(text, POINT)),
    (api.RegexFormat(pattern="(ab|cd){3}"), lambda text: text.replace("ab", "").replace("cd", "") == ""),
    (api.LarkFormat(source='start: "x" n "y"\nn: /[0-9]{2}/'), lambda text: text[0] + text[-1] == "xy"),
)


def _valid(text: str, schema: dict[str, Any]) -> bool:
    jsonschema.validate(json.loads(text), schema)
    return True


def ask(mode: api.ToolMode, *tools: api.Tool, seed: int = 0, **fields: Any) -> api.Generate:
    choice = api.ToolChoice(mode=mode, name=tools[0].name if mode == "named" else None, parallel=False)
    chat = api.ChatInput(
        messages=(api.Message(role="user", content="go"),), tools=tools, tool_choice=fields.pop("choice", choice)
    )
    sampling = api.Sampling(temperature=1.0, seed=seed)
    return generate(chat, **{"max_tokens": 120, "ignore_eos": False, "sampling": sampling, **fields})


def form(wanted: api.Format, seed: int = 0, **fields: Any) -> api.Generate:
    sampling = api.Sampling(temperature=1.0, seed=seed)
    given = {"max_tokens": 120, "ignore_eos": False, "sampling": sampling, "format": wanted}
    return generate("go", **{**given, **fields})


def answered(model: LoadedModel, *requests: api.Generate, **settings: Any) -> list[Recorder]:
    return run(Engine(model, engine_config(**settings), pages=96), *requests)


def calls(recorder: Recorder, choice: int = 0) -> list[tuple[str, str]]:
    """The calls as a client puts them together: (name, arguments)."""
    found: dict[int, list[str]] = {}
    for delta in recorder.of(api.Delta):
        for piece in delta.tool_calls if delta.choice == choice else ():
            assert (piece.id is None) == (piece.index in found)
            call = found.setdefault(piece.index, [piece.name or "", ""])
            call[1] += piece.arguments
    assert list(found) == list(range(len(found)))
    return [(name, arguments) for name, arguments in found.values()]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("mode", "finish"), [("required", "tool_calls"), ("named", "stop")])
def test_a_forced_call_is_valid(model: LoadedModel, mode: api.ToolMode, finish: str, seed: int) -> None:
    (told,) = answered(model, ask(mode, MOVE, WAIT, seed=seed))
    ((name, arguments),) = calls(told)
    assert name == "move" if mode == "named" else name in ("move", "wait")
    jsonschema.validate(json.loads(arguments), POINT if name == "move" else {})
    assert (told.text(), told.finish().reason) == ("", finish)
    assert told.usage.forced_tokens > 10


def test_parallel_calls_are_all_valid(model: LoadedModel) -> None:
    (told,) = answered(model, ask("required", MOVE, choice=api.ToolChoice(mode="required"), max_tokens=400))
    found = calls(told)
    assert len(found) > 1
    assert all(name == "move" and _valid(arguments, POINT) for name, arguments in found)


def test_auto_leaves_text_alone(model: LoadedModel) -> None:
    # Bytes that are no characters, and special tokens, are no text; a random model says them all the time.
    tokenizer = model.tokenizer
    barred = {t: -100.0 for t in range(tokenizer.vocab_size) if not tokenizer.token_bytes(t).isascii()} | {1: -100.0}
    sampling = api.Sampling(temperature=1.0, seed=3, logit_bias=barred)
    request = ask("auto", MOVE, choice=api.ToolChoice(), sampling=sampling)
    free = ask("none", MOVE, sampling=sampling)
    told, expected = answered(model, request, free)
    assert told.ids() == expected.ids()
    assert told.text() == expected.text()


def test_what_auto_begins_as_a_call_becomes_a_valid_one(model: LoadedModel) -> None:
    begin = model.tokenizer.encode("Well <tool_call>")
    known = (api.Resume(choice=0, ids=tuple(begin), chars=len("Well ")),)
    single = api.ToolChoice(parallel=False)
    (resumed,) = answered(model, ask("auto", MOVE, resume=known, choice=single))
    ((name, arguments),) = calls(resumed)
    assert name == "move"
    assert _valid(arguments, POINT)
    assert (resumed.text(), resumed.finish().reason) == ("", "tool_calls")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("wanted", "right"), FORMATS)
def test_a_formatted_answer_has_its_form(
    model: LoadedModel, wanted: api.Format, right: Callable[[str], bool], seed: int
) -> None:
    (told,) = answered(model, form(wanted, seed))
    assert told.finish().reason == "stop"
    assert right(told.text())


def test_json_objects_end_or_are_told_to_be_cut(model: LoadedModel) -> None:
    (told,) = answered(model, form(api.JsonObjectFormat(), max_tokens=60))
    assert told.text().startswith("{")
    if told.finish().reason == "stop":
        assert isinstance(json.loads(told.text()), dict)


@pytest.mark.parametrize(
    ("request_", "code", "param", "words"),
    [
        (form(api.JsonSchemaFormat(schema={"unevaluatedItems": 3})), "invalid_value", "response_format", "unevaluated"),
        (form(api.JsonSchemaFormat(schema={"type": "string", "format": "uri-template"})), "", "", "uri-template"),
        (form(api.RegexFormat(pattern="(")), "", "guided_regex", "guided_regex"),
        (form(api.LarkFormat(source="start: (")), "", "guided_grammar", "guided_grammar"),
        (ask("auto", api.Tool(name="t", parameters={"$ref": "https://x.test/s"})), "", "tools[0]", "$ref"),
        (ask("auto", MOVE, format=api.JsonObjectFormat()), "unsupported_feature", "response_format", "tool_choice"),
        (ask("required"), "invalid_value", "tools", "empty"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(
    model: LoadedModel, request_: api.Generate, code: str, param: str, words: str
) -> None:
    (told,) = answered(model, request_)
    assert told.failed is not None
    assert told.failed.code in ([code] if code else ["invalid_value", "unsupported_feature"])
    assert (told.failed.param or "").startswith(param)
    assert words in told.failed.message


@pytest.mark.slow
def test_forced_tokens_change_nothing(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [ask("required", MOVE, WAIT, seed=seed) for seed in range(3)]
    requests += [form(wanted) for wanted, _ in FORMATS]
    forwarded = answered(model, *requests)
    with monkeypatch.context() as patched:
        patched.setattr(Sequence, "settled", lambda self: ())
        plain = answered(model, *requests, optimization_level="off")
    assert [r.ids() for r in forwarded] == [r.ids() for r in plain]
    assert [r.text() for r in forwarded] == [r.text() for r in plain]
    assert [r.usage.forced_tokens > 0 for r in forwarded][:3] == [True] * 3
    assert not any(r.usage.forced_tokens for r in plain)


def masked(model: LoadedModel, request: api.Generate) -> list[int]:
    """The greedy answer by definition: token by token, without an engine, the best that the mask allows."""
    grammar = model.constraints.grammar(request)
    state = None if grammar is None else grammar.begin()
    walk = Walk(model.prompts.encode(request.input, 2048), pages(0, 1024))
    cache = model.runner.allocate_cache(len(walk.pages))
    output: list[int] = []
    known = deque(request.resume[0].ids if request.resume else ())
    while len(output) < (request.max_tokens or 0) and (not output or output[-1] not in model.tokenizer.eos_ids):
        logits = step(model.runner, cache, [(walk, walk.left)])[0][-1]
        if state is not None:
            barred = torch.ones(len(logits), dtype=torch.bool)
            barred[allowed(state.mask())] = False
            logits = logits.masked_fill(barred, -torch.inf)
        output.append(known.popleft() if known else int(logits.argmax()))
        walk.ids.append(output[-1])
        if state is not None:
            state.accept(output[-1])
    return output


@pytest.fixture(scope="module")
def greedy(model: LoadedModel) -> list[tuple[api.Generate, list[int]]]:
    """Requests under grammars and without, with their answers by definition."""
    plain = api.Sampling(temperature=0.0)
    begun = api.Resume(choice=0, ids=tuple(model.tokenizer.encode("I <tool_call>")), chars=2)
    requests = [
        ask("required", MOVE, WAIT, sampling=plain, max_tokens=60),
        ask("required", MOVE, sampling=plain, choice=api.ToolChoice(mode="required"), max_tokens=60),
        ask("auto", MOVE, TURN, sampling=plain, choice=api.ToolChoice(), max_tokens=24),
        ask("auto", MOVE, sampling=plain, choice=api.ToolChoice(), resume=(begun,), max_tokens=60),
        *(form(wanted, max_tokens=48, sampling=plain) for wanted, _ in FORMATS),
        generate("no form at all", max_tokens=24, ignore_eos=False),
    ]
    return [(request, masked(model, request)) for request in requests]


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True], ids=["alone", "batched"])
@pytest.mark.parametrize("forward", [False, True], ids=["by token", "forward"])
@pytest.mark.parametrize("errors", [None, 0.0, 0.3], ids=["plain", "drafts", "bad drafts"])
def test_however_it_is_computed_it_is_plain_masked_decoding(
    model: LoadedModel,
    greedy: list[tuple[api.Generate, list[int]]],
    monkeypatch: pytest.MonkeyPatch,
    errors: float | None,
    forward: bool,
    together: bool,
) -> None:
    if not forward:
        monkeypatch.setattr(Sequence, "settled", lambda self: ())
    prompts = [tuple(model.prompts.encode(request.input, 2048)) for request, _ in greedy]
    answers = {(prompt, 0): ids for prompt, (_, ids) in zip(prompts, greedy, strict=True)}
    forced = drafted = 0
    for some in [greedy] if together else [[each] for each in greedy]:
        engine = Engine(model, engine_config(optimization_level="off"), pages=400)
        if errors is not None:
            engine = drafted_by(Oracle(answers, errors), Engine(model, engine_config(), pages=400))
        for told, (request, expected) in zip(run(engine, *(request for request, _ in some)), some, strict=True):
            known = [token for resume in request.resume for token in resume.ids]
            assert [*known, *told.ids()] == expected
            forced += told.usage.forced_tokens
            drafted += told.usage.accepted_tokens
    assert (forced > 0) == forward
    assert (drafted > 0) == (errors is not None)


@pytest.mark.slow
def test_choices_and_logprobs_follow_the_same_grammar(model: LoadedModel) -> None:
    both, told = answered(model, ask("required", MOVE, n=2), ask("required", MOVE, logprobs=1))
    assert [len(calls(both, choice)) for choice in (0, 1)] == [1, 1]
    assert both.ids(0) != both.ids(1)
    assert (told.ids(), told.usage.forced_tokens) == (both.ids(0), 0)
    assert sum(len(d.logprobs) for d in told.of(api.Delta)) == len(told.ids())


def test_stop_strings_do_not_cut_calls(model: LoadedModel) -> None:
    (told,) = answered(model, ask("required", MOVE, stop=("kind", "{")))
    assert len(calls(told)) == 1
    assert told.finish().matched_stop is None
    (text,) = answered(model, form(api.RegexFormat(pattern="abc[0-9]+d"), stop=("c",)))
    assert (text.text(), text.finish().matched_stop) == ("ab", "c")


@pytest.mark.slow
@pytest.mark.parametrize("partial", [False, True])
def test_a_call_cut_by_the_limit_is_no_complete_call(model: LoadedModel, partial: bool) -> None:
    (whole,) = answered(model, ask("named", MOVE))
    ((_, complete),) = calls(whole)
    limits = range(1, len(whole.ids()) + 1, 3)
    asked = [ask("named", MOVE, max_tokens=limit, partial_calls=partial) for limit in limits]
    for told in answered(model, *asked):
        assert whole.ids()[: len(told.ids())] == told.ids()
        for _, arguments in calls(told):
            # In a stream, a client may have a part of it, and is told that it was cut off.
            assert arguments == complete or (partial and complete.startswith(arguments))
            assert arguments == complete or told.finish().reason == "length"


@pytest.mark.slow
def test_calls_in_pieces_are_the_whole_calls(model: LoadedModel) -> None:
    whole = ask("required", MOVE, choice=api.ToolChoice(mode="required"), max_tokens=300)
    pieces = ask("required", MOVE, choice=api.ToolChoice(mode="required"), max_tokens=300, partial_calls=True)
    at_once, growing = answered(model, whole, pieces)
    assert growing.ids() == at_once.ids()
    assert calls(growing)[: len(calls(at_once))] == calls(at_once)
    assert len([d for d in growing.of(api.Delta) if d.tool_calls]) > 3 * len(calls(at_once))


@pytest.mark.slow
@pytest.mark.parametrize("request_", [ask("required", TURN, partial_calls=True), form(FORMATS[0][0])])
def test_a_resumed_answer_goes_on_the_same_at_every_cut(model: LoadedModel, request_: api.Generate) -> None:
    (whole,) = answered(model, request_)
    deltas = whole.of(api.Delta)
    resumed = []
    for cut in range(len(deltas)):
        ids = tuple(i for d in deltas[:cut] for i in d.ids)
        known = api.Resume(choice=0, ids=ids, chars=sum(len(d.text) for d in deltas[:cut]))
        resumed.append(msgspec.structs.replace(request_, epoch=2 + cut, resume=(known,)))
    for cut, rest in enumerate(answered(model, *resumed)):
        before = deltas[:cut]
        assert [i for d in before for i in d.ids] + rest.ids() == whole.ids()
        assert "".join(d.text for d in before) + rest.text() == whole.text()
        pieces = [piece for d in [*before, *rest.of(api.Delta)] for piece in d.tool_calls]
        assert pieces == [piece for d in deltas for piece in d.tool_calls]


def test_a_cancelled_call_says_nothing_more(model: LoadedModel) -> None:
    engine = Engine(model, engine_config(), pages=96)
    request = ask("required", MOVE, partial_calls=True)
    (told,) = submit(engine, request)
    while not told.of(api.Delta):
        engine.step()
    engine.cancel(request.request, request.epoch)
    seen = len(told.events)
    drain(engine)
    assert len(told.events) == seen


def checked(model: LoadedModel, *requests: api.Generate) -> list[Recorder]:
    engine = Engine(model, engine_config(), pages=96)
    answers = submit(engine, *requests)
    while not all(told.done for told in answers):
        if not engine.step():
            time.sleep(0.0005)
    drain(engine)
    return answers


def uneven(told: list[Recorder], caplog: pytest.LogCaptureFixture) -> list[Recorder]:
    """Those that are not refused; of what was written again, some must have failed again and some not."""
    refused = [each.failed for each in told if each.failed is not None]
    assert {failed.code for failed in refused} == {"answer_invalid"}
    assert len(refused) < sum("once more" in record.message for record in caplog.records)
    return [each for each in told if each.failed is None]


@pytest.mark.slow
def test_arguments_that_break_what_no_grammar_enforces_never_arrive(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answers = checked(model, *(ask("named", PICK, seed=seed, partial_calls=True) for seed in range(12)))
    for told in uneven(answers, caplog):
        ((_, arguments),) = calls(told)
        assert _valid(arguments, UNEVEN)
        assert (told.finish().reason, told.usage.completion_tokens) == ("stop", len(told.ids()))
    for told in answers:
        if told.failed is not None:
            assert calls(told) == []
            assert "'pick'" in told.failed.message
            assert "not" in told.failed.message


@pytest.mark.slow
def test_a_formatted_answer_is_held_until_it_is_checked(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    answers = checked(model, *(form(api.JsonSchemaFormat(schema=UNEVEN), seed) for seed in range(24)))
    for told in uneven(answers, caplog):
        assert _valid(told.text(), UNEVEN)
        assert len([d for d in told.of(api.Delta) if d.text]) == 1
    assert [told.text() for told in answers if told.failed is not None] != []
    assert not any(told.text() for told in answers if told.failed is not None)


@pytest.mark.slow
def test_calls_before_the_one_that_fails_stay(model: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    many = api.ToolChoice(mode="required")
    asked = [
        ask("required", MOVE, PICK, seed=seed, choice=many, max_tokens=400, n=2, logprobs=seed % 2 or None)
        for seed in range(4)
    ]
    told = uneven(checked(model, *asked), caplog)
    for each in told:
        for name, arguments in calls(each, 0) + calls(each, 1):
            assert _valid(arguments, POINT if name == "move" else UNEVEN)
        ids = each.ids(0) + each.ids(1)
        assert each.usage.completion_tokens == len(ids)
        logprobs = [entry for delta in each.of(api.Delta) for entry in delta.logprobs]
        assert len(logprobs) in (0, len([token for token in ids if token not in model.tokenizer.eos_ids]))
    again = [r.getMessage().split() for r in caplog.records if "once more" in r.message]
    twice = {(words[1], int(words[4])) for words in again}
    assert any(len(calls(each, i)) > 1 for each in told for i in (0, 1) if (each.started.request, i) in twice)


def test_an_answer_cut_off_is_not_judged(model: LoadedModel) -> None:
    short, stopped = checked(
        model,
        form(api.JsonSchemaFormat(schema=UNEVEN), max_tokens=4),
        form(api.JsonSchemaFormat(schema=UNEVEN), stop=("b",)),
    )
    assert (short.finish().reason, short.text()[:1]) == ("length", "{")
    assert (stopped.finish().matched_stop, stopped.text()[-1]) == ("b", '"')


def test_registered_tools_are_compiled_ahead(model: LoadedModel) -> None:
    engine = Engine(model, engine_config(), pages=96)
    engine.register(api.Register(tenant="t", tools=(MOVE, PICK)))
    engine._pool.shutdown(wait=True)
    constraints = model.constraints
    assert constraints._compiler is not None
    before = constraints._compiler.helper_pid
    constraints._compiler.close()
    # Without a helper nothing new can be compiled.
    grammar = constraints.grammar(ask("auto", MOVE, PICK, choice=api.ToolChoice()))
    assert grammar is not None
    assert before is not None
    constraints.close()


@pytest.mark.slow
def test_alone_and_in_company_it_is_the_same(model: LoadedModel) -> None:
    requests = [ask("required", MOVE, seed=7), form(FORMATS[1][0], 7), generate("free text")]
    for request, told in zip(requests, answered(model, *requests), strict=True):
        assert told.ids() == alone(model, request).ids()


@pytest.mark.slow
def test_a_grammar_that_cannot_be_followed_fails_its_own_request_only(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard, other = ask("required", MOVE, n=2, max_tokens=90), form(FORMATS[1][0])
    (expected,) = answered(model, other)
    follow, accept = GrammarState.masks, GrammarState.accept
    taken: Counter[GrammarState] = Counter()

    def counts(state: GrammarState, token: int) -> None:
        taken[state] += 1
        accept(state, token)

    def fails(state: GrammarState, draft: tuple[int, ...], parents: tuple[int, ...]) -> DraftMasks:
        if taken[state] > 20:
            raise GrammarFailure("too complex")
        return follow(state, draft, parents)

    monkeypatch.setattr(GrammarState, "accept", counts)
    monkeypatch.setattr(GrammarState, "masks", fails)
    broken, told, free = answered(model, hard, other, generate("free", max_tokens=40))
    assert broken.failed is not None
    assert (broken.failed.code, broken.failed.retryable) == ("grammar_failure", True)
    assert told.ids() == expected.ids()
    assert free.finish().reason == "length"
