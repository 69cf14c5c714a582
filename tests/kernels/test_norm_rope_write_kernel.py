"""The kernels of `norm_rope_write` without a GPU: interpreted against their definition."""

from __future__ import annotations

import pytest

from testkit.triton_runs import run_interpreted


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_interpreted() -> None:
    run_interpreted("interpret_norm_rope_write.py")
