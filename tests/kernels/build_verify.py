"""The sizes at which the acceptance kernel is compiled ahead of time."""

from __future__ import annotations

from magnitude_kernels.tree_attention.reference import MOST_NODES
from magnitude_kernels.verify.triton import NUM_WARPS, block_size, verify_kernel
from testkit.triton_runs import Build

POINTERS = ("starts_ptr", "tokens_ptr", "parents_ptr", "drawn_ptr", "nodes_ptr", "counts_ptr", "following_ptr")


def _verify(nodes: int) -> Build:
    types = dict.fromkeys(POINTERS, "*i64") | {"most_nodes": "i32", "BLOCK": "constexpr"}
    return Build(f"trees of {nodes}", verify_kernel, types, {"BLOCK": block_size(nodes)}, NUM_WARPS)


BUILDS = (_verify(16), _verify(MOST_NODES))
