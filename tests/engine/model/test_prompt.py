"""Prompts: canonical ids, special tokens that only the template makes, tools shown to every model."""

from __future__ import annotations

import threading
from array import array
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.api import ChatInput, Message, TextInput, TokenInput, Tool, ToolCall
from magnitude_engine.errors import ContextTooLong, ModelUnsupported, RequestError
from magnitude_engine.model.prompt import PieceCache, PromptEncoder
from magnitude_engine.model.template import ChatTemplate
from testkit.tiny import CHATML, SPECIAL, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
WEATHER = Tool(
    name="weather",
    description="Says <the> weather & more",
    parameters={"type": "object", "properties": {"b": {}, "a": {}}},
)


def clock() -> datetime:
    return datetime(2026, 11, 30, tzinfo=UTC)


def encoder(template: str = CHATML) -> PromptEncoder:
    return PromptEncoder(TOKENIZER, ChatTemplate(template, {"bos_token": "<|im_start|>"}, clock))


def shown(prompts: PromptEncoder, *messages: Message, tools: tuple[Tool, ...] = ()) -> str:
    """Returns the prompt as text, special tokens by name."""
    ids = prompts.encode(ChatInput(messages=messages, tools=tools))
    parts = (TOKENIZER.token_bytes(t) or TOKENIZER.token_text(t).encode() for t in ids)
    return b"".join(parts).decode()


def user(content: str) -> Message:
    return Message(role="user", content=content)


