"""The memory behind the cache's pages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from magnitude_engine.model.batch import KeyValueCache, ModelShape

pytestmark = pytest.mark.thorough

MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_cache_takes_the_memory_that_is_written_and_no_more() -> None:
    shape = ModelShape(layers=16, kv_heads=4, head_dim=64, hidden=256, vocab=16, context=4096)
    before = resident()
    cache = KeyValueCache.allocate(shape, 1024, 16, torch.bfloat16, torch.device("cpu"))
    assert cache.pages.nbytes == 256 * MIB
    cache.pages[:, 512] = 1
    assert resident() - before < 8 * MIB
    assert cache.pages.view(torch.int16).count_nonzero() == 16 * 2 * 16 * 4 * 64
