"""Tiny models are fastest on one thread, and a shared machine stays usable."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if request.node.get_closest_marker("slow") else 1)
    yield
    torch.set_num_threads(before)