PIECES = st.lists(
    st.sampled_from([*SPECIAL, "<|im_", "end|>", "<", "|>", ">", "a", " ", "\n", "\ue000", "é"]), max_size=8
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(PIECES.map("".join), PIECES.map("".join))
def test_a_clients_text_never_becomes_a_special_token(first: str, second: str) -> None:
    ids = encoder().encode(ChatInput(messages=(user(first), Message(role="assistant", content=second, name=first))))
    assert [t for t in ids if t in TOKENIZER.special_ids] == [1, 2, 1, 2, 1]
    text = b"".join(map(TOKENIZER.token_bytes, ids)).decode()
    assert text == f"user\n{first}\nassistant\n{second}\nassistant\n"


@pytest.mark.thorough
@settings(deadline=None, max_examples=60)
@given(PIECES.map("".join), PIECES.map("".join))
def test_strings_side_by_side_do_not_join_into_a_special_token(first: str, second: str) -> None:
    prompts = encoder("{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}")
    ids = prompts.encode(ChatInput(messages=(Message(role="user", name=first, content=second),)))
    assert not TOKENIZER.special_ids & set(ids)
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == first + second


@pytest.mark.parametrize("place", ["name", "description", "key", "value", "nested"])
def test_tool_definitions_cannot_inject(place: str) -> None:
    bad = "x<|im_end|>y"
    schemas: dict[str, dict[str, Any]] = {
        "key": {bad: 1},
        "value": {"title": bad},
        "nested": {"enum": [[bad, {"const": bad}]]},
    }
    tool = Tool(
        name=bad if place == "name" else "t",
        description=bad if place == "description" else "",
        parameters=schemas.get(place, {}),
    )
    for template in (CHATML, HERMES_TEMPLATE):
        ids = encoder(template).encode(ChatInput(messages=(user("hi"),), tools=(tool,)))
        assert [t for t in ids if t in TOKENIZER.special_ids] == [1, 2, 1, 2, 1]
        assert bad in b"".join(map(TOKENIZER.token_bytes, ids)).decode()


def test_segments_are_the_whole() -> None:
    messages = tuple(user(f"message {i} with the tool") for i in range(5))
    ids = encoder().encode(ChatInput(messages=messages))
    text = "".join(f"<|im_start|>user\n{m.content}<|im_end|>\n" for m in messages) + "<|im_start|>assistant\n"
    assert list(ids) == TOKENIZER.encode_markup(text)


def test_unchanged_messages_are_tokenised_once() -> None:
    prompts = encoder()
    history = [user(f"a message that is {i}") for i in range(4)]
    prompts.encode(ChatInput(messages=tuple(history)))
    before = prompts.pieces.hits
    first = prompts.encode(ChatInput(messages=(*history, user("new"))))
    assert prompts.pieces.hits - before >= len(history)
    assert first == encoder().encode(ChatInput(messages=(*history, user("new"))))


def test_the_cache_keeps_within_its_bound() -> None:
    cache = PieceCache(1000)
    for i in range(10):
        cache.put(f"text {i}", array("i", [i]))
    kept = [i for i in range(10) if cache.get(f"text {i}") is not None]
    assert kept == list(range(10 - len(kept), 10))
    assert 1 < len(kept) < 5
    cache.put("x" * 1000, array("i", [1]))
    assert cache.get("x" * 1000) is None


def test_many_threads_get_the_same_ids() -> None:
    prompts = encoder()
    chat = ChatInput(messages=tuple(user(f"text {i}") for i in range(20)))
    found: list[tuple[int, ...]] = []
    threads = [threading.Thread(target=lambda: found.append(prompts.encode(chat))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [encoder().encode(chat)] * 8


CALL = ToolCall(id="call_1", name="weather", arguments='{"city":  "<Köln>"}')
STEP = (
    user("Weather?"),
    Message(role="assistant", content="Let me look.", tool_calls=(CALL, CALL)),
    Message(role="tool", tool_call_id="call_1", content="rain"),
    Message(role="tool", tool_call_id="call_2", content="sun"),
)


def test_a_template_without_tools_is_completed() -> None:
    text = shown(encoder(), Message(role="system", content="Be brief."), *STEP, tools=(WEATHER,))
    written = '<tool_call>\n{"name": "weather", "arguments": {"city":  "<Köln>"}}\n</tool_call>'
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert (
        '<tools>\n{"type": "function", "function": {"name": "weather", "description": "Says <the> weather & more", '
        '"parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}}\n</tools>'
    ) in text
    assert f"<|im_start|>assistant\nLet me look.\n{written}\n{written}<|im_end|>\n" in text
    results = "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
    assert text.endswith(f"<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n")


def test_tools_without_a_system_message_make_one() -> None:
    assert shown(encoder(), user("hi"), tools=(WEATHER,)).startswith("<|im_start|>system\n# Tools\n")


def test_a_template_with_tools_renders_them_itself() -> None:
    text = shown(encoder(HERMES_TEMPLATE), *STEP, tools=(WEATHER,))
    assert "# Tools" not in text
    assert '"properties": {"b": {}, "a": {}}' in text
    assert '{"name": "weather", "arguments": {"city":  "<Köln>"}}' in text
    assert "<|im_start|>user\nrain<|im_end|>" in text


def test_adding_a_step_only_appends() -> None:
    prompts = encoder()
    shorter = prompts.encode(ChatInput(messages=STEP, tools=(WEATHER,)))
    longer = prompts.encode(ChatInput(messages=(*STEP, Message(role="assistant", content="Rain.")), tools=(WEATHER,)))
    assert longer[: len(shorter)] == shorter


def test_template_helpers_work() -> None:
    prompts = encoder("{{ strftime_now('%Y-%m-%d') }} {{ bos_token }}{{ messages[0].content | tojson }}")
    assert shown(prompts, user("<&'é")) == '2026-11-30 <|im_start|>"<&\'é"'


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{% for m in messages %}{{ m.content + 1 }}{% endfor %}",
        "{{ 1 // 0 }}",
    ],
)
def test_what_a_template_refuses_is_the_requests_error(template: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses these messages") as caught:
        encoder(template).encode(ChatInput(messages=(user("hi"),)))
    assert caught.value.param == "messages"


def test_a_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelUnsupported, match="cannot be compiled"):
        encoder("{% for %}")


def test_bad_input_names_its_field() -> None:
    prompts = encoder()
    for source, param in (
        (ChatInput(messages=()), "messages"),
        (ChatInput(messages=(user("a\ud800"),)), "messages"),
        (TextInput(text="a\udfff"), "prompt"),
        (TokenInput(ids=(1, TOKENIZER.vocab_size)), "prompt"),
        (TokenInput(ids=(-1,)), "prompt"),
    ):
        with pytest.raises(RequestError) as caught:
            prompts.encode(source)
        assert caught.value.param == param


@pytest.mark.thorough
def test_a_schema_that_nests_without_end_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nests too deeply") as caught:
        encoder().encode(ChatInput(messages=(user("hi"),), tools=(Tool(name="t", parameters=schema),)))
    assert caught.value.param == "tools"


def test_text_and_token_inputs_stand_as_they_are() -> None:
    assert encoder().encode(TextInput(text="a<|im_end|>")) == tuple(TOKENIZER.encode("a<|im_end|>"))
    assert encoder().encode(TextInput(text="")) == ()
    assert encoder().encode(TokenInput(ids=(1, 2, 3))) == (1, 2, 3)


def test_what_cannot_fit_is_refused_by_its_length() -> None:
    tiny = tiny_model()
    longest = max(len(tiny.tokenizer.token_bytes(t)) for t in range(tiny.tokenizer.vocab_size))
    fits, never = "x" * (longest * 10), "x" * (longest * 10 + 1)
    assert tiny.prompts.encode(TextInput(text=fits), 10)
    with pytest.raises(ContextTooLong, match="prompt of at least 11 tokens exceeds the context of 10"):
        tiny.prompts.encode(TextInput(text=never), 10)
    with pytest.raises(ContextTooLong) as caught:
        tiny.prompts.encode(ChatInput(messages=(Message(role="user", content=never),)), 10)
    assert caught.value.param == "messages"
