"""langchain-tests' integration suite for chat models, run on langchain-openai.

usage: python langchain_standard.py BASE_URL   prints how many passed, and the names of those that did not
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestMagnitude(ChatModelIntegrationTests):
    """What the suite is told of the model; images, audio and PDFs are not for it."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        """The class under test."""
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        """How it is made: so that so small a model does not repeat itself to the end, and the same each time."""
        return {
            "model": "smollm2",
            "base_url": os.environ["PEER_URL"],
            "api_key": "any",
            "temperature": 0.5,
            "seed": 7,
            "frequency_penalty": 1.0,
            "max_tokens": 192,
            "max_retries": 0,
            "timeout": 60,
            "stream_usage": True,
        }

    @property
    def supports_image_inputs(self) -> bool:
        """Not read by a text model."""
        return False

    @property
    def supports_json_mode(self) -> bool:
        """`response_format` `json_object`."""
        return True


class Kept:
    """Keeps how each test ended."""

    def __init__(self) -> None:
        self.ended: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test's call, or the setup that kept it from being called."""
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.ended[report.outcome].append(report.nodeid.rpartition("::")[2])


if __name__ == "__main__":
    os.environ["PEER_URL"] = sys.argv[1]
    kept = Kept()
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "asyncio_mode=auto",
        "-o",
        "asyncio_default_test_loop_scope=session",
        "-o",
        "asyncio_default_fixture_loop_scope=session",
        "--benchmark-disable",
        "-c",
        os.devnull,
        "--noconftest",
    ]
    pytest.main([*options, *sys.argv[2:], __file__], plugins=[kept])
    print(json.dumps(kept.ended))
