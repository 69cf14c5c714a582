"""What each kind of server is told: the tables, without any input or output."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnitude_proxy.config import UpstreamConfig, UpstreamKind
from magnitude_proxy.upstream.adapters.plan import RESERVED, Refused, Sent, adapt
from magnitude_proxy.upstream.adapters.recognise import recognise
from magnitude_proxy.upstream.adapters.server import Server, read_version
from magnitude_proxy.upstream.adapters.slots import Slots
from magnitude_proxy.upstream.adapters.table import ADAPTERS
from magnitude_proxy.upstream.adapters.tell import Facts, cache_salt
from testkit.servers import SERVERS, asking

FACTS = Facts(chat=True, salt="salt", session="s1", branch="sub", step=3, priority=10, slot=2)
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
KINDS = tuple(ADAPTERS)


def known(kind: UpstreamKind) -> Server:
    return SERVERS[kind].known


def sent(body: dict[str, Any], server: Server, facts: Facts = FACTS, extra: tuple[str, ...] = ()) -> Sent:
    made = adapt(body, server, facts, extra)
    assert isinstance(made, Sent), made
    return made


def added(body: dict[str, Any], kind: UpstreamKind, chat: bool = True) -> dict[str, Any]:
    """Returns what a server of this kind gets for `body` beyond what any request has."""
    facts = Facts(chat=chat, salt="salt", session="s1")
    told = sent(CHAT, known(kind), facts).body
    return {name: value for name, value in sent({**CHAT, **body}, known(kind), facts).body.items() if name not in told}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_is_recognised_by_what_it_answers(kind: UpstreamKind) -> None:
    recorded = SERVERS[kind]
    asked: list[str] = []
    assert await recognise(UpstreamConfig(name="u", url="http://h/v1"), asking(recorded, asked)) == recorded.known
    assert len(asked) <= 3
    # Named in the configuration, only its facts are asked for.
    named = UpstreamConfig(name="u", url="http://h/v1/", kind=kind)
    asked.clear()
    assert await recognise(named, asking(recorded, asked)) == recorded.known
    assert "http://h/v1/models" not in asked


async def test_what_is_not_surely_a_kind_is_told_plain_openai_only() -> None:
    config = UpstreamConfig(name="u", url="http://h/v1")
    for kind in ("tgi", "dynamo"):
        assert await recognise(config, asking(SERVERS[kind]._replace(pages={}))) == Server()

    async def silent(url: str) -> None:
        return None

    assert await recognise(config, silent) is None
    assert [read_version(text) for text in ("0.11.0rc2.dev1+g1", "1.4", "dev", None)] == [(0, 11, 0), (1, 4, 0), (), ()]


def test_each_kind_is_told_whom_a_request_is_for_in_its_own_words() -> None:
    words: dict[UpstreamKind, tuple[dict[str, Any], dict[str, str]]] = {
        "openai": ({}, {}),
        "tgi": ({}, {}),
        "vllm": ({"cache_salt": "salt", "priority": 10}, {"X-Session-ID": "s1"}),
        "sglang": ({"cache_salt": "salt", "session_id": "s1", "priority": -10}, {"X-Session-ID": "s1"}),
        "llamacpp": ({"id_slot": 2, "cache_prompt": True}, {}),
        "trtllm": ({"cache_salt": "salt", "priority": 0.45}, {}),
        "dynamo": (
            {
                "nvext": {
                    "cache_salt": "salt",
                    "agent_hints": {"priority": -10},
                    "cache_control": {"type": "ephemeral", "ttl": "5m"},
                }
            },
            {"X-Dynamo-Session-ID": "s1-sub", "X-Dynamo-Parent-Session-ID": "s1"},
        ),
        "magnitude": ({"magnitude": {"session": "s1", "branch": "sub", "priority": 10}}, {}),
    }
    for kind, (body, headers) in words.items():
        assert sent(CHAT, known(kind)) == Sent({**CHAT, **body}, headers), kind
    # Where a server would refuse a field, or not use it, it is not sent.
    assert "priority" not in sent(CHAT, Server("vllm", (0, 9, 2))).body
    assert sent(CHAT, Server("sglang")).body == {**CHAT, "cache_salt": "salt"}
    assert sent(CHAT, Server("trtllm", (1, 0, 0))).body == CHAT
    assert sent(CHAT, known("llamacpp"), Facts(chat=True, salt="", session="s", cached=False)).body == {
        **CHAT,
        "cache_prompt": False,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_cannot_say_what_only_the_proxy_may(kind: UpstreamKind) -> None:
    evil = {name: f"evil {name}" for name in RESERVED}
    hints = {"agent_hints": {"priority": 99, "osl": 7}, "backend_instance_id": 1, "cache_salt": "evil"}
    made = sent({**CHAT, **evil, "nvext": hints}, known(kind))
    assert "evil" not in str(made)
    told = sent(CHAT, known(kind)).body
    if kind == "dynamo":
        assert made.body["nvext"]["agent_hints"] == {"priority": -10, "osl": 7}
    else:
        assert made.body == told


def test_tenants_have_salts_of_their_own_and_can_only_divide_them() -> None:
    salts = {cache_salt(tenant, wanted) for tenant in ("a", "b") for wanted in (None, "", "x", "y")}
    assert len(salts) == 8
    assert all(len(salt) == 43 for salt in salts)


# The form of the answer, as the client may write it, and what each kind gets for it; None is a refusal.
FORMS: list[tuple[dict[str, Any], dict[UpstreamKind, dict[str, Any] | None]]] = [
    (
        {"guided_json": SCHEMA},
        {
            "openai": {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "output", "schema": SCHEMA, "strict": True},
                }
            },
            "vllm": {"structured_outputs": {"json": SCHEMA}},
            "tgi": {"response_format": {"type": "json", "value": SCHEMA}},
            "dynamo": {"guided_json": SCHEMA},
            "magnitude": {"guided_json": SCHEMA},
        },
    ),
    (
        {"guided_regex": "[ab]+"},
        {
            "openai": None,
            "llamacpp": None,
            "vllm": {"structured_outputs": {"regex": "[ab]+"}},
            "sglang": {"regex": "[ab]+"},
            "trtllm": {"response_format": {"type": "regex", "regex": "[ab]+"}},
            "tgi": {"response_format": {"type": "regex", "value": "[ab]+"}},
            "dynamo": {"guided_regex": "[ab]+"},
            "magnitude": {"guided_regex": "[ab]+"},
        },
    ),
    (
        {"structured_outputs": {"choice": ['a"b', "c.d"]}},
        {
            "openai": None,
            "llamacpp": {"grammar": 'root ::= "a\\"b" | "c.d"'},
            "vllm": {"structured_outputs": {"choice": ['a"b', "c.d"]}},
            "sglang": {"regex": '(a"b|c\\.d)'},
            "dynamo": {"guided_choice": ['a"b', "c.d"]},
        },
    ),
    (
        {"guided_grammar": "start: /a/"},
        {
            "vllm": {"structured_outputs": {"grammar": "start: /a/"}},
            "sglang": None,
            "llamacpp": None,
            "trtllm": None,
            "tgi": None,
            "dynamo": {"guided_grammar": "start: /a/"},
        },
    ),
    (
        {"structured_outputs": {"json_object": True}},
        {
            "openai": {"response_format": {"type": "json_object"}},
            "dynamo": {"response_format": {"type": "json_object"}},
            "tgi": {"response_format": {"type": "json", "value": {"type": "object"}}},
        },
    ),
    (
        {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
        {"vllm": {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}}, "sglang": None, "openai": None},
    ),
    ({"response_format": {"type": "json_object"}}, {"vllm": {"response_format": {"type": "json_object"}}}),
]


def test_the_form_of_an_answer_is_asked_for_in_the_servers_words_or_refused() -> None:
    for body, wanted in FORMS:
        for kind, fields in wanted.items():
            made = adapt({**CHAT, **body}, known(kind), FACTS)
            if fields is None:
                assert isinstance(made, Refused), (kind, body)
                assert made.field.partition(".")[0] in body
            else:
                assert added(body, kind) == fields, (kind, body)
    # vLLM ignores the older fields from 0.11 on, and did not know the newer ones before.
    old = sent({**CHAT, "structured_outputs": {"regex": "a"}}, Server("vllm", (0, 10, 1))).body
    assert (old["guided_regex"], "structured_outputs" in old) == ("a", False)
    # Completions of llama.cpp take a schema by itself, plain ones have no word for it.
    assert added({"guided_json": SCHEMA}, "llamacpp", chat=False) == {"json_schema": SCHEMA}
    assert adapt({**CHAT, "guided_json": SCHEMA}, Server(), Facts(False, "", "s")) == Refused("guided_json")


def test_what_changes_an_answer_is_never_left_out() -> None:
    asked: dict[str, list[tuple[str, Any]]] = {
        "openai": [("top_k", 5), ("min_p", 0.1), ("ignore_eos", True)],
        "vllm": [("functions", [{}]), ("best_of", 3), ("web_search_options", {}), ("modalities", ["audio"])],
        "trtllm": [("parallel_tool_calls", False), ("suffix", "x")],
        "tgi": [("top_k", 5), ("n", 2), ("logit_bias", {"1": 5}), ("presence_penalty", 0.5)],
    }
    for kind, fields in asked.items():
        for name, value in fields:
            assert adapt({**CHAT, name: value}, Server(kind), FACTS) == Refused(name), (kind, name)  # type: ignore[arg-type]
    # What asks for nothing is no reason to refuse.
    nothing = {"top_k": -1, "min_p": 0.0, "ignore_eos": False, "n": 1, "presence_penalty": 0, "best_of": 1}
    for kind in KINDS:
        assert isinstance(adapt({**CHAT, **nothing, "guided_regex": None}, known(kind), FACTS), Sent)
    # An operator may know better.
    assert sent({**CHAT, "top_k": 5}, Server(), extra=("top_k",)).body == {**CHAT, "top_k": 5}


def test_fields_that_a_server_knows_otherwise_are_renamed_or_dropped() -> None:
    body = {"max_completion_tokens": 9, "prediction": {"type": "content", "content": "x"}, "top_k": -1, "seed": 1}
    assert added(body, "trtllm") == {"max_tokens": 9, "top_k": 0, "seed": 1}
    assert added(body, "llamacpp") == {**body, "top_k": 0}
    assert added(body, "openai") == {name: value for name, value in body.items() if name != "top_k"}
    assert added(body, "vllm") == body


@pytest.mark.thorough
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=60), st.integers(1, 4))
def test_slots_are_lent_to_one_step_at_a_time_and_kept_by_their_session(
    steps: list[tuple[int, bool]], total: int
) -> None:
    slots, lent = Slots(), dict[int, int]()
    owned: dict[int, int] = {}
    for session, ends in steps:
        if ends:
            if session in lent:
                slots.release(lent.pop(session))
            continue
        slot = slots.take(str(session), total)
        if session in lent or len(lent) == total:
            assert slot is None
            continue
        assert slot is not None
        assert 0 <= slot < total
        assert slot not in lent.values()
        # Nobody loses a slot while there is one that nobody owns.
        assert owned.get(session, slot) == slot
        owned = {other: place for other, place in owned.items() if place != slot} | {session: slot}
        lent[session] = slot
