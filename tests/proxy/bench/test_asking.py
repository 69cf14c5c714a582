"""What is measured of one answer, and how its tool calls are judged."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import pytest

from magnitude_proxy.bench import calls
from magnitude_proxy.bench.asking import Answer, Asker, Said, question
from magnitude_proxy.bench.calls import CallCount
from magnitude_proxy.bench.recorded import Definition, Message, Tool
from testkit.upstream import STREAM_HEAD, OpenAIStub, ScriptedServer, chunk, head, refusing_url, sse

LOOK = Tool(
    Definition(
        name="look",
        parameters={"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    )
)


async def ask(url: str, tools: tuple[Tool, ...] = ()) -> Answer:
    """Asks with a clock that counts its readings."""
    ticks = itertools.count()
    asker = Asker(url, "a-key", clock=lambda: float(next(ticks)))
    body = question("m", (Message("user", "Hello"),), tools, 8, fixed=True)
    try:
        return await asyncio.to_thread(asker.ask, body)
    finally:
        asker.close()


async def test_times_counts_and_words_come_from_the_stream() -> None:
    timings = {"cache_n": 3, "draft_n": 9, "draft_n_accepted": 4}
    usage = {"prompt_tokens": 7, "completion_tokens": 2}
    events = (
        chunk("", role="assistant"),
        chunk("Hel"),
        chunk("lo"),
        chunk(finish="length"),
        {"choices": [], "usage": usage, "timings": timings},
    )
    async with ScriptedServer([[STREAM_HEAD, sse(*events, "[DONE]")]]) as server:
        answer = await ask(server.url)
    # The clock was read at the start, with each of six events, and at the end.
    assert (answer.first_s, answer.wall_s) == (2.0, 7.0)
    assert (answer.text, answer.finish, answer.error) == ("Hello", "length", "")
    assert answer.counts == (7, 3, 2, 9, 4)


async def test_the_request_is_openai_s_with_ignore_eos() -> None:
    async with OpenAIStub() as stub:
        answer = await ask(stub.url, (LOOK,))
        (asked,) = stub.requests
    assert asked.headers["Authorization"] == "Bearer a-key"
    assert asked.body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "tools": [{"type": "function", "function": {"name": "look", "parameters": LOOK.function.parameters}}],
    }
    assert answer.calls == (Said("look", '{"city": "Paris"}'),)
    assert answer.counts.cached == 2


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ([STREAM_HEAD, sse(chunk("Hel"))], "ended without"),
        ([STREAM_HEAD, sse(chunk("Hel"), {"error": {"message": "lost"}}, "[DONE]")], "in the stream: .*lost"),
        ([STREAM_HEAD, sse("not JSON")], "DecodeError"),
        ([head(503, length=4), b"busy"], "status 503: busy"),
    ],
)
async def test_an_incomplete_answer_says_why(script: list[Any], words: str) -> None:
    async with ScriptedServer([script]) as server:
        answer = await ask(server.url)
    assert re.search(words, answer.error)


async def test_a_server_that_is_not_there_is_an_answer_too() -> None:
    async with refusing_url() as url:
        assert (await ask(url)).error.startswith("ConnectError")


def call(text: str, end: str = "</tool_call>") -> str:
    return f"I look.\n<tool_call>\n{text}\n{end}"


@pytest.mark.parametrize(
    ("text", "said", "cut_off", "expected"),
    [
        (call('{"name": "look", "arguments": {"at": "it"}}'), (), False, CallCount(valid=1)),
        (call('{"name": "look", "arguments": {"at": 1}}'), (), False, CallCount(invalid=1)),
        (call('{"name": "look", "arguments": {}}'), (), False, CallCount(invalid=1)),
        (call('{"name": "leap", "arguments": {"at": "it"}}'), (), False, CallCount(invalid=1)),
        (call('{"name": "look", "argum', ""), (), True, CallCount(cut=1)),
        (call('{"name": "look", "argum', ""), (), False, CallCount(invalid=1)),
        ("", (Said("look", '{"at": "it"}'), Said("look", '{"at"')), True, CallCount(valid=1, cut=1)),
        ("", (Said("look", '{"at"'), Said("look", '{"at": "it"}')), True, CallCount(valid=1, invalid=1)),
        ("no call", (), False, CallCount()),
    ],
)
def test_calls_are_judged_by_their_schema(
    text: str, said: tuple[Said, ...], cut_off: bool, expected: CallCount
) -> None:
    assert calls.count(text, said, (LOOK,), cut_off) == expected


@pytest.mark.parametrize("schema", [{"pattern": "\\p{L}"}, {"$ref": "http://127.0.0.1:9/s.json"}, {"type": "no-type"}])
def test_a_schema_that_cannot_be_checked_refuses_nothing(schema: dict[str, Any]) -> None:
    tool = Tool(Definition("look", parameters={"properties": {"at": schema}}))
    assert calls.count(call('{"name": "look", "arguments": {"at": "it"}}'), (), (tool,), False).valid == 1
