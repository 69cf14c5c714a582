"""Requests from bytes to the neutral form, and answers from events to bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine import api
from magnitude_proxy.errors import BadRequest, NotFound, ProxyError
from magnitude_proxy.wire.intake import Asked, read_chat, read_completion
from magnitude_proxy.wire.render import ChatBody, ChatChunks, Head, TextBody, TextChunks
from magnitude_proxy.wire.replies import ModelReply, ModelsReply, RouteNote
from magnitude_proxy.wire.requests import MAX_DEPTH, decode_json
from testkit import wire

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "get", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> Asked:
    return read_chat(json.dumps({"messages": [USER], **fields}).encode(), 77)


def completion(**fields: Any) -> Asked:
    return read_completion(json.dumps({"prompt": "Hi", **fields}).encode(), 77)


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.http_status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [USER, "Hi"]}, "messages[1]"),
        ({"messages": [USER, {"role": "boss", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "c1"}]}, "messages[1].tool_call_id"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        ({"model": 5}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 2**40}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 10**30}, "seed"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": "a.b"}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "put"}}},
            "tool_choice.function.name",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "3"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
        ({"magnitude": {"session": ""}}, "magnitude.session"),
        ({"magnitude": {"config": {"max_batch_size": 0}}}, "magnitude.config.max_batch_size"),
        ({"magnitude": {"config": {"wishes": 3}}}, "magnitude.config.wishes"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param.split("[")[0].split(".")[0] in error.message


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b'{"a": 1} x', None),
        (b'{"a": "\xff"}', None),
        (b'{"a": "\xed\xa0\x80"}', None),
        (b'{"a": "\\ud800"}', None),
        (b'{"a": "\\udc00\\ud800"}', None),
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": -Infinity}', "temperature"),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"model": "a", "model": "b"}', "model"),
        (b'{"a": {"b": 1, "b": 2}}', "b"),
        (b'{"text": "\\": ", "a": 1, "a": 2}', "a"),
        (b'{"b\\\\": 1, "a": 1, "a": 2}', "a"),
        (b"[" * 100_000, None),
        (b'{"a": ' * 100_000, None),
        (b'{"a": ' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", None),
    ],
)
def test_only_strict_json_is_read(raw: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        decode_json(raw)
    assert caught.value.param == param
    assert len(caught.value.message) < 400


def test_nesting_up_to_the_limit_and_odd_text_are_read() -> None:
    deep = b'{"a": ' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert "a" in decode_json(deep)
    odd = {"a\\": 1, "": '": "', "b": ['"x":', "\\", '\\"']}
    assert decode_json(json.dumps(odd).encode()) == odd


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_every_object_is_read_as_the_standard_library_reads_it(body: dict[str, Any]) -> None:
    for raw in (json.dumps(body), json.dumps(body, ensure_ascii=False, separators=(",", ":"))):
        assert decode_json(raw.encode()) == json.loads(raw)


@pytest.mark.thorough
@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["messages", "model", "stop", "tools", "tool_choice", "n", "logit_bias", "magnitude", "stream"]
        ),
        JSON,
    )
)
def test_no_body_breaks_the_reader(body: dict[str, Any]) -> None:
    for read in (read_chat, read_completion):
        try:
            asked = read(json.dumps(body).encode(), 1)
        except BadRequest as error:
            wire.check_error({"error": _detail(error)})
        else:
            assert asked.inputs


def _detail(error: ProxyError) -> dict[str, Any]:
    detail = error.body().error
    return {"message": detail.message, "type": detail.type, "param": detail.param, "code": detail.code}


def test_a_full_request_becomes_the_neutral_form() -> None:
    asked = chat(
        model="m",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "42", "tool_call_id": "c1"},
        ],
        tools=[TOOL],
        tool_choice="none",
        parallel_tool_calls=False,
        stream=True,
        stream_options={"include_usage": True},
        n=2,
        max_tokens=9,
        max_completion_tokens=5,
        temperature=0,
        top_p=0,
        top_k=-1,
        min_p=0.1,
        frequency_penalty=1,
        presence_penalty=-1,
        logit_bias={"7": -100},
        seed=-5,
        stop="X",
        logprobs=True,
        ignore_eos=True,
        prediction={"type": "content", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        metadata={"session_id": "s"},
        prompt_cache_key="k",
        magnitude={"session": "mine", "branch": "b", "config": {"max_batch_size": 4}, "wish": 1},
        colour="red",
    )
    (given_input,) = asked.inputs
    assert isinstance(given_input, api.ChatInput)
    assert [m.role for m in given_input.messages] == ["system", "user", "assistant", "tool"]
    assert given_input.messages[1].content == "a\nb"
    assert given_input.messages[2].tool_calls == (api.ToolCall(id="c1", name="get", arguments="{}"),)
    assert given_input.tool_choice == api.ToolChoice(mode="none", parallel=False)
    generate = asked.generate
    assert (generate.n, generate.max_tokens, generate.stop, generate.logprobs) == (2, 5, ("X",), 0)
    assert generate.ignore_eos
    sampling = generate.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (0, 0, 0.1, -5)
    assert 0 < sampling.top_p < 1e-6
    assert sampling.logit_bias == {7: -100.0}
    assert generate.preferences.max_batch_size == 4
    assert (asked.hints.magnitude_session, asked.hints.metadata_session_id) == ("mine", "s")
    assert asked.include_usage
    assert (asked.predicted, generate.prediction) == (True, "xy")
    assert "magnitude" not in asked.body
    assert asked.body["colour"] == "red"
    assert asked.ignored == ("colour", "magnitude.wish")
    assert asked.refusal is None


def test_a_request_without_a_seed_gets_the_given_one() -> None:
    assert chat().generate.sampling.seed == 77
    assert chat(seed=0).generate.sampling.seed == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"functions": [{"name": "x"}]}, "functions"),
        ({"web_search_options": {}}, "web_search_options"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_only_an_upstream_can_do_is_a_local_refusal(fields: dict[str, Any], param: str) -> None:
    refusal = chat(**fields).refusal
    assert refusal is not None
    assert (refusal.code, refusal.param) == ("unsupported_feature", param)


def test_harmless_forms_of_unsupported_fields_are_served() -> None:
    asked = chat(response_format={"type": "text"}, modalities=["text"], tools=[TOOL], tool_choice="auto", stop=[])
    assert asked.refusal is None
    assert asked.generate.stop == ()


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_object"}}, api.JsonObjectFormat()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            api.JsonSchemaFormat(schema=SCHEMA, strict=True, name="n"),
        ),
        ({"guided_json": SCHEMA}, api.JsonSchemaFormat(schema=SCHEMA, param="guided_json")),
        ({"guided_json": json.dumps(SCHEMA)}, api.JsonSchemaFormat(schema=SCHEMA, param="guided_json")),
        ({"guided_regex": "a+"}, api.RegexFormat(pattern="a+")),
        ({"guided_choice": ["a.b", "c-d"]}, api.RegexFormat(pattern=r"a\.b|c\-d", param="guided_choice")),
        ({"guided_grammar": "start: 'a'"}, api.LarkFormat(source="start: 'a'")),
        ({"structured_outputs": {"json_object": True}}, api.JsonObjectFormat(param="structured_outputs.json_object")),
        (
            {"structured_outputs": {"json": SCHEMA}},
            api.JsonSchemaFormat(schema=SCHEMA, param="structured_outputs.json"),
        ),
    ],
)
def test_the_form_of_the_answer_in_openais_and_vllms_fields(fields: dict[str, Any], form: api.Format) -> None:
    asked = chat(**fields)
    assert (asked.generate.format, asked.refusal, asked.ignored) == (form, None, ())


def test_tool_calls_come_in_pieces_only_in_streams() -> None:
    assert [chat(stream=stream).generate.partial_calls for stream in (True, False)] == [True, False]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get"}}])
def test_forced_tool_calls_are_the_workers_to_serve(choice: object) -> None:
    asked = chat(tools=[TOOL], tool_choice=choice)
    assert asked.refusal is None


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a", (api.TextInput(text="a"),)),
        (["a", "b"], (api.TextInput(text="a"), api.TextInput(text="b"))),
        ([1, 2], (api.TokenInput(ids=(1, 2)),)),
        ([[1], [2, 3]], (api.TokenInput(ids=(1,)), api.TokenInput(ids=(2, 3)))),
    ],
)
def test_prompts_of_every_form(prompt: Any, inputs: tuple[api.Input, ...]) -> None:
    asked = completion(prompt=prompt, echo=True, logprobs=2)
    assert asked.inputs == inputs
    assert asked.generate.echo
    assert asked.generate.logprobs == 2
    assert asked.generate.max_tokens == 16


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [1, [2]], [-1], 5, None, [1.5]])
def test_wrong_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        completion(prompt=prompt)
    assert str(caught.value.param).startswith("prompt")


def test_completion_features_beyond_the_worker() -> None:
    assert completion(best_of=2, n=2).refusal is None
    for fields, param in (({"suffix": "x"}, "suffix"), ({"best_of": 2}, "best_of")):
        refusal = completion(**fields).refusal
        assert refusal is not None
        assert refusal.param == param


HEAD = Head(id="chatcmpl-1", created=1, model="m", include_usage=True, predicted=True)
LOGPROB = api.TokenLogprob(token="Hi", logprob=-0.5, bytes=(72, 105), top=(api.TopLogprob(token="Hi", logprob=-0.5),))
USAGE = api.Usage(
    prompt_tokens=8,
    completion_tokens=3,
    cached_tokens=6,
    cached_host_tokens=3,
    cached_disk_tokens=1,
    drafted_tokens=4,
    accepted_tokens=1,
    accepted_prediction_tokens=1,
    rejected_prediction_tokens=3,
)


def a_delta(**fields: Any) -> api.Delta:
    return api.Delta(request="r", epoch=1, **fields)


def an_end(reason: str = "stop", choice: int = 0) -> api.Finished:
    return api.Finished(request="r", epoch=1, choice=choice, reason=reason)


def test_chat_chunks_fit_the_schema() -> None:
    chunks = ChatChunks(HEAD)
    call = api.ToolCallDelta(index=0, id="c", name="get", arguments="{")
    payloads = [
        *chunks.delta(a_delta(text="Hi", logprobs=(LOGPROB,))),
        *chunks.delta(a_delta(tool_calls=(call, api.ToolCallDelta(index=0, arguments="}")))),
        *chunks.delta(a_delta(refusal="no", choice=1, extra={"reasoning_content": "hm", "role": "user"})),
        *chunks.delta(a_delta(ids=(1,))),
        *chunks.finished(an_end("tool_calls"), RouteNote(route="fallback:u", fallback_reason="worker_lost")),
    ]
    usage = chunks.usage(USAGE, None)
    assert usage is not None
    parsed = [json.loads(payload) for payload in [*payloads, usage]]
    for chunk in parsed:
        wire.check_chat_chunk(chunk)
    deltas = [chunk["choices"][0]["delta"] for chunk in parsed[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[1] == {"content": "Hi"}
    assert deltas[2]["tool_calls"][0]["function"] == {"name": "get", "arguments": "{}"}
    assert deltas[4] == {"refusal": "no", "reasoning_content": "hm", "role": "user"}
    assert parsed[-2]["magnitude"] == {"route": "fallback:u", "fallback_reason": "worker_lost"}
    assert all(chunk["usage"] is None for chunk in parsed[:-1])
    assert parsed[-1]["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 3
    assert parsed[-1]["usage"]["magnitude"] == {
        "drafted_tokens": 4,
        "accepted_tokens": 1,
        "forced_tokens": 0,
        "cached_tokens": 6,
        "cached_host_tokens": 3,
        "cached_disk_tokens": 1,
    }


def test_a_chunk_has_text_or_a_piece_of_one_call() -> None:
    """instructor reads the first entry of `tool_calls` and no other, as all of OpenAI's chunks have just one."""
    begun = [api.ToolCallDelta(index=i, id=f"c{i}", name="get") for i in range(2)]
    more = [api.ToolCallDelta(index=i, arguments="{}") for i in range(2)]
    pieces = (begun[0], more[0], begun[1], more[1])
    payloads = ChatChunks(HEAD).delta(a_delta(text="I look.", tool_calls=pieces, logprobs=(LOGPROB,)))
    choices = [json.loads(payload)["choices"][0] for payload in payloads]
    assert [choice["logprobs"] is not None for choice in choices] == [False, True, False, False]
    assert choices[1]["delta"] == {"content": "I look."}
    for index, choice in enumerate(choices[2:]):
        (call,) = choice["delta"]["tool_calls"]
        assert (call["index"], call["id"]) == (index, f"c{index}")
        assert call["function"] == {"name": "get", "arguments": "{}"}


