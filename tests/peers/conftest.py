"""One running product with the real model for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.model import smollm2_path
from testkit.serve import Server, lend_model, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`magnitude serve` with SmolLM2 and the embedded store; exact, so that two answers can be compared."""
    folder = tmp_path_factory.mktemp("peers")
    lend_model(folder / "data", smollm2_path())
    with serving(folder, "--profile", "reference") as running:
        yield running
