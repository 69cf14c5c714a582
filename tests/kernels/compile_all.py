"""Compiles every kernel ahead of time for every target and prints the table of `kernels/README.md`.

python tests/kernels/compile_all.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import triton

from magnitude_kernels.sample import triton as sample
from testkit.triton_runs import Build, compile_all, table


def _sample(vocab: int) -> Build:
    types = {
        "logits_ptr": "*fp32",
        "logits_stride": "i64",
        "temperature_ptr": "*fp32",
        "top_k_ptr": "*i32",
        "top_p_ptr": "*fp32",
        "min_p_ptr": "*fp32",
        "keys_ptr": "*i64",
        "mask_ptr": "*i32",
        "ids_ptr": "*i64",
        "finite_ptr": "*i8",
        "VOCAB": "constexpr",
        "HAS_MASK": "constexpr",
        "BLOCK": "constexpr",
    }
    constants = {"VOCAB": vocab, "HAS_MASK": True, "BLOCK": sample.block_size(vocab)}
    return Build(f"sample, vocabulary {vocab:,}", sample.sample_kernel, types, constants, sample.NUM_WARPS)


BUILDS = (_sample(49_152), _sample(128_256))

if __name__ == "__main__":
    print(f"triton {triton.__version__}")
    print(table(compile_all(BUILDS)))
