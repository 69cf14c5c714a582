"""The event stream parser and its counterpart, at every place where bytes can be cut."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnitude_proxy.sse import DONE, DONE_DATA, KEEPALIVE, EventParser, OversizedEvent, ServerEvent, format_event


def parse(*pieces: bytes, **limits: int) -> list[ServerEvent]:
    parser = EventParser(**limits)
    return [event for piece in pieces for event in parser.feed(piece)]


def lazily(pieces: list[bytes]) -> Iterator[ServerEvent]:
    parser = EventParser(line_limit=50)
    for piece in pieces:
        yield from parser.feed(piece)


EXAMPLE = (
    b"\xef\xbb\xbfdata: one\n\n: comment\r\n\r\nevent: error\rdata:two\rdata:  three\r\r"
    b"data: a\r\ndata: b\r\n\r\ndata\nid: 7\nretry: 9\nunknown: x\n\n"
    b"data: \xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\r\n\r\n\n\nevent: lost\n\n"
    b"data: cut off"
)
EVENTS = [
    ServerEvent(b"one"),
    ServerEvent(b"two\n three", b"error"),
    ServerEvent(b"a\nb"),
    ServerEvent(b""),
    ServerEvent("é€😀".encode()),
]


def test_events_of_a_mixed_stream() -> None:
    assert parse(EXAMPLE) == EVENTS


@pytest.mark.thorough
@pytest.mark.parametrize("at", range(len(EXAMPLE) + 1))
def test_one_cut_changes_nothing(at: int) -> None:
    assert parse(EXAMPLE[:at], EXAMPLE[at:]) == EVENTS


def test_single_bytes_change_nothing() -> None:
    assert parse(*(EXAMPLE[i : i + 1] for i in range(len(EXAMPLE)))) == EVENTS


line = st.sampled_from([b"data: x", b"data:", b"data", b"event: e", b": c", b"", b"\xc3\xa9", b"id: 1"])
line_end = st.sampled_from([b"\r", b"\n", b"\r\n"])
stream_bytes = st.lists(st.tuples(line, line_end).map(b"".join), max_size=20).map(b"".join)


@pytest.mark.thorough
@given(data=stream_bytes, cuts=st.lists(st.integers(0, 120), max_size=8))
def test_any_cuts_give_the_same_events(data: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    pieces = [data[a:b] for a, b in pairwise(edges)]
    assert parse(*pieces) == parse(data)


@pytest.mark.thorough
@given(data=st.binary(max_size=200))
def test_what_is_formatted_is_parsed(data: bytes) -> None:
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    assert parse(format_event(data)) == [ServerEvent(lines)]


def test_own_frames() -> None:
    assert parse(KEEPALIVE + DONE) == [ServerEvent(DONE_DATA)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_long_lines_fail_after_the_events_before_them(size: int) -> None:
    stream = b"data: ok\n\ndata: " + b"x" * 100 + b"\n\ndata: never\n\n"
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    events: list[ServerEvent] = []
    with pytest.raises(OversizedEvent, match="line is longer than 50"):
        events.extend(lazily(pieces))
    assert events == [ServerEvent(b"ok")]


def test_many_lines_of_one_event_are_bounded() -> None:
    with pytest.raises(OversizedEvent, match="event is longer than 60"):
        parse(b"data: 0123456789\n" * 10, event_limit=60)
    assert len(parse(b"data: 0123456789\n\n" * 10, event_limit=60)) == 10


def test_the_default_line_limit_is_one_mebibyte() -> None:
    fits = b"data:" + b"x" * (1024 * 1024 - 5)
    assert len(parse(fits + b"\n\n")) == 1
    with pytest.raises(OversizedEvent):
        parse(fits + b"x")
