"""Requests find the session that they go on with by what was said, and no two sessions are taken for one."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from magnitude_engine import api
from magnitude_proxy.identity import FINGERPRINT, Identity, IdentityHints, identify
from magnitude_proxy.lineage import Lineage

TASK = ("system", "You are an agent."), ("user", "Fix it.")


class Agent:
    """One run of an agent, which sends its whole history with every call."""

    def __init__(self, lineage: Lineage, *messages: tuple[str, str], tenant: str = "t") -> None:
        self.lineage = lineage
        self.messages = list(messages or TASK)
        self.tenant = tenant

    def call(self, session: str = "") -> Identity:
        """Sends a request, under an id of the client where it has one."""
        made = tuple(api.Message(role=role, content=text) for role, text in self.messages)  # type: ignore[arg-type]
        hints = IdentityHints(messages=made)
        headers = {"x-session-id": session} if session else {}
        return self.lineage.place(identify(self.tenant, headers, hints), hints)

    def step(self, answer: str, session: str = "") -> Identity:
        """Sends a request and takes the answer and what a tool said of it into its history."""
        found = self.call(session)
        self.messages += [("assistant", answer), ("tool", f"result of {answer}")]
        return found

    def forked(self) -> Agent:
        """Returns a second agent with the same history."""
        return Agent(self.lineage, *self.messages, tenant=self.tenant)


def test_runs_of_one_task_are_sessions_of_their_own() -> None:
    lineage = Lineage()
    one, two = Agent(lineage), Agent(lineage)
    first = [agent.step(f"{name}0").session for name, agent in (("a", one), ("b", two))]
    # Both said the very same: only what comes next tells them apart.
    assert first[0] == first[1]
    later = [[agent.step(f"{name}{n}").session for name, agent in (("a", one), ("b", two))] for n in range(1, 6)]
    assert len({pair[0] for pair in later}) == len({pair[1] for pair in later}) == 1
    assert later[0][0] != later[0][1]
    third = Agent(lineage)
    assert {third.step(f"c{n}").session for n in range(3)}.isdisjoint(later[0])


def test_a_retry_is_the_same_step_and_a_fork_a_session_of_its_own() -> None:
    agent = Agent(Lineage())
    started = agent.step("a")
    assert agent.call() == agent.call() == started
    other = agent.forked()
    assert agent.step("b").session == started.session
    other.messages[-1] = ("tool", "another result")
    forked = other.step("c").session
    assert forked != started.session
    assert (agent.step("d").session, other.step("e").session) == (started.session, forked)
    # An agent that adds a word after a failure still goes on with its session.
    agent.call()
    agent.messages.append(("user", "Try again."))
    assert agent.step("f").session == started.session


def test_instructions_that_tell_the_time_do_not_make_a_new_session() -> None:
    agent, found = Agent(Lineage()), set()
    for minute in range(5):
        agent.messages[0] = ("system", f"You are an agent. It is 10:0{minute}.")
        found.add(agent.step(f"a{minute}").session)
    assert len(found) == 1


def test_a_rewritten_history_belongs_to_the_last_run_of_its_beginning() -> None:
    lineage = Lineage()
    old, agent = Agent(lineage), Agent(lineage)
    old.step("x")
    old.step("y")
    found = {agent.step(f"a{n}").session for n in range(6)}
    assert len(found) == 1
    agent.messages[3:9] = [("tool", "(old results were cut)"), ("assistant", "a1 to a3, in short"), ("tool", "ok")]
    assert {agent.step(f"b{n}").session for n in range(3)} == found
    # Observations that are cut one step later, every time.
    for n in range(3):
        agent.messages = [(role, "(cut)" if role == "tool" else text) for role, text in agent.messages[:-1]]
        agent.messages.append(("tool", f"shown {n}"))
        found.add(agent.step(f"c{n}").session)
    assert len(found) == 1


def test_one_that_comes_back_to_another_process_has_its_fingerprints_session() -> None:
    agent = Agent(Lineage())
    before = agent.step("a")
    agent.lineage = Lineage()
    assert {agent.step("b").session, agent.step("c").session} == {before.session}
    assert before.source == FINGERPRINT


def test_an_id_that_is_new_at_every_call_is_one_session_from_the_third_on() -> None:
    lineage, ids = Lineage(), count()
    agents = [Agent(lineage), Agent(lineage)]
    found = []
    for k in range(6):
        # A request that is sent again, as SDKs do after a failure, is no second use of its id.
        again = [agent.call(f"id-{2 * k + n}") for n, agent in enumerate(agents)]
        found.append([agent.step(f"{n}{k}", f"id-{next(ids)}") for n, agent in enumerate(agents)])
        assert again == found[-1]
    for n in range(2):
        first, second, *later = [pair[n] for pair in found]
        assert first.advice is second.advice is None
        assert len({each.session for each in later}) == 1
        assert all("unstable-session-id" in (each.advice or "") for each in later)
        assert {each.run for each in later} == {later[0].session}
    assert found[-1][0].session != found[-1][1].session
    assert "6 session ids" in (found[-1][0].advice or "")
    own = identify("t", {"x-session-id": "id-8"}, IdentityHints()).session
    assert lineage.counted(own) == found[-1][0].session


def test_forks_with_ids_of_their_own_are_never_merged() -> None:
    agent = Agent(Lineage())
    root = agent.step("a", "root")
    agent.step("b", "root")
    fork = agent.forked()
    grandchild = agent.forked()
    found = [fork.step("c", "fork").session, grandchild.step("d", "other").session]
    found += [fork.step("e", "fork").session, grandchild.step("f", "other").session]
    assert found[0] == found[2] != found[1] == found[3]
    assert root.session not in found
    # A chain of three that were used once looks like the mistake, until one of them is used again.
    chain = Agent(agent.lineage, ("user", "chain"))
    one, two, three = (chain.step(name, name) for name in ("one", "two", "three"))
    assert three.session == one.session != two.session
    again = chain.call("three")
    assert (again.session, again.advice) == (again.run, None)
    assert again.session not in {one.session, two.session}


def test_sub_agents_of_sub_agents_belong_to_the_first_agent() -> None:
    lineage = Lineage()

    def at(session: str, parent: str = "") -> Identity:
        headers = {"x-session-affinity": session} | ({"x-parent-session-id": parent} if parent else {})
        return lineage.place(identify("t", headers, IdentityHints()), IdentityHints())

    root = at("root")
    child, grandchild = at("child", "root"), at("grandchild", "child")
    assert {child.session, grandchild.session, at("child").session, at("great", "grandchild").session} == {root.session}
    assert [each.branch for each in (root, child, at("child"), grandchild)] == ["main", "child", "child", "grandchild"]
    assert child.own is not None
    assert lineage.counted(child.own) == root.session
    assert [at("a", "b").session, at("b", "a").session] == [at("b").session] * 2


@pytest.mark.thorough
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(["", "rotating"]))
def test_runs_that_are_told_apart_never_meet(seed: int, header: str) -> None:
    """Agents of two tenants with few tasks and words, in any order: tenants never share, nor do different histories."""
    rng, lineage, ids = random.Random(seed), Lineage(), count()
    agents = [Agent(lineage, *TASK[:1], ("user", f"task {n % 3}"), tenant=f"t{n % 2}") for n in range(8)]
    seen: dict[str, set[int]] = {}
    for _ in range(60):
        n = rng.randrange(len(agents))
        found = agents[n].step(f"agent {n} says {rng.random()}", f"{header}{next(ids)}" if header else "")
        if len(agents[n].messages) > 8:
            seen.setdefault(found.session, set()).add(n)
    assert all(len(users) == 1 for users in seen.values())


def test_what_is_remembered_is_bounded() -> None:
    lineage = Lineage(limit=20)
    for n in range(100):
        Agent(lineage, ("user", f"task {n}")).step("a")
        Agent(lineage, ("user", f"task {n}")).step("a", f"id {n}")
        hints = IdentityHints()
        lineage.place(identify("t", {"x-session-id": f"{n}", "x-parent-session-id": "p"}, hints), hints)
    sizes = [len(getattr(lineage, name)) for name in ("_turns", "_lines", "_starts", "_children")]
    assert sizes == [20, 10, 10, 10]
    same = Agent(lineage, ("user", "one and the same"))
    for n in range(50):
        same.forked().call(f"other {n}")
    assert max(map(len, lineage._turns.values())) <= 8


@pytest.mark.parametrize("messages", [(), (("system", "only instructions"),)])
def test_a_request_without_words_is_the_fingerprints(messages: tuple[tuple[str, str], ...]) -> None:
    agent = Agent(Lineage())
    agent.messages = list(messages)
    assert agent.call() == agent.call()
    assert agent.call("id").session == agent.call("id").session
