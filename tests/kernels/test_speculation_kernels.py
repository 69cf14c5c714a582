"""The kernels behind a draft without a GPU: interpreted against their definitions."""

from __future__ import annotations

import pytest

from testkit.triton_runs import run_interpreted


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("operation", ["verify", "compact", "gemv"])
def test_interpreted(operation: str) -> None:
    run_interpreted(f"interpret_{operation}.py")
