"""One running product with the real model for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.model import smollm2_path
from testkit.peers import Environment, python_environment
from testkit.serve import Server, lend_model, serving

FRAMEWORKS = (
    "openai==3.57.0",
    "langchain-openai==1.7.4",
    "langchain-tests==1.1.9",
    "openai-agents==0.24.0",
    "pydantic-ai-slim[openai]==2.68.0",
    "smolagents[openai]==1.26.0",
    "litellm==1.110.2",
    "mini-swe-agent==2.4.6",
)


@pytest.fixture(scope="session")
def frameworks() -> Environment:
    """Agent frameworks in Python whose pins allow one environment for all."""
    return python_environment("frameworks", *FRAMEWORKS)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`magnitude serve` with SmolLM2 and the embedded store; `packed`, where two answers are equal to the token."""
    folder = tmp_path_factory.mktemp("peers")
    lend_model(folder / "data", smollm2_path())
    with serving(folder) as running:
        yield running