def test_completion_chunks_fit_the_schema() -> None:
    chunks = TextChunks(HEAD)
    usage = chunks.usage(USAGE, None)
    assert usage is not None
    payloads = [
        *chunks.delta(a_delta(text="Hi", logprobs=(LOGPROB,))),
        *chunks.delta(a_delta(text="Hi", logprobs=(LOGPROB,))),
        *chunks.finished(an_end("length"), None),
        usage,
    ]
    parsed = [json.loads(payload) for payload in payloads]
    for chunk in parsed:
        wire.check_completion_chunk(chunk)
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in parsed[:2]] == [[0], [2]]


def test_bodies_fit_the_schemas() -> None:
    chat_body, text_body = ChatBody(), TextBody()
    call = api.ToolCallDelta(index=0, id="c", name="get", arguments='{"a"')
    for body in (chat_body, text_body):
        body.add(a_delta(text="He"))
        body.add(a_delta(text="llo", logprobs=(LOGPROB,)))
        body.add(an_end())
    chat_body.add(a_delta(choice=1, tool_calls=(call,), extra={"reasoning_content": "a"}))
    chat_body.add(a_delta(choice=1, tool_calls=(api.ToolCallDelta(index=0, arguments=":1}"),)))
    chat_body.add(a_delta(choice=1, extra={"reasoning_content": "b"}))
    chat_body.add(an_end("tool_calls", choice=1))
    chat_reply = json.loads(chat_body.encode(HEAD, USAGE))
    text_reply = json.loads(text_body.encode(HEAD, USAGE))
    wire.check("CreateChatCompletionResponse", chat_reply)
    wire.check("CreateCompletionResponse", text_reply)
    assert chat_reply["choices"][0]["message"]["content"] == text_reply["choices"][0]["text"] == "Hello"
    called = chat_reply["choices"][1]["message"]
    assert called["content"] is None
    assert called["reasoning_content"] == "ab"
    assert called["tool_calls"][0]["function"] == {"name": "get", "arguments": '{"a":1}'}


