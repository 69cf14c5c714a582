"""The parts of an answer, the names of fields, and kept answers, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine import api
from magnitude_proxy.dialect.parts import Change, Closed, Grown, Interleaved, Opened, Parts
from magnitude_proxy.dialect.responses_requests import NAMES
from magnitude_proxy.store import responses
from magnitude_proxy.store.connection import StoreDown
from magnitude_proxy.store.responses import KeptResponse, KeptResponses

LETTERS = st.text("ab", min_size=1, max_size=3)
# A said part: its kind, and its text in pieces. Two texts in a row are one part.
SAID = st.lists(
    st.tuples(st.sampled_from(["text", "refusal", "call"]), st.lists(LETTERS, min_size=1, max_size=3)), max_size=6
)


def deltas(said: list[tuple[str, list[str]]]) -> list[api.Delta]:
    """Returns the events that say these parts."""
    made, calls = [], 0
    for kind, pieces in said:
        for number, piece in enumerate(pieces):
            if kind == "text":
                made.append(api.Delta(request="r", epoch=1, text=piece))
            elif kind == "refusal":
                made.append(api.Delta(request="r", epoch=1, refusal=piece))
            else:
                first = {"id": f"c{calls}", "name": "tool"} if number == 0 else {}
                call = api.ToolCallDelta(index=calls, arguments=piece, **first)
                made.append(api.Delta(request="r", epoch=1, tool_calls=(call,)))
        calls += kind == "call"
    return made


@pytest.mark.thorough
@given(SAID)
@settings(max_examples=50)
def test_parts_follow_one_another_and_lose_nothing(said: list[tuple[str, list[str]]]) -> None:
    parts = Parts()
    changes: list[Change] = [change for event in deltas(said) for change in parts.add(event)]
    changes += parts.close()
    expected: list[tuple[str, str]] = []
    for kind, pieces in said:
        if expected and expected[-1][0] == kind != "call":
            expected[-1] = (kind, expected[-1][1] + "".join(pieces))
        else:
            expected.append((kind, "".join(pieces)))
    told: list[tuple[str, str]] = []
    open_part = None
    for change in changes:
        if isinstance(change, Opened):
            assert open_part is None
            open_part, text = change.part, ""
        elif isinstance(change, Grown):
            assert change.part is open_part
            text += change.piece
        elif isinstance(change, Closed):
            assert change.part is open_part
            told.append((change.part.kind, text))
            open_part = None
    assert open_part is None
    assert told == expected == [(part.kind, part.text) for part in parts.parts]


def test_a_closed_call_never_grows_again() -> None:
    parts = Parts()
    for index in (0, 1):
        list(parts.add(api.Delta(request="r", epoch=1, tool_calls=(api.ToolCallDelta(index=index, name="x"),))))
    with pytest.raises(Interleaved, match="tool call 0"):
        list(parts.add(api.Delta(request="r", epoch=1, tool_calls=(api.ToolCallDelta(index=0, arguments="{}"),))))


@pytest.mark.parametrize(
    ("chat", "own"),
    [
        ("tools[3].function.parameters.type", "tools[3].parameters.type"),
        ("response_format.json_schema.schema.not", "text.format.schema.not"),
        ("messages[2].content", "input.content"),
        ("max_tokens", "max_output_tokens"),
        ("max_tokens_more", "max_tokens_more"),
        ("temperature", "temperature"),
    ],
)
def test_names_of_fields(chat: str, own: str) -> None:
    assert NAMES.own(chat) == own
    assert NAMES.words(f"{chat} is wrong in messages; lower {chat}") == f"{own} is wrong in messages; lower {own}"


async def test_answers_in_memory_expire_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MEMORY_BYTES", 100)
    now = 0.0
    kept = KeptResponses(None, 10.0, lambda: now)
    body = KeptResponse(body=b"{}", conversation=b"[]")
    for name in "abc":
        assert await kept.keep("salt", name, body)
    found = [await kept.find("salt", name) for name in "abc"]
    assert found[-1] == body
    assert None in found
    assert await kept.find("other", "c") is None
    now = 10.0
    assert await kept.find("salt", "c") is None
    assert await kept.forget("salt", "c") is False


async def test_an_answer_too_large_for_the_store_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses, "MAX_BYTES", 10)
    kept = KeptResponses(None, 10.0)
    assert not await kept.keep("salt", "a", KeptResponse(body=b"{}", conversation=b"[]"))
    assert await kept.find("salt", "a") is None


class Broken:
    """A store that answers with what nobody put there."""

    def __init__(self, reply: object) -> None:
        self._reply = reply

    async def call(self, operation: str, *command: str | int | float | bytes) -> object:
        return self._reply


@pytest.mark.parametrize("reply", [b"", b"no zlib", 7, bytes.fromhex("789c030000000001")])
async def test_what_the_store_broke_is_told(reply: object) -> None:
    with pytest.raises(StoreDown):
        await KeptResponses(Broken(reply), 10.0).find("salt", "a")
