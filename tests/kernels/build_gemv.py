"""The sizes at which the kernels of packed products are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

from magnitude_kernels.gemv.reference import GROUP
from magnitude_kernels.gemv.triton import (
    AMD_STAGES,
    BLOCK_N,
    COMBINED,
    NUM_WARPS,
    STAGES,
    add_kernel,
    product_kernel,
    stretches,
)
from testkit.triton_runs import TARGETS, Build

NUMBERS = ("x_stride", "outputs", "groups")


def _product(kind: str, type_: str, inputs: int, outputs: int) -> Iterator[Build]:
    bits, minimum = (8, False) if kind == "Q8_0" else (4, kind == "Q4_1")
    shared = stretches(inputs // GROUP, outputs)
    types = {
        "x_ptr": f"*{type_}",
        "codes_ptr": "*i8" if bits == 8 else "*u8",
        "scale_ptr": "*fp16",
        "minimum_ptr": "*fp16" if minimum else "constexpr",
        "sums_ptr": f"*{type_}" if shared.number == 1 else "*fp32",
        "rows": "i32",
        **dict.fromkeys(NUMBERS, "i32"),
    }
    for target in TARGETS:
        amd = target[0] == "hip"
        constants: dict[str, int | bool | str | None] = {
            "GROUPS": shared.groups,
            "BITS": bits,
            "HAS_MINIMUM": minimum,
            "WIDE": False,
            "PRECISION": "ieee" if amd else "tf32x3",
            "BLOCK": BLOCK_N,
        }
        every = types | dict.fromkeys(constants, "constexpr")
        absent = {} if minimum else {"minimum_ptr": None}
        name = f"{kind}, {type_}, {inputs:,} x {outputs:,}"
        stages = AMD_STAGES if amd else STAGES
        yield Build(name, product_kernel, every, constants | absent, NUM_WARPS, stages, NUMBERS, (target,))


def _add(type_: str, number: int) -> Build:
    types = {"sums_ptr": "*fp32", "y_ptr": f"*{type_}", "size": "i32", "COUNT": "constexpr", "BLOCK": "constexpr"}
    return Build(f"add {number}, {type_}", add_kernel, types, {"COUNT": number, "BLOCK": COMBINED}, NUM_WARPS)


BUILDS = (
    *_product("Q4_1", "bf16", 4096, 4096),
    *_product("Q4_0", "fp16", 576, 1536),
    *_product("Q4_1", "fp32", 4096, 4096),
    *_product("Q8_0", "bf16", 4096, 128_256),
    *_product("Q8_0", "fp32", 4096, 4096),
    _add("bf16", stretches(4096 // GROUP, 4096).number),
)
