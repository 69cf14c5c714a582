"""One running product with the real model for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testkit.model import smollm2_path
from testkit.serve import Server, serving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`magnitude serve` with SmolLM2 and the embedded store."""
    with serving(tmp_path_factory.mktemp("peers"), "--model", str(smollm2_path())) as running:
        yield running
