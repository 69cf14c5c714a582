"""Sessions are recognised by each client's own means, and never merged by accident or by malice."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnitude_engine import api
from magnitude_proxy.client_headers import CLIENTS, tool_seconds
from magnitude_proxy.identity import IdentityHints, branch_name, identify

NO_HINTS = IdentityHints()
TEXT = st.text(st.characters(codec=None), max_size=40)


def session_of(tenant: str, raw: str) -> str:
    return identify(tenant, {}, IdentityHints(magnitude_session=raw)).session


def chat(*messages: tuple[str, str]) -> IdentityHints:
    return IdentityHints(messages=tuple(api.Message(role=role, content=text) for role, text in messages))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "source"),
    [
        ("X-Magnitude-Session", "magnitude"),
        ("x-claude-code-session-id", "claude-code"),
        ("session_id", "codex"),
        ("session-id", "codex"),
        ("thread-id", "codex"),
        ("x-session-id", "x-session-id"),
        ("x-session-affinity", "x-session-affinity"),
        ("X-Dynamo-Session-ID", "dynamo"),
        ("X-Amp-Thread-Id", "amp"),
        ("x-grok-conv-id", "grok"),
        ("X-Qwen-Code-Session-Id", "qwen-code"),
        ("x-litellm-trace-id", "litellm"),
    ],
)
def test_each_client_is_known_by_its_header(header: str, source: str) -> None:
    found = identify("acme", {header: " abc "}, IdentityHints(metadata_session_id="other", text="hello"))
    assert (found.source, found.raw, found.branch) == (source, "abc", "main")
    assert found.run == found.session
    assert found.session == identify("acme", {header.upper(): "abc"}, NO_HINTS).session
    assert len(found.session) == 32
    assert set(found.session) <= set("0123456789abcdef")


def test_precedence_goes_down_the_list() -> None:
    headers = {"x-magnitude-session": "1"} | {client.session[0]: "1" for client in CLIENTS}
    hints = IdentityHints(session_id="1", program_id="1", metadata_session_id="1", prompt_cache_key="1", text="1")
    sources = []
    for name in list(headers):
        sources.append(identify("t", headers, hints).source)
        del headers[name]
    sources.append(identify("t", headers, hints).source)
    for name in ("session_id", "program_id", "metadata_session_id", "prompt_cache_key"):
        hints = msgspec.structs.replace(hints, **{name: None})
        sources.append(identify("t", headers, hints).source)
    hinted = ["session-id", "program-id", "metadata", "prompt-cache-key"]
    assert sources == ["magnitude", *(c.source for c in CLIENTS), *hinted, "fingerprint"]


def test_body_and_header_name_the_same_session_and_the_header_wins() -> None:
    by_header = identify("t", {"X-Magnitude-Session": "a"}, IdentityHints(magnitude_session="b"))
    assert by_header == identify("t", {}, IdentityHints(magnitude_session="a"))
    assert by_header.session == session_of("t", "a")


def test_sub_agents_of_claude_code_are_branches_of_one_session() -> None:
    main = identify("t", {"x-claude-code-session-id": "s"}, NO_HINTS)
    sub = identify("t", {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a7"}, NO_HINTS)
    assert (sub.session, sub.run, sub.branch) == (main.session, main.session, "a7")


@pytest.mark.parametrize(
    ("told", "branch"), [("auxiliary", "auxiliary"), ("Compaction", "compaction"), ("main", "main")]
)
def test_a_call_beside_the_conversation_is_no_step_of_it(told: str, branch: str) -> None:
    headers = {"x-claude-code-session-id": "s", "x-claude-code-request-class": told}
    found = identify("t", headers, NO_HINTS)
    assert (found.branch, found.aside) == (branch, branch != "main")
    of_sub_agent = identify("t", headers | {"x-claude-code-agent-id": "a7"}, NO_HINTS)
    assert of_sub_agent.branch == ("a7" if branch == "main" else f"a7:{branch}")


def test_tool_durations_are_read_as_far_as_they_can_be() -> None:
    told = "Bash=742;Read=9;Bash=1500; mcp__a%3Bb=60 ;=3;Edit=x;Grep=-1;Long=99999999999;Glob"
    found = identify("t", {"X-Claude-Code-Prev-Tool-Durations": told}, IdentityHints(text="a"))
    assert found.tool_seconds == {"Bash": 1.5, "Read": 0.009, "mcp__a;b": 0.06}
    assert tool_seconds({"x-claude-code-prev-tool-durations": "a=1;" * 1025}) == {}
    assert len(tool_seconds({"x-claude-code-prev-tool-durations": ";".join(f"t{n}=1" for n in range(99))})) == 32


@pytest.mark.parametrize(
    ("session", "parent"),
    [
        ("thread-id", "x-codex-parent-thread-id"),
        ("x-session-id", "x-parent-session-id"),
        ("x-session-affinity", "x-parent-session-id"),
        ("x-dynamo-session-id", "x-dynamo-parent-session-id"),
    ],
)
def test_a_sub_agent_with_a_session_id_is_a_branch_of_its_parents_session(session: str, parent: str) -> None:
    root = identify("t", {session: "root"}, NO_HINTS)
    child = identify("t", {session: "child", parent: "root"}, NO_HINTS)
    assert (child.session, child.run, child.branch, child.raw) == (root.session, root.session, "child", "root")
    assert child.own == identify("t", {session: "child"}, NO_HINTS).session
    assert identify("t", {session: "root", parent: "root"}, NO_HINTS) == root


def test_a_thread_of_codex_is_a_branch_of_its_session() -> None:
    main = identify("t", {"session-id": "s", "thread-id": "s"}, NO_HINTS)
    thread = {"session-id": "s", "thread-id": "t1", "x-codex-parent-thread-id": "s"}
    nested = thread | {"thread-id": "t2", "x-codex-parent-thread-id": "t1"}
    found = [identify("t", headers, NO_HINTS) for headers in (thread, nested)]
    assert [(each.session, each.branch, each.raw) for each in found] == [(main.session, b, "s") for b in ("t1", "t2")]
    assert (main.branch, main.own) == ("main", None)


def test_opencodes_calls_without_tools_are_beside_its_conversation() -> None:
    headers = {"x-session-id": "s", "user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4.0.23"}
    assert identify("t", headers, NO_HINTS).aside
    assert not identify("t", headers, IdentityHints(tools=(api.Tool(name="bash"),))).aside
    assert not identify("t", headers | {"user-agent": "other/1.0"}, NO_HINTS).aside


def test_a_parent_in_the_products_own_header_is_the_run() -> None:
    root = identify("t", {"x-magnitude-session": "root"}, NO_HINTS)
    child = identify("t", {"x-magnitude-session": "child", "x-magnitude-parent": "root"}, NO_HINTS)
    assert child.run == root.session != child.session


def test_body_parent_and_branch() -> None:
    hints = IdentityHints(magnitude_session="c", magnitude_parent="p", magnitude_branch="b-1")
    found = identify("t", {}, hints)
    assert (found.branch, found.run) == ("b-1", session_of("t", "p"))
    assert identify("t", {"X-Magnitude-Branch": "h"}, hints).branch == "h"


def test_fingerprint_holds_over_an_agents_steps_and_differs_between_tasks() -> None:
    first = identify("t", {}, chat(("system", "You are"), ("user", "do X")))
    later = identify("t", {}, chat(("system", "You are"), ("user", "do X"), ("assistant", "ok"), ("user", "more")))
    other = identify("t", {}, chat(("system", "You are"), ("user", "do Y")))
    assert first == later
    assert other.session != first.session
    tool = api.Tool(name="f", parameters={"a": 1, "b": 2})
    same = api.Tool(name="f", parameters={"b": 2, "a": 1})
    hints = IdentityHints(messages=chat(("user", "do X")).messages, tools=(tool,))
    assert identify("t", {}, hints) == identify("t", {}, IdentityHints(messages=hints.messages, tools=(same,)))
    assert identify("t", {}, hints).session != identify("t", {}, chat(("user", "do X"))).session


def test_raw_text_is_known_by_its_beginning() -> None:
    start = "Goal: " + "x" * 2000
    assert identify("t", {}, IdentityHints(text=start)) == identify("t", {}, IdentityHints(text=start + " more"))
    assert identify("t", {}, IdentityHints(text="a")).session != identify("t", {}, IdentityHints(text="b")).session


def test_blank_values_are_absent() -> None:
    hints = IdentityHints(magnitude_session=" ", metadata_session_id="", prompt_cache_key="k")
    assert identify("t", {"X-Magnitude-Session": "  ", "session_id": ""}, hints).source == "prompt-cache-key"


@pytest.mark.thorough
@given(TEXT, TEXT, TEXT, TEXT)
def test_no_two_pairs_of_tenant_and_id_meet(tenant: str, raw: str, other_tenant: str, other_raw: str) -> None:
    mine = identify(tenant, {}, IdentityHints(magnitude_session=f"x{raw}x"))
    theirs = identify(other_tenant, {}, IdentityHints(magnitude_session=f"x{other_raw}x"))
    assert (mine.session == theirs.session) == ((tenant, raw) == (other_tenant, other_raw))


@pytest.mark.thorough
@given(TEXT)
def test_any_bytes_give_printable_ids(raw: str) -> None:
    found = identify("t", {"X-Magnitude-Session": f"a{raw}", "X-Magnitude-Branch": f"b{raw}"}, NO_HINTS)
    assert found.raw.isprintable()
    assert len(found.raw) <= 200
    assert found.branch.isascii()
    assert len(found.branch) <= 64


def test_moving_a_boundary_changes_the_session() -> None:
    assert session_of("ab", "c") != session_of("a", "bc")
    assert (
        identify("t", {"session_id": "x"}, NO_HINTS).session != identify("t", {"x-session-id": "x"}, NO_HINTS).session
    )


def test_odd_branch_names_are_hashed_and_cannot_pose_as_plain_ones() -> None:
    odd = branch_name("a b\n")
    assert odd.startswith("~")
    assert branch_name(odd) != odd
    assert branch_name("main") == branch_name(None) == "main"
