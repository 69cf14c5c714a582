"""The kernels of `paged_attention` as `tree_attention` launches them, compiled ahead of time."""

from __future__ import annotations

from build_paged_attention import LLAMA, SMOLLM2, Form, combining, reading

from magnitude_kernels.paged_attention.triton import TREE

BUILDS = (
    *reading(LLAMA, Form("short", TREE)),
    *reading(SMOLLM2, Form("short", TREE)),
    combining(LLAMA, TREE),
)