def test_a_cut_answer_is_never_a_body() -> None:
    cut = ChatBody()
    cut.add(a_delta(text="He"))
    for body in (cut, ChatBody(), TextBody()):
        with pytest.raises(ProxyError) as caught:
            body.encode(HEAD, USAGE)
        assert caught.value.http_status == 503


def test_models_and_errors_fit_the_schemas() -> None:
    wire.needs_schemas()
    model = {"id": "m", "created": 1, "owned_by": "magnitude", "object": "model"}
    assert ModelsReply(data=(ModelReply(id="m", created=1, owned_by="magnitude"),)).data[0].id == model["id"]
    wire.check("ListModelsResponse", {"object": "list", "data": [model]})
    wire.check_error({"error": _detail(NotFound("no such model", param="model", code="model_not_found"))})


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.text(max_size=4), st.booleans()).map(
        lambda drawn: a_delta(
            choice=drawn[0],
            text=drawn[1],
            tool_calls=(api.ToolCallDelta(index=0, id="c", name="get", arguments=drawn[1]),) if drawn[2] else (),
        )
    ),
    max_size=12,
)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(EVENTS)
def test_a_stream_says_what_the_body_says(events: list[api.Delta]) -> None:
    chunks, body = ChatChunks(HEAD), ChatBody()
    ends = [an_end(choice=index) for index in range(3)]
    payloads = [p for event in events for p in chunks.delta(event)] + [
        p for e in ends for p in chunks.finished(e, None)
    ]
    for event in events:
        body.add(event)
    for end in ends:
        body.add(end)
    texts, arguments = [""] * 3, [""] * 3
    for payload in payloads:
        (choice,) = json.loads(payload)["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        for call in choice["delta"].get("tool_calls", ()):
            arguments[choice["index"]] += call["function"]["arguments"]
    whole = json.loads(body.encode(HEAD, USAGE))
    assert [c["message"]["content"] or "" for c in whole["choices"]] == texts
    said = ["".join(t["function"]["arguments"] for t in c["message"].get("tool_calls", ())) for c in whole["choices"]]
    assert said == arguments
