"""One torch thread for tiny models: their matrices are too small to share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from magnitude_engine.model.loader import LoadedModel
from testkit.tiny import tiny_model


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(one_thread: None) -> Iterator[LoadedModel]:
    model = tiny_model()
    yield model
    model.close()
