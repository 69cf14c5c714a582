"""Preparing requests, and what one choice shows of its tokens."""

from __future__ import annotations

from typing import Any

import pytest

from magnitude_engine import api
from magnitude_engine.decode.sample import Drawn, RawLogprobs
from magnitude_engine.errors import ContextTooLong, FeatureUnsupported, RequestError
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.prepared import PreparedRequest, RequestLimits, prepare
from magnitude_engine.request import Emission, Finish, Sequence
from testkit.engine import generate

LIMITS = RequestLimits(context=64, max_n=4)
WEATHER = api.Tool(name="weather", parameters={"type": "object"})
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Graz"}}\n</tool_call>'


def chat(**fields: Any) -> api.ChatInput:
    return api.ChatInput(messages=(api.Message(role="user", content="hi"),), **fields)


def prepared(model: LoadedModel, request: api.Generate, context: int = 4096) -> PreparedRequest:
    return prepare(request, model, RequestLimits(context=context, max_n=4))


def feed(sequence: Sequence, tokens: list[int]) -> Emission:
    """Accepts tokens until the choice ends; returns all that was shown."""
    total = Emission(text=sequence.opening)
    for token in tokens:
        if sequence.finish is not None:
            break
        shown = sequence.accept(Drawn(token, True, None)) or Emission()
        total = Emission(
            total.ids + shown.ids,
            total.text + shown.text,
            total.logprobs + shown.logprobs,
            total.tool_calls + shown.tool_calls,
        )
    return total


