"""The kernels of `kv_copy` without a GPU: interpreted against their definition."""

from __future__ import annotations

import pytest

from testkit.triton_runs import run_interpreted


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_interpreted() -> None:
    run_interpreted("interpret_kv_copy.py")
