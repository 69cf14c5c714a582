"""The sizes at which the attention kernels are compiled ahead of time; other operations launch them too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from magnitude_kernels.paged_attention.launch import block_dim, sizes
from magnitude_kernels.paged_attention.ragged import SHORT_ROWS
from magnitude_kernels.paged_attention.triton import ALL, CAUSAL, TREE, attend_kernel, combine_kernel
from testkit.triton_runs import TARGETS, Build, Target

PAGE = 16
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
ROWS = {"decode": 1, "short": SHORT_ROWS, "prefill": SHORT_ROWS + 1}
NUMBERS = ("query_stride", "query_head_stride", "page_stride", "token_stride", "key_head_stride")


class Model(NamedTuple):
    """What a model asks of the kernels."""

    dtype: torch.dtype
    head_dim: int
    group: int


class Form(NamedTuple):
    """What a launch reads: for which kind of run, and what its rows see; `shared` where groups read prefixes."""

    run: str
    view: int = CAUSAL
    shared: bool = False


def is_tight(target: Target) -> bool:
    """True where `launch.is_tight` is."""
    return target[0] == "hip" or target[1] == 80


def reading(model: Model, *forms: Form) -> Iterator[Build]:
    """Yields the builds of the reading kernel, each in the sizes of its target."""
    for form in forms:
        for target in TARGETS:
            yield build(model, form, target)


def build(model: Model, form: Form, target: Target) -> Build:
    """Returns the build of the reading kernel for one target."""
    amd = target[0] == "hip"
    wide = model.dtype == torch.float32
    size = sizes(model.head_dim, wide, ROWS[form.run], model.group, is_tight(target))
    constants = {
        "GROUP": model.group,
        "HEAD_DIM": model.head_dim,
        "PAGE": PAGE,
        "VIEW": form.view,
        "WIDE": False,
        "PRECISION": "ieee" if amd else "tf32x3",
        "BLOCK_M": size.rows,
        "BLOCK_N": size.keys,
        "BLOCK_D": block_dim(model.head_dim),
    }
    types = _types(model, form)
    absent = {name: None for name, kind in types.items() if kind == "constexpr"}
    types |= dict.fromkeys(constants, "constexpr")
    name = f"{form.run}, {TYPES[model.dtype]}, head {model.head_dim}, group {model.group}"
    return Build(name, attend_kernel, types, absent | constants, size.warps, size.stages, NUMBERS, (target,))


def _types(model: Model, form: Form) -> dict[str, str]:
    """Returns the types of all arguments that are no constants; "constexpr" for what is left out."""
    data, absent = f"*{TYPES[model.dtype]}", "constexpr"
    split = form.shared or form.run != "prefill"
    types = dict.fromkeys(("queries_ptr", "keys_ptr", "values_ptr"), data)
    types |= dict.fromkeys(("starts_ptr", "counts_ptr", "contexts_ptr"), "*i32")
    types |= {
        "shared_ptr": "*i32" if form.shared else absent,
        "leaders_ptr": "*i32" if form.view == ALL else absent,
        "table_ptr": "*i32",
        "ancestors_ptr": "*i64" if form.view == TREE else absent,
        "target_ptr": "*fp32" if split else data,
        "marks_ptr": "*fp32" if split else absent,
        "scale": "fp32",
    }
    return types | dict.fromkeys(("limit", "tiles", *NUMBERS, "table_stride"), "i32")


def combining(model: Model, view: int = CAUSAL) -> Build:
    """Returns the build of the combining kernel."""
    types = dict.fromkeys(("values_ptr", "marks_ptr"), "*fp32") | {"out_ptr": f"*{TYPES[model.dtype]}"}
    types |= dict.fromkeys(("starts_ptr", "counts_ptr", "contexts_ptr"), "*i32")
    types |= dict.fromkeys(("splits", "most_rows"), "i32")
    constants = {"HEAD_DIM": model.head_dim, "VIEW": view, "BLOCK_D": block_dim(model.head_dim)}
    name = f"combine, {TYPES[model.dtype]}, head {model.head_dim}"
    return Build(name, combine_kernel, types | dict.fromkeys(constants, "constexpr"), constants, 4)


LLAMA = Model(torch.bfloat16, 128, 4)
SMOLLM2 = Model(torch.float16, 64, 3)
ALL_RUNS = tuple(Form(run) for run in ROWS)

BUILDS = (
    *reading(LLAMA, *ALL_RUNS),
    *reading(SMOLLM2, *ALL_RUNS),
    *reading(SMOLLM2._replace(dtype=torch.float32), *ALL_RUNS),
    *reading(LLAMA._replace(dtype=torch.float32), Form("decode")),
    combining(LLAMA),
)
