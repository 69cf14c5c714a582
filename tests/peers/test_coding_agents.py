"""Coding agents' own command lines, headless and unmodified, in front of an upstream that plays two tool calls.

Each is installed once, pinned, in an environment of its own, and skipped by name where that cannot be done. It runs in
a throw-away home, with telemetry off and no network but the proxy's port. It must carry both calls out, have a
sub-agent work where it can, finish, and stay one session.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from testkit.coding_agents import TASK, Stage, staged
from testkit.peers import LOOPS, Environment, node_environment, python_environment, python_of

# Installing takes its time, once.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "stub-model"
CODEX = """
model = "stub-model"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}"
wire_api = "responses"
env_key = "KEY"
[analytics]
enabled = false
"""
COUNT = "sh -c 'n=$(cat note.txt | wc -l); echo step-$((n - 1)); [ $n -ge 3 ]'"


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(tmp_path) as made:
        yield made


def npm_program(name: str, pin: str) -> Path:
    """Returns a program of an npm package; skips where it cannot be installed."""
    return node_environment(name, pin).folder / "node_modules" / ".bin" / name


async def test_codex_speaks_responses(stage: Stage) -> None:
    codex = npm_program("codex", "@openai/codex@0.171.0")
    stage.write(".codex/config.toml", CODEX.format(url=stage.proxy.url))
    options = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    await stage.check(await stage.run(codex, *options, TASK, KEY="any"), "codex", sub_agent=True)


async def test_claude_code_speaks_messages(stage: Stage) -> None:
    claude = npm_program("claude", "@anthropic-ai/claude-code@2.1.197")
    quiet = {
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        "CLAUDE_CODE_GATEWAY_HINT_HEADERS": "1",
    }
    options = ("-p", TASK, "--model", MODEL, "--allowedTools", "Bash")
    to = {"ANTHROPIC_BASE_URL": stage.proxy.origin, "ANTHROPIC_API_KEY": "any"}
    await stage.check(await stage.run(claude, *options, **to, **quiet), "claude-code", sub_agent=True)


async def test_opencode_names_itself_in_headers(stage: Stage) -> None:
    opencode = npm_program("opencode", "opencode-ai@1.18.33")
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": stage.proxy.url, "apiKey": "any"},
        "models": {MODEL: {}},
    }
    config = {"share": "disabled", "autoupdate": False, "permission": "allow", "provider": {"local": provider}}
    stage.write("work/opencode.json", json.dumps(config))
    quiet = {f"OPENCODE_DISABLE_{name}": "1" for name in ("MODELS_FETCH", "AUTOUPDATE", "SHARE", "DEFAULT_PLUGINS")}
    said = await stage.run(opencode, "run", "--model", f"local/{MODEL}", TASK, **quiet)
    await stage.check(said, "x-session-id", sub_agent=True)
    assert [identity.branch for identity in stage.seen if identity.aside] == ["auxiliary"]


async def test_qwen_code_names_nothing(stage: Stage) -> None:
    qwen = npm_program("qwen", "@qwen-code/qwen-code@0.15.10")
    quiet = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
    }
    stage.write(".qwen/settings.json", json.dumps(quiet))
    to = {"OPENAI_BASE_URL": stage.proxy.url, "OPENAI_API_KEY": "any", "OPENAI_MODEL": MODEL}
    await stage.check(await stage.run(qwen, "--auth-type", "openai", "-y", TASK, **to), "fingerprint")


@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
async def test_pi_names_itself_where_it_is_told_to(stage: Stage, named: bool) -> None:
    pi = npm_program("pi", "@mariozechner/pi-coding-agent@0.73.1")
    provider = {
        "baseUrl": stage.proxy.url,
        "api": "openai-completions",
        "apiKey": "any",
        "compat": {"sendSessionAffinityHeaders": named},
        "models": [{"id": MODEL}],
    }
    stage.write(".pi/agent/models.json", json.dumps({"providers": {"local": provider}}))
    said = await stage.run(pi, "--offline", "--provider", "local", "--model", MODEL, "-p", TASK, PI_TELEMETRY="0")
    await stage.check(said, "codex" if named else "fingerprint")


async def test_aider_edits_and_tests(stage: Stage) -> None:
    """Aider calls no tools: it edits, has the edit tested, and goes on with what the test said."""
    aider = python_environment("aider", "aider-chat==0.86.2").folder / "bin" / "aider"
    switched_off = (
        "git",
        "check-update",
        "show-model-warnings",
        "show-release-notes",
        "pretty",
        "detect-urls",
        "auto-lint",
    )
    options = (
        "--yes-always",
        "--analytics-disable",
        "--edit-format",
        "diff",
        *(f"--no-{name}" for name in switched_off),
    )
    tested = ("--auto-test", "--test-cmd", COUNT)
    to = {"OPENAI_API_BASE": stage.proxy.url, "OPENAI_API_KEY": "any", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    said = await stage.run(aider, "--model", f"openai/{MODEL}", *options, *tested, "--message", TASK, **to)
    await stage.check(said, "fingerprint")
    assert (stage.work / "note.txt").read_text() == "a line\n" * 3


async def test_mini_swe_agent_ends_by_a_command(stage: Stage, frameworks: Environment) -> None:
    """Its own agent and model class, over litellm, with the prompts that it ships."""
    stage.upstream.last = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo All done."
    script = LOOPS / "mini_swe.py"
    await stage.check(await stage.run(frameworks.interpreter, script, stage.proxy.url, MODEL, TASK), "fingerprint")


@pytest.mark.skipif("MAGNITUDE_TEST_OPENHANDS" not in os.environ, reason="MAGNITUDE_TEST_OPENHANDS is not set: minutes")
async def test_openhands_asks_for_whole_answers(stage: Stage) -> None:
    """Its packages take pip several minutes to install."""
    pins = ("openhands-sdk==1.58.2", "openhands-tools==1.58.2")
    python = python_environment("openhands", *pins, interpreter=python_of(12)).interpreter
    script = LOOPS / "openhands_agent.py"
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1", "OTEL_SDK_DISABLED": "true"}
    await stage.check(await stage.run(python, script, stage.proxy.url, MODEL, TASK, **quiet), "fingerprint")
