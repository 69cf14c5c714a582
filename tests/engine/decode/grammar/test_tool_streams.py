"""Tool calls in a stream, put together by the openai SDK, are those of the whole answer, however the text is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage

from magnitude_engine import api
from magnitude_engine.decode.grammar.compiler import GrammarCompiler
from magnitude_engine.decode.grammar.spec import CallMode, ToolCalls
from magnitude_engine.decode.tools import ToolCallParser
from magnitude_engine.model.template import HERMES
from magnitude_engine.model.tokenizer import Tokenizer
from magnitude_proxy.wire.render import ChatBody, ChatChunks, Head
from testkit.grammar import Walker, text_of
from testkit.traces import Trace, own_traces, public_traces_or_skip, written
from testkit.validity import tool_sets

HEAD = Head(id="chatcmpl-1", created=1, model="tiny")
LONGEST = (3, 12, 80)


def events(pieces: list[str], tools: tuple[api.Tool, ...], open_tools: frozenset[str]) -> list[api.Delta]:
    """What the engine says of a text that comes in pieces."""
    parser = ToolCallParser(HERMES, tools, lambda index: f"call_{index}", open_tools)
    steps = [*map(parser.push, pieces), parser.finish()]
    return [api.Delta(request="r", epoch=1, text=text, tool_calls=calls) for text, calls in steps]


def whole(deltas: list[api.Delta]) -> ChatCompletionMessage:
    """The message of an answer that is not streamed."""
    body = ChatBody()
    for event in (*deltas, api.Finished(request="r", epoch=1, choice=0, reason="stop")):
        body.add(event)
    return ChatCompletion.model_validate_json(body.encode(HEAD, api.Usage())).choices[0].message


def accumulated(deltas: list[api.Delta]) -> ChatCompletionMessage:
    """The message that the SDK makes of a stream."""
    chunks, state = ChatChunks(HEAD), ChatCompletionStreamState()
    payloads = [payload for delta in deltas for payload in chunks.delta(delta)]
    payloads += chunks.finished(api.Finished(request="r", epoch=1, choice=0, reason="stop"), None)
    for payload in payloads:
        state.handle_chunk(ChatCompletionChunk.model_validate_json(payload))
    return state.get_final_completion().choices[0].message


def said(message: ChatCompletionMessage) -> tuple[str, list[tuple[str, str, str]]]:
    """Text and calls (id, name, arguments)."""
    calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or () if c.type == "function"]
    return message.content or "", calls


def pieces_of(text: str, longest: int, draw: random.Random) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = at + draw.randint(1, longest)
        yield text[at:end]
        at = end


def check(text: str, trace: Trace, seed: int) -> int:
    """Compares a stream of a text, cut at random, with its whole; returns how many calls it has.

    Some tools' calls are shown as they are written: all, half of them, or none.
    """
    draw = random.Random(seed)
    shown = draw.choice((1.0, 1.0, 0.5, 0.0))
    open_tools = frozenset(tool.name for tool in trace.tools if draw.random() < shown)
    pieces = list(pieces_of(text, draw.choice(LONGEST), draw))
    expected = said(whole(events([text], trace.tools, frozenset())))
    assert said(accumulated(events(pieces, trace.tools, open_tools))) == expected, text
    return len(expected[1])


def recorded(traces: list[Trace]) -> Iterator[tuple[str, Trace]]:
    """The texts of all recorded messages with calls, one per text and tool set."""
    seen: set[tuple[str, str]] = set()
    for trace in traces:
        for message in trace.messages:
            text = written(message)
            if message.tool_calls and (trace.group, text) not in seen:
                seen.add((trace.group, text))
                yield text, trace


def test_recorded_calls_of_own_traces() -> None:
    texts = list(recorded(own_traces()))[:4]
    assert sum(check(text, trace, seed) for seed, (text, trace) in enumerate(texts)) >= len(texts) > 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_recorded_calls_of_public_traces() -> None:
    texts = list(recorded(public_traces_or_skip()))
    calls = sum(check(text, trace, seed) for seed, (text, trace) in enumerate(texts))
    print(f"{len(texts)} messages, {calls} calls")
    assert calls >= 300


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["auto", "required"])
def test_drawn_calls_of_every_public_tool_set(mode: CallMode, compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    called = 0
    traces = tool_sets(public_traces_or_skip())
    for number, trace in enumerate(traces):
        state = compiler.compile(ToolCalls(tools=trace.tools, format=HERMES, mode=mode)).begin()
        lead = tokenizer.encode("Well: <tool_call>" if mode == "auto" else "")
        for token in lead:
            state.accept(token)
        drawn = list(Walker(tokenizer, number).walk(state, 600))
        # A call that is cut off is shown in part where it is shown as it is written.
        text, end, _ = text_of(tokenizer, [*lead, *drawn]).rpartition(HERMES.end)
        called += check(text + end, trace, number) > 0
    print(f"{called} of {len(traces)} tool sets with a complete call")
    assert called > len(traces) / 2
