"""Both listeners of the running product, fuzzed from their OpenAPI documents: no 5xx, no answer but those described."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from testkit.openapi import Document
from testkit.serve import Server, serving
from testkit.tiny import tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KEY = "sk-fuzz"
SEED = 20261201
EXAMPLES = 4
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
    "rejects_what_is_wrong",
    "describes_its_headers",
    "wire_shape",
)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("schemathesis is not installed")
    folder = tmp_path_factory.mktemp("fuzzed")
    keys = folder / "keys"
    keys.write_text(f"{KEY} fuzzers\n")
    model = str(tiny_folder(folder / "tiny"))
    access = ("--key-file", str(keys), "--max-refused-per-minute", "0", "--store-timeout-s", "5")
    settings = ("--model", model, "--profile", "reference", "--threads", "1", *access)
    with serving(folder, *settings, wait=False) as running:
        headers = {"authorization": f"Bearer {KEY}"}
        deadline = time.monotonic() + 60
        with httpx.Client(transport=httpx.HTTPTransport(retries=5), headers=headers) as client:
            while client.get(f"{running.origin}/health/ready").status_code != 200:
                assert time.monotonic() < deadline, running.log.read_text()
                time.sleep(0.1)
        yield running


@pytest.mark.parametrize("listener", ["public", "admin"])
def test_a_fuzz_run_finds_nothing(server: Server, listener: str, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{server.port if listener == 'public' else server.admin_port}/openapi.json"
    command = (sys.executable, "-m", "schemathesis.cli", "run", url, "--no-color", "--generation-database", "none")
    limits = ("--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES), "--seed", str(SEED))
    checks = ("--checks", ",".join(CHECKS), "--header", f"Authorization: Bearer {KEY}", "--request-timeout", "60")
    environment = {**os.environ, "SCHEMATHESIS_HOOKS": "testkit.fuzzing", "PYTHONPATH": str(ROOT / "tests")}
    ended = subprocess.run(
        (*command, *limits, *checks), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    told = "\n".join(line[:500] for line in (ended.stdout + ended.stderr).splitlines())
    assert ended.returncode == 0, told[-20_000:]
    described = Document(httpx.get(url, headers={"authorization": f"Bearer {KEY}"}).json()).operations
    # The document's own route is left out.
    assert f"Tested: {len(described) - 1}" in told, told
    assert server.process.poll() is None
    assert "Traceback" not in server.log.read_text()
