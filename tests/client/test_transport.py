"""The client's retry rules and its reading of server-sent events, as pure functions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.client.transport import SseDecoder, backoff, base_url, is_loopback, retry_after, retry_delay
from magnitude_engine.errors import ConfigError


@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
def test_transient_statuses_are_retried_with_growing_delay(status: int) -> None:
    delays = [retry_delay(status, {}, attempt, 0.0, 0.0) for attempt in range(6)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422])
def test_other_statuses_are_final(status: int) -> None:
    assert retry_delay(status, {}, 0, 0.0, 0.0) is None


def test_the_server_decides_where_it_says_so() -> None:
    assert retry_delay(429, {"x-should-retry": "false"}, 0, 0.0, 0.0) is None
    assert retry_delay(400, {"x-should-retry": "true"}, 0, 0.0, 0.0) == 0.5
    assert retry_delay(429, {"retry-after": "3"}, 0, 0.0, 0.0) == 3.0
    assert retry_delay(429, {"retry-after-ms": "40", "retry-after": "3"}, 0, 0.0, 0.0) == 0.04
    assert retry_delay(503, {"retry-after": "121"}, 0, 0.0, 0.0) is None
    assert retry_delay(503, {"retry-after": "-5"}, 0, 0.0, 0.0) == 0.5


def test_retry_after_takes_dates_and_ignores_nonsense() -> None:
    assert retry_after({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, now=90.0) == 10.0
    assert retry_after({"retry-after": "soon"}, now=0.0) is None
    assert retry_after({}, now=0.0) is None


@pytest.mark.thorough
@settings(max_examples=50)
@given(st.integers(0, 10_000), st.floats(0, 1))
def test_backoff_is_bounded(attempt: int, jitter: float) -> None:
    assert 0.375 <= backoff(attempt, jitter) <= 8.0
    assert math.isfinite(backoff(attempt, jitter))


@pytest.mark.thorough
@settings(max_examples=50)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\r\n")), max_size=6), st.data())
def test_events_are_the_same_wherever_the_bytes_are_split(texts: list[str], data: st.DataObject) -> None:
    newline = data.draw(st.sampled_from(["\n", "\r\n"]))
    wire = "".join(f": ping{newline}event: x{newline}data: {t}{newline}{newline}" for t in texts).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    decoder, got = SseDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        got += decoder.feed(wire[start:end])
    assert got == [t.encode() for t in texts]


def test_data_lines_of_one_event_are_joined() -> None:
    assert SseDecoder().feed(b"data: a\ndata:b\n\n: keep-alive\n\n") == [b"a\nb"]


@pytest.mark.parametrize(
    ("given_url", "used"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        (" https://host/api/v1/ ", "https://host/api/v1"),
    ],
)
def test_endpoints_are_normalised(given_url: str, used: str) -> None:
    assert str(base_url(given_url)) == used


@pytest.mark.parametrize(
    "wrong", ["", "localhost:8000", "ftp://host/v1", "http://", "http://host/v1?key=1", "http://[::1"]
)
def test_endpoints_that_are_no_url_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        base_url(wrong)
    assert caught.value.param == "endpoint"


def test_loopback_is_recognised() -> None:
    assert [is_loopback(h) for h in ("localhost", "127.0.0.1", "::1", "10.0.0.1", "example.org")] == [
        True, True, True, False, False,
    ]  # fmt: skip
