"""The examples are run as they stand, against the real small model, and must end well and silently."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testkit.model import smollm2_path
from testkit.serve import Server, lend_model, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("examples")
    lend_model(folder / "data", smollm2_path())
    with serving(folder) as running:
        yield running


def said(example: str, *expected: str, **environment: str) -> str:
    """Runs an example and returns what it printed; it must end with 0 and say no more than `expected` on stderr."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(Path(__file__).with_name(example))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    told = [line for line in ended.stderr.splitlines() if not line.startswith(expected)]
    assert (ended.returncode, told) == (0, []), ended.stderr
    return ended.stdout


def test_one_step(server: Server) -> None:
    printed = said("one_step.py", "the server ", MAGNITUDE_ENDPOINT=server.base_url)
    assert printed.startswith("smollm2 is ok;")
    assert "note: " in printed
    assert re.search(r"^(stop|length) local \d+$", printed, re.MULTILINE)
    assert "Observation:" not in printed


def test_agent_runner(server: Server) -> None:
    """It stops at its end mark, or at its limit of ten, and has one session for all iterations."""
    printed = said("agent_runner.py", MAGNITUDE_ENDPOINT=server.base_url)
    found = re.search(r"iterations: (\d+), steps of the session: (\d+)", printed)
    assert found is not None
    iterations, steps = map(int, found.groups())
    assert 1 <= iterations <= 10
    assert steps == iterations
    assert "answer: None" not in printed or iterations == 10


def test_feedback(server: Server) -> None:
    printed = said("feedback.py", MAGNITUDE_ENDPOINT=server.base_url)
    assert printed.splitlines() == ["acknowledged", "steps credited: 1"]


def test_in_process(tmp_path: Path) -> None:
    data = tmp_path / "data"
    lend_model(data, smollm2_path())
    printed = said("in_process.py", MAGNITUDE_DATA_DIR=str(data), MAGNITUDE_MODEL=str(smollm2_path()))
    assert re.search(r'^call: look_up \{"place": ?".{0,16}"\}$', printed, re.MULTILINE)
    cached = re.search(r"^cached tokens: (\d+)$", printed, re.MULTILINE)
    assert cached is not None
    assert int(cached.group(1)) > 0
