"""The sessions' states, what is expected of them, and the choice that follows."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine.api import SessionUse
from magnitude_engine.kv.retention import Candidate, Retention, SessionKey
from magnitude_engine.kv.sessions import MAX_ENDS, MAX_SESSIONS
from magnitude_engine.kv.shadow import CANDIDATES, FEWEST_ACCESSES
from testkit.page_cache import chain, found

S, T, U = (SessionKey("t", name, "main") for name in "stu")


def taught(**seconds: float) -> Retention:
    """Returns a retention that has seen each tool take so long, three times."""
    retention, teacher = Retention(100), SessionKey("t", "teacher", "main")
    for tool, duration in seconds.items():
        for _ in range(3):
            retention.paused(teacher, [], [tool], 0.0)
            retention.resumed(teacher, [], duration)
    retention.ended(teacher, 0.0)
    return retention


@pytest.fixture(scope="module")
def deceived() -> Retention:
    """A retention that trusts its rule no longer: what ended came back each time, what did not end never did."""
    retention, liar = Retention(100), SessionKey("t", "liar", "main")
    for number in range(2 * FEWEST_ACCESSES):
        retention.resumed(liar, chain(range(20)), float(number))
        retention.ended(liar, float(number))
        retention.resumed(SessionKey("t", f"silent-{number}", "main"), chain([(number, p) for p in range(50)]), number)
    return retention


def test_a_duration_is_learned_from_pause_to_resumption() -> None:
    retention = taught(search=2.0)
    assert retention.expected_duration_s("t", "search") == 2.0
    retention.paused(S, [], ["search"], 0.0)
    retention.resumed(S, [], 500.0)
    assert retention.expected_duration_s("t", "search") == 2.0
    assert retention.expected_duration_s("other", "search") is None
    assert retention.expected_duration_s("t", "unknown") is None


def test_a_second_request_during_a_step_teaches_nothing() -> None:
    retention = taught(search=2.0)
    for _ in range(5):
        retention.paused(S, [], ["search"], 0.0)
        retention.resumed(S, [], 2.0)
        retention.resumed(S, [], 300.0)
    assert retention.expected_duration_s("t", "search") == 2.0


def test_expected_use_follows_the_state() -> None:
    retention = taught(search=2.0, build=60.0)
    assert retention.expected_use_s(None, 3.0, 10.0) == 7.0
    assert retention.expected_use_s(S, 3.0, 10.0) == 7.0
    retention.resumed(S, chain("ab"), 10.0)
    assert retention.expected_use_s(S, 10.0, 11.0) == 1.0
    retention.paused(S, chain("abc"), ["search", "build"], 12.0)
    assert retention.expected_use_s(S, 12.0, 22.0) == 50.0
    assert retention.expected_use_s(S, 12.0, 80.0) == 68.0
    retention.resumed(S, chain("abc"), 80.0)
    retention.paused(S, chain("abcd"), [], 81.0)
    assert retention.expected_use_s(S, 81.0, 90.0) == 9.0
    retention.ended(S, 91.0)
    assert retention.expected_use_s(S, 81.0, 92.0) == math.inf
    retention.resumed(S, chain("abcd"), 93.0)
    assert retention.expected_use_s(S, 93.0, 93.5) == 0.5


def test_pruning_ends_one_branch_or_all() -> None:
    retention = Retention(10)
    keys = [SessionKey("t", "s", "main"), SessionKey("t", "s", "x"), SessionKey("t", "other", "main")]
    for key in keys:
        retention.resumed(key, chain("a"), 0.0)
    retention.pruned("t", "s", "x", 1.0)
    assert [use.state for use in retention.sessions(1.0)] == ["thinking", "thinking", "ended"]
    retention.pruned("t", "s", None, 1.0)
    retention.pruned("t", "never seen", None, 1.0)
    assert {(use.session, use.branch): use.state for use in retention.sessions(1.0)} == {
        ("s", "main"): "ended",
        ("s", "x"): "ended",
        ("other", "main"): "thinking",
    }


def test_a_step_that_outlives_its_session_does_not_revive_it() -> None:
    retention = Retention(10)
    retention.resumed(S, chain("ab"), 0.0)
    retention.pruned("t", "s", None, 1.0)
    retention.paused(S, chain("abc"), ["search"], 2.0)
    assert retention.expected_use_s(S, 2.0, 3.0) == math.inf
    assert retention.due(2.0, 1e9) == []


def test_dead_pages_go_first_from_the_simulated_cache() -> None:
    retention = Retention(9)
    retention.resumed(T, chain("efg"), 0.0)
    retention.resumed(S, chain("abcd"), 1.0)
    retention.resumed(S, chain("aBC"), 2.0)
    retention.resumed(U, chain("xyz"), 3.0)
    assert [found(retention._learned, chain(text)) for text in ("efg", "abcd", "aBC", "xyz")] == [3, 1, 3, 3]
    assert [found(retention._lru, chain(text)) for text in ("efg", "abcd", "aBC", "xyz")] == [0, 4, 3, 3]
    retention.ended(S, 4.0)
    retention.resumed(U, chain("xyz12"), 5.0)
    assert [found(retention._learned, chain(text)) for text in ("efg", "aBC", "xyz12")] == [3, 1, 5]
    retention.paused(S, chain("aBC"), ["x"], 6.0)
    assert [found(retention._learned, chain(text)) for text in ("efg", "aBC", "xyz12")] == [1, 3, 5]
    retention.resumed(U, chain("xyz1234"), 7.0)
    assert [found(retention._learned, chain(text)) for text in ("efg", "aBC", "xyz1234")] == [1, 1, 7]


def test_who_ended_last_goes_first_among_many() -> None:
    retention, others = Retention(2 * CANDIDATES), [chain([number]) for number in range(2 * CANDIDATES - 2)]
    for number, pages in enumerate(others):
        retention.resumed(SessionKey("t", str(number), "main"), pages, 0.0)
    retention.resumed(S, chain("a"), 1.0)
    retention.ended(S, 2.0)
    retention.resumed(T, chain("xy"), 3.0)
    assert (found(retention._learned, others[0]), found(retention._learned, chain("a"))) == (1, 0)
    retention.paused(S, chain("a"), ["x"], 4.0)
    retention.resumed(T, chain("xyz"), 5.0)
    assert [found(retention._learned, pages) for pages in others[:3]] == [0, 1, 1]
    assert [found(retention._learned, chain(text)) for text in ("a", "xyz")] == [0, 3]


def test_the_dead_go_first_then_who_comes_back_last_then_the_least_recently_used() -> None:
    retention = taught(fast=1.0, slow=600.0)
    retention.paused(S, chain("ab"), ["slow"], 100.0)
    retention.paused(T, chain("ac"), ["fast"], 100.0)
    retention.paused(U, chain("ad"), [], 100.0)
    retention.ended(U, 100.0)
    fast, slow, ended = Candidate(T, 100.0), Candidate(S, 100.0), Candidate(U, 100.0)
    unknown, left = Candidate(None, 60.0), Candidate(T, 100.0, abandoned=True)
    assert retention.choose([fast, slow, ended], 100.5) == 2
    assert retention.choose([fast, slow, left], 100.5) == 2
    assert retention.choose([fast, unknown, slow], 100.5) == 2
    assert retention.choose([fast, unknown], 100.5) == 1
    assert retention.choose([unknown, Candidate(None, 60.0)], 100.5) == 0
    with pytest.raises(ValueError, match="at least one candidate"):
        retention.choose([], 100.5)


def test_a_rewritten_history_leaves_the_last_end_behind() -> None:
    retention = Retention(100)
    retention.resumed(S, chain("ab"), 0.0)
    retention.paused(S, chain("abo"), ["x"], 1.0)
    assert not retention.abandoned(S, chain("abo")[-1])
    retention.resumed(S, chain("aBc"), 2.0)
    assert retention.abandoned(S, chain("abo")[-1])
    assert not retention.abandoned(T, chain("abo")[-1])
    retention.resumed(S, chain("abo?"), 3.0)
    assert not retention.abandoned(S, chain("abo")[-1])
    assert not retention.abandoned(S, chain("abo?")[-1])


def test_of_several_choices_those_not_taken_are_left_behind() -> None:
    retention = Retention(100)
    retention.resumed(S, chain("ab"), 0.0)
    for choice in "123":
        retention.paused(S, chain("ab" + choice), ["x"], 1.0)
    retention.resumed(S, chain("ab2c"), 2.0)
    assert [retention.abandoned(S, chain("ab" + choice)[-1]) for choice in "123"] == [True, False, True]


def test_two_conversations_in_turn_leave_nothing_behind() -> None:
    retention = Retention(100)
    for step in range(1, 6):
        for name in "xy":
            retention.resumed(S, chain([*"sys", *[(name, n) for n in range(step)]]), float(step))
            retention.paused(S, chain([*"sys", *[(name, n) for n in range(step)], (name, step)]), [], step + 0.5)
    ends = [chain([*"sys", *[(name, n) for n in range(6)]])[-1] for name in "xy"]
    assert [retention.abandoned(S, end) for end in ends] == [False, False]


def test_due_sessions_are_named_in_order_until_they_are_back() -> None:
    retention = taught(fast=1.0, slow=600.0)
    retention.paused(S, [], ["slow"], 1000.0)
    retention.paused(T, [], ["fast"], 1590.0)
    retention.paused(U, [], ["unknown"], 1590.0)
    assert retention.due(1590.0, 0.5) == []
    assert retention.due(1590.0, 20.0) == [T, S]
    assert retention.due(1591.2, 0.5) == [T]
    assert retention.due(1597.0, 4.0) == [S]
    retention.resumed(S, [], 1598.0)
    retention.paused(T, [], [], 1598.0)
    assert retention.due(1598.0, 1e6) == []


def test_lengths_of_results_are_learned() -> None:
    retention = Retention(10)
    for tokens in (100, 9000, 120, 110):
        assert retention.expected_output("t", "search") in (None, 120)
        retention.observe_output("t", "search", tokens)
    assert retention.expected_output("t", "search") == 110


def test_sessions_are_reported() -> None:
    retention = taught(fast=1.0)
    retention.resumed(S, chain("abc"), 10.0)
    retention.paused(T, chain("abcd"), ["fast", "other"], 10.0)
    assert retention.sessions(10.25)[1:] == [
        SessionUse(tenant="t", session="s", branch="main", state="thinking", tokens=48),
        SessionUse(tenant="t", session="t", branch="main", state="waiting", tokens=64, tool="fast, other", due_s=0.75),
    ]


@pytest.mark.thorough
def test_sessions_and_their_ends_are_bounded() -> None:
    retention = taught(fast=1.0)
    for number in range(MAX_SESSIONS + 50):
        retention.paused(SessionKey("t", str(number), "main"), [], ["fast"], float(number))
    assert len(retention.sessions(0.0)) == MAX_SESSIONS
    assert len(retention.due(0.0, 1e9)) == MAX_SESSIONS
    for number in range(3 * MAX_ENDS):
        retention.resumed(S, chain([number]), 1e6)
    session = retention._sessions.get(S)
    assert session is not None
    assert len(session.ends) == MAX_ENDS
    retention.check_integrity()


KEYS = st.sampled_from([S, T, U])
CHAINS = st.lists(st.sampled_from("xy"), max_size=7).map(chain)
TOOLS = st.lists(st.sampled_from(["fast", "slow", "new"]), max_size=2)
TIMES = st.floats(0.0, 1000.0)
OFFERED = st.lists(st.builds(Candidate, st.none() | KEYS, TIMES, st.booleans()), min_size=1, max_size=6)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("resumed"), KEYS, CHAINS),
        st.tuples(st.just("paused"), KEYS, CHAINS, TOOLS),
        st.tuples(st.just("ended"), KEYS),
    ),
    max_size=40,
)


@pytest.mark.thorough
@settings(deadline=None, max_examples=50)
@given(CALLS, st.integers(0, 12), OFFERED)
def test_any_order_of_calls_leaves_a_valid_choice(
    calls: list[tuple[object, ...]], pages: int, candidates: list[Candidate]
) -> None:
    retention = Retention(pages)
    for now, (name, *arguments) in enumerate(calls):
        getattr(retention, str(name))(*arguments, float(now))
        retention.check_integrity()
        assert max(len(retention._learned), len(retention._lru)) <= pages
        keys = [key for key in (S, T, U) if key in retention.due(float(now), 1e6)]
        waiting = {(use.tenant, use.session) for use in retention.sessions(now) if use.state == "waiting"}
        assert {key[:2] for key in keys} <= waiting
    end = float(len(calls))
    index = retention.choose(candidates, end)
    scores = [math.inf if c.abandoned else retention.expected_use_s(c.session, c.last_used, end) for c in candidates]
    assert scores[index] == max(scores)
    assert index == scores.index(max(scores))


@pytest.mark.thorough
@settings(deadline=None, max_examples=50)
@given(candidates=OFFERED, now=TIMES)
def test_the_least_recently_used_policy_picks_the_first(
    deceived: Retention, candidates: list[Candidate], now: float
) -> None:
    assert deceived.policy == "lru"
    assert deceived.choose(candidates, now) == 0
