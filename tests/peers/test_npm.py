"""The npm packages `openai` and `ai` (with `@ai-sdk/openai-compatible`) against a running server.

The real small model answers; where it has to call a tool or must not, the program's `toolChoice` says so.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.peers import LOOPS, node_environment
from testkit.serve import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_openai_and_ai_packages(server: Server, tmp_path: Path) -> None:
    node = node_environment("npm", "openai@7.59.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7")
    known = server.sessions()
    report = node.run(LOOPS / "npm.mjs", tmp_path, server.base_url)
    loops = [session for id, session in server.sessions().items() if id not in known and session["steps"] == 3]
    assert len(loops) == report["loops"]
