"""The kernels of `paged_attention` as `shared_prefix` launches them, compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from build_paged_attention import LLAMA, SMOLLM2, Form, Model, build, is_tight, reading

from magnitude_kernels.paged_attention.launch import group_rows
from magnitude_kernels.paged_attention.ragged import SHORT_ROWS
from magnitude_kernels.paged_attention.triton import ALL
from testkit.triton_runs import TARGETS, Build


def grouping(model: Model) -> Iterator[Build]:
    """Yields the builds that read prefixes."""
    for target in TARGETS:
        run = "short" if group_rows(is_tight(target)) <= SHORT_ROWS else "prefill"
        prefix = build(model, Form(run, ALL, shared=True), target)
        yield replace(prefix, name=prefix.name.replace(run, "prefix"))


BUILDS = tuple(
    each for model in (LLAMA, SMOLLM2) for each in (*grouping(model), *reading(model, Form("decode", shared=True)))
)
