"""The npm packages `openai` and `ai` against a running server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from testkit.serve import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PACKAGES = ("openai@7.59.0", "ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", "zod@4")


@pytest.fixture(scope="module")
def node_folder() -> Path:
    """A folder with the packages installed; kept between runs in the user's cache."""
    if not shutil.which("node") or not shutil.which("npm"):
        pytest.skip("node and npm are not installed")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "magnitude-tests" / "npm-1"
    done = cache / "installed"
    if not done.exists():
        cache.mkdir(parents=True, exist_ok=True)
        (cache / "package.json").write_text('{"name": "magnitude-peers", "private": true}')
        install = subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", *PACKAGES],
            cwd=cache, capture_output=True, text=True, timeout=500, check=False,
        )  # fmt: skip
        if install.returncode != 0:
            pytest.skip(f"npm packages cannot be installed: {install.stderr[-300:]}")
        done.touch()
    return cache


def test_openai_and_ai_packages(server: Server, node_folder: Path) -> None:
    script = Path(__file__).with_name("clients.mjs")
    run = subprocess.run(
        ["node", str(script), server.base_url],
        cwd=node_folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert json.loads(run.stdout.splitlines()[-1])["ok"] is True
