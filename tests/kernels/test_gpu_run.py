"""What runs on a GPU, run here as far as it goes without one."""

from __future__ import annotations

import importlib
import sys
from itertools import islice

import pytest
import torch

from magnitude_kernels import dispatch
from testkit.triton_runs import KERNEL_TESTS, run


@pytest.mark.slow
def test_every_operation_is_right_and_can_be_timed() -> None:
    device = torch.device("cpu")
    for name in dispatch.OPERATIONS:
        operation = importlib.import_module(f"gpu.{name}")
        assert operation.check(device) == []
        for case in islice(operation.cases(device), 4):
            assert case.least_bytes > 0
            assert isinstance(case.torch(0), torch.Tensor)
            assert isinstance(case.kernel(1), tuple | torch.Tensor)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: python tests/gpu/run.py")
def test_without_a_gpu_nothing_is_measured() -> None:
    assert run([sys.executable, str(KERNEL_TESTS.parent / "gpu" / "run.py")]) == "no GPU: not measured\n"
