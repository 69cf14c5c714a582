"""Checks and times every kernel on this machine's GPU, and prints one table.

    python tests/gpu/run.py

Each operation of `magnitude_kernels.dispatch.OPERATIONS` has a file `tests/gpu/NAME.py` with two functions:

    check(device) -> list[str]          what is wrong against the float64 definition, on fresh inputs
    cases(device) -> Iterator[Case]     what to time, and what must be moved and computed at least

Nothing is timed of an operation that is wrong. The floor is the longer of those bytes at the bandwidth of a large copy
and those operations at the speed of a large product. Without a GPU nothing is measured and the exit status is 0.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from magnitude_kernels import dispatch
from testkit.gpu import microseconds, rates


def measure(device: torch.device) -> bool:
    """Prints the table; True when every operation is right."""
    rate = rates(device)
    reached = f"{rate.bytes / 1e6:.2f} TB/s copying, {rate.flops / 1e6:.0f} TFLOP/s multiplying bf16"
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, {reached}\n")
    print("| operation | case | kernel, µs | floor, µs | torch, µs |\n|---|---|---|---|---|")
    right = True
    for name in dispatch.OPERATIONS:
        operation = importlib.import_module(f"gpu.{name}")
        wrong = operation.check(device)
        right = right and not wrong
        for line in wrong:
            print(f"| {name} | WRONG: {line} | - | - | - |")
        for case in operation.cases(device) if not wrong else ():
            ours, theirs = microseconds(case.kernel), microseconds(case.torch)
            print(f"| {name} | {case.name} | {ours:.1f} | {rate.floor(case):.1f} | {theirs:.1f} |")
    return right


def main() -> int:
    """Returns the exit status."""
    if not torch.cuda.is_available():
        print("no GPU: not measured")
        return 0
    return 0 if measure(torch.device("cuda")) else 1


if __name__ == "__main__":
    sys.exit(main())
