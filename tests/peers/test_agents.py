"""Agent frameworks in Python, each as a program of its own (see `loops`) with at least two tool calls per run.

Against the real small model, which is too small to choose: the programs say by `tool_choice` what a step must be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.peers import LOOPS, Environment, python_environment
from testkit.serve import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Its pins and openai's of today exclude each other.
INSTRUCTOR = ("instructor==1.17.0", "openai==3.3.0")

# What this small model does not do of its own accord: name the keys that it was asked for, call a tool when it may.
BEYOND_THE_MODEL = {"test_json_mode", "test_agent_loop[model0]", "test_agent_loop[model1]"}


def looped(server: Server, environment: Environment, script: str, home: Path) -> list[dict[str, Any]]:
    """Runs a program and returns its loops as the server saw them: the sessions of three steps or more."""
    known = server.sessions()
    report = environment.run(LOOPS / script, home, server.base_url)
    found = [session for id, session in server.sessions().items() if id not in known and session["steps"] >= 3]
    assert len(found) == report["loops"]
    return found


@pytest.mark.parametrize("script", ["openai_agents.py", "pydantic_agent.py", "smol_agent.py", "litellm_sdk.py"])
def test_each_loop_is_one_session(server: Server, frameworks: Environment, tmp_path: Path, script: str) -> None:
    """Nothing of it names a session, and none of its three steps computes what the step before did."""
    for session in looped(server, frameworks, script, tmp_path):
        assert (session["steps"], session["failures"], session["source"]) == (3, 0, "fingerprint")
        assert session["usage"]["cached_tokens"] > session["usage"]["prompt_tokens"] / 2


def test_instructor_names_its_sessions(server: Server, tmp_path: Path) -> None:
    """Each of its types is a tool, or a form, of its own: there is nothing to recognise a session by but its name."""
    environment = python_environment("instructor", *INSTRUCTOR)
    for session in looped(server, environment, "instructor_types.py", tmp_path):
        assert (session["failures"], session["source"]) == (0, "magnitude")


def test_langchains_integration_suite(server: Server, frameworks: Environment, tmp_path: Path) -> None:
    """langchain-tests on langchain-openai."""
    ended = frameworks.run(LOOPS / "langchain_standard.py", tmp_path, server.base_url)
    assert set(ended["failed"]) <= BEYOND_THE_MODEL
    assert len(ended["passed"]) >= 36
