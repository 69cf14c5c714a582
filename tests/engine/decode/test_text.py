"""Released text: whole characters, no part of a stop string, the same wherever tokens begin and end."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.decode.text import Released, TextStream


def stream(pieces: list[bytes], stop: tuple[str, ...]) -> list[Released]:
    """What each piece releases, and last what `finish` does."""
    text = TextStream(pieces.__getitem__, stop)
    return [*(text.push(i) for i in range(len(pieces))), text.finish()]


def whole(data: bytes, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """The text and the stop string that a reader of the whole output would find."""
    text = data.decode("utf-8", errors="replace")
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if s and text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` cut at these places."""
    edges = [0, *sorted(places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def held(text: str, stop: tuple[str, ...]) -> str:
    """The longest end of `text` that is a proper prefix of a stop string."""
    prefixes = {s[:n] for s in stop for n in range(len(s))} | {""}
    return max((text[i:] for i in range(len(text) + 1) if text[i:] in prefixes), key=len)


letters = st.text(alphabet="ab\n é€😀", max_size=12)
stops = st.lists(st.text(alphabet="ab é€", max_size=5), max_size=4).map(tuple)
fragments = st.sampled_from([b"a", b"ab", b"\xe2", b"\x82", b"\xac", b"\xf0\x9f"])
outputs = letters.map(str.encode) | st.binary(max_size=12) | st.lists(fragments).map(b"".join)


@pytest.mark.thorough
@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_split_gives_the_answer_of_the_whole(data: st.DataObject) -> None:
    output = data.draw(outputs)
    stop = data.draw(stops)
    pieces = cut(output, data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    released = stream(pieces, stop)
    text, stopped = whole(output, stop)
    assert "".join(r.text for r in released) == text
    assert released[-1].stopped == stopped
    if stopped is None:
        assert sum(r.tokens for r in released) == len(pieces)


@pytest.mark.thorough
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_no_more_is_held_back_than_may_become_a_stop(data: st.DataObject) -> None:
    output = data.draw(letters)
    stop = data.draw(stops)
    if whole(output.encode(), stop)[1] is not None:
        return
    released = stream([c.encode() for c in output], stop)
    shown = ""
    for i, step in enumerate(released[:-1], 1):
        shown += step.text
        assert shown + held(output[:i], stop) == output[:i]


@pytest.mark.thorough
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_tokens_are_counted_when_their_last_byte_is_out(data: st.DataObject) -> None:
    output = data.draw(letters).encode()
    stop = data.draw(stops)
    pieces = cut(output, data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    shown, counted = b"", 0
    for i, step in enumerate(stream(pieces, stop), 1):
        shown += step.text.encode()
        counted += step.tokens
        ends = list(itertools.accumulate(len(p) for p in pieces[:i]))
        assert counted == sum(end <= len(shown) for end in ends)


@pytest.mark.parametrize("text", ["é", "€", "😀", "a😀b", "👩‍👩‍👧", "नमस्ते", "\u0000x"])
def test_characters_cut_at_every_byte(text: str) -> None:
    data = text.encode()
    for places in itertools.chain.from_iterable(itertools.combinations(range(1, len(data)), n) for n in range(3)):
        released = stream(cut(data, list(places)), ())
        assert "".join(r.text for r in released) == text
        assert "\ufffd" not in "".join(r.text for r in released)
    single = stream([bytes([b]) for b in data], ("zz",))
    assert "".join(r.text for r in single) == text


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "stopped"),
    [
        ([b"one", b"\n", b"\ntwo"], ("\n\n",), "one", "\n\n"),
        ([b"a STOP b"], ("STOP",), "a ", "STOP"),
        ([b"a S", b"T", b"OP b"], ("STOP",), "a ", "STOP"),
        ([b"xabc"], ("abc", "bc"), "x", "abc"),
        ([b"xabc"], ("abcd", "bc"), "xa", "bc"),
        ([b"aab"], ("ab",), "a", "ab"),
        ([b"x\xe2", b"\x82\xacy"], ("€",), "x", "€"),
        ([b"x\xe2\x82", b"\xac", b"\xe2\x82\xacy"], ("€€",), "x", "€€"),
        ([b"end"], ("end",), "", "end"),
        ([b"abab"], ("",), "abab", None),
        ([b"a\xff"], ("\ufffd",), "a", "\ufffd"),
        ([b"a\xf0\x9f"], ("\ufffd",), "a", "\ufffd"),
        ([b"a\xf0\x9f"], (), "a\ufffd", None),
    ],
)
def test_stops(pieces: list[bytes], stop: tuple[str, ...], text: str, stopped: str | None) -> None:
    released = stream(pieces, stop)
    assert "".join(r.text for r in released) == text
    assert released[-1].stopped == stopped


def test_after_a_stop_nothing_is_released() -> None:
    text = TextStream({0: b"a.", 1: b"more"}.__getitem__, (".",))
    assert text.push(0) == Released("a", 0, ".")
    assert text.push(1) == Released("", 0, ".")
    assert text.finish() == Released("", 0, ".")


def test_tokens_without_text_are_counted_in_order() -> None:
    text = TextStream({0: b"", 1: b"a", 2: b"\xe2", 3: b"\x82\xac"}.__getitem__, ("ab",))
    assert text.push(0) == Released("", 1, None)
    assert text.push(1) == Released("", 0, None)
    assert text.push(0) == Released("", 0, None)
    assert text.push(2) == Released("", 0, None)
    assert text.push(3) == Released("a€", 4, None)
    assert text.finish() == Released("", 0, None)


@pytest.mark.thorough
def test_long_repetitive_stops_cost_no_more_than_one_look_per_character() -> None:
    stop = "a" * 20_000 + "b"
    text = TextStream(lambda _: b"a" * 10_000, (stop,))
    assert [len(text.push(0).text) for _ in range(4)] == [0, 0, 10_000, 10_000]
    assert len(text.finish().text) == 20_000