@pytest.mark.parametrize(
    ("fields", "error", "param", "words"),
    [
        ({"n": 0}, RequestError, "n", "between 1 and 4, not 0"),
        ({"n": 5}, RequestError, "n", "between 1 and 4, not 5"),
        ({"max_tokens": -1}, RequestError, "max_tokens", "at least 0"),
        ({"logprobs": 21}, RequestError, "logprobs", "between 0 and 20"),
        ({"stop": ("a", "")}, RequestError, "stop", "empty string"),
        ({"sampling": api.Sampling(temperature=float("nan"))}, RequestError, "temperature", "nan"),
        ({"sampling": api.Sampling(logit_bias={10**6: 1.0})}, RequestError, "logit_bias", "1000000"),
        ({"preferences": api.Preferences(max_batch_size=0)}, RequestError, "max_batch_size", "at least 1"),
        ({"resume": (api.Resume(choice=1),)}, RequestError, "resume", "choices [1]"),
        ({"resume": (api.Resume(choice=0, ids=(-1,)),)}, RequestError, "resume", "token id -1"),
        (
            {"max_tokens": 60},
            ContextTooLong,
            "max_tokens",
            "prompt of 5 tokens plus max_tokens 60 exceeds the context of 64",
        ),
        ({"echo": True, "logprobs": 1}, FeatureUnsupported, "echo", "logprobs"),
    ],
)
def test_wrong_fields_are_named(
    model: LoadedModel, fields: dict[str, Any], error: type[RequestError], param: str, words: str
) -> None:
    with pytest.raises(error) as caught:
        prepare(generate((5, 6, 7, 8, 9), **fields), model, LIMITS)
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("source", "param", "words"),
    [
        (api.TextInput(text=""), "prompt", "empty"),
        (api.TokenInput(ids=()), "prompt", "empty"),
        (api.TokenInput(ids=(10**6,)), "prompt", "1000000"),
        (api.TokenInput(ids=(1,) * 65), "prompt", "prompt of 65 tokens"),
    ],
)
def test_wrong_inputs_are_named(model: LoadedModel, source: api.Input, param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(generate(source, max_tokens=None), model, LIMITS)
    assert caught.value.param == param
    assert words in caught.value.message


def test_without_max_tokens_the_rest_of_the_context_is_the_limit(model: LoadedModel) -> None:
    assert prepare(generate((5,) * 10, max_tokens=None), model, LIMITS).limit == 54
    with pytest.raises(
        ContextTooLong, match=r"64 tokens leaves no room for output in the context of 64; shorten the prompt$"
    ):
        prepare(generate((5,) * 64, max_tokens=None), model, LIMITS)


def test_a_stop_string_ends_the_choice_and_is_not_shown(model: LoadedModel) -> None:
    sequence = Sequence(prepared(model, generate("x", stop=("END",), max_tokens=40)), 0, 0, model)
    shown = feed(sequence, model.tokenizer.encode("some text END more"))
    assert shown.text == "some text "
    assert sequence.finish == Finish("stop", "END")


def test_the_end_token_ends_the_choice(model: LoadedModel) -> None:
    eos = min(model.tokenizer.eos_ids)
    tokens = [*model.tokenizer.encode("done"), eos, *model.tokenizer.encode("more")]
    sequence = Sequence(prepared(model, generate("x", ignore_eos=False, max_tokens=40)), 0, 0, model)
    shown = feed(sequence, tokens)
    assert (shown.text, shown.ids[-1], sequence.finish) == ("done", eos, Finish("stop"))
    ignoring = Sequence(prepared(model, generate("x", ignore_eos=True, max_tokens=len(tokens))), 0, 0, model)
    assert feed(ignoring, tokens).text == "donemore"
    assert ignoring.finish == Finish("length")


def test_held_back_text_comes_out_at_the_length_limit(model: LoadedModel) -> None:
    tokens = model.tokenizer.encode("text EN")
    sequence = Sequence(prepared(model, generate("x", stop=("END",), max_tokens=len(tokens))), 0, 0, model)
    assert feed(sequence, tokens).text == "text EN"


@pytest.mark.thorough
def test_a_tool_call_is_told_apart_from_text(model: LoadedModel) -> None:
    request = generate(chat(tools=(WEATHER,)), request="q", max_tokens=200, ignore_eos=False)
    sequence = Sequence(prepared(model, request), 0, 0, model)
    eos = min(model.tokenizer.eos_ids)
    shown = feed(sequence, [*model.tokenizer.encode("Let me see. " + CALL), eos])
    assert shown.text == "Let me see. "
    (call,) = shown.tool_calls
    assert (call.index, call.name, call.arguments) == (0, "weather", '{"city": "Graz"}')
    assert sequence.finish == Finish("tool_calls")
    again = Sequence(prepared(model, request), 0, 1, model)
    (repeated,) = feed(again, [*model.tokenizer.encode(CALL), eos]).tool_calls
    assert repeated.id == call.id
    other = Sequence(prepared(model, request), 1, 1, model)
    (different,) = feed(other, [*model.tokenizer.encode(CALL), eos]).tool_calls
    assert different.id != call.id


@pytest.mark.thorough
def test_one_call_only_where_calls_may_not_be_parallel(model: LoadedModel) -> None:
    single = chat(tools=(WEATHER,), tool_choice=api.ToolChoice(parallel=False))
    sequence = Sequence(prepared(model, generate(single, max_tokens=400)), 0, 0, model)
    shown = feed(sequence, model.tokenizer.encode(CALL + CALL))
    assert len(shown.tool_calls) == 1
    assert sequence.finish == Finish("tool_calls")


def test_tool_choice_none_leaves_calls_as_text(model: LoadedModel) -> None:
    plain = chat(tools=(WEATHER,), tool_choice=api.ToolChoice(mode="none"))
    tokens = model.tokenizer.encode(CALL)
    sequence = Sequence(prepared(model, generate(plain, max_tokens=len(tokens))), 0, 0, model)
    shown = feed(sequence, tokens)
    assert (shown.text, shown.tool_calls) == (CALL, ())


def test_logprobs_come_with_the_text_of_their_token(model: LoadedModel) -> None:
    tokens = model.tokenizer.encode("aé!")
    request = generate("x", logprobs=0, max_tokens=len(tokens))
    sequence = Sequence(prepared(model, request), 0, 0, model)
    shown = [sequence.accept(Drawn(t, True, RawLogprobs(t, -float(i), ()))) for i, t in enumerate(tokens)]
    assert "".join(s.text for s in shown if s) == "aé!"
    told = [entry for s in shown if s for entry in s.logprobs]
    assert [entry.logprob for entry in told] == [-float(i) for i in range(len(tokens))]
    assert b"".join(bytes(entry.bytes) for entry in told) == "aé!".encode()


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_resumed_choice_shows_what_is_missing_at_every_cut(model: LoadedModel, logprobs: int | None) -> None:
    tokens = model.tokenizer.encode("Grüße, ENough. EN")
    request = generate("x", stop=("END",), max_tokens=len(tokens), logprobs=logprobs)

    def drawn(index: int) -> Drawn:
        raw = None if logprobs is None else RawLogprobs(tokens[index], -float(index), ())
        return Drawn(tokens[index], True, raw)

    whole = Sequence(prepared(model, request), 0, 0, model)
    sent = [whole.accept(drawn(i)) or Emission() for i in range(len(tokens))]
    for cut in range(len(tokens) + 1):
        before = "".join(s.text for s in sent[:cut])
        known = api.Resume(choice=0, ids=tuple(tokens[:cut]), chars=len(before))
        resumed = Sequence(prepared(model, generate("x", **resumable(request, known))), 0, 0, model)
        rest = [resumed.accept(drawn(i)) or Emission() for i in range(len(resumed.output), len(tokens))]
        assert before + resumed.opening + "".join(s.text for s in rest) == "Grüße, ENough. EN"
        assert [i for s in rest for i in s.ids] == tokens[cut:]
        told = [entry.logprob for s in [*sent[:cut], *rest] for entry in s.logprobs]
        assert told == ([] if logprobs is None else [-float(i) for i in range(len(tokens))])
        assert resumed.finish == whole.finish


def resumable(request: api.Generate, resume: api.Resume) -> dict[str, Any]:
    return {"stop": request.stop, "max_tokens": request.max_tokens, "logprobs": request.logprobs, "resume": (resume,)}


def test_a_resumed_choice_does_not_repeat_its_tool_call(model: LoadedModel) -> None:
    tokens = model.tokenizer.encode(CALL + " so")
    request = generate(
        chat(tools=(WEATHER,)),
        max_tokens=len(tokens) + 3,
        resume=(api.Resume(choice=0, ids=tuple(tokens), chars=3),),
    )
    sequence = Sequence(prepared(model, request), 0, 0, model)
    shown = feed(sequence, model.tokenizer.encode("..."))
    assert (shown.text, shown.tool_calls) == ("...", ())


def test_echo_comes_first(model: LoadedModel) -> None:
    tokens = model.tokenizer.encode(" world")
    text = Sequence(prepared(model, generate("hello", echo=True, max_tokens=len(tokens))), 0, 0, model)
    assert feed(text, tokens).text == "hello world"
    ids = Sequence(prepared(model, generate(tuple(tokens), echo=True, max_tokens=len(tokens))), 0, 0, model)
    assert feed(ids, tokens).text == " world world"
    with pytest.raises(FeatureUnsupported):
        prepared(model, generate(chat(), echo=True))
