"""The acceptance kernel: one program follows the draft of one sequence, and nothing waits for the processor.

It computes what `verify.reference` defines, to the last number: tokens are compared, nothing is rounded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from magnitude_kernels.verify.reference import NO_NODE, Accepted, Trees, check_rows

NUM_WARPS = 1

_NO_NODE = tl.constexpr(NO_NODE)


def verify(trees: Trees, drawn: torch.Tensor) -> Accepted:
    """Returns how far `drawn` follows each tree, on a GPU; see `reference.verify`."""
    check_rows(trees, drawn)
    sequences = trees.starts.numel() - 1
    nodes = torch.empty((sequences, trees.most_nodes), dtype=torch.int64, device=drawn.device)
    counts, following = torch.empty((2, sequences), dtype=torch.int64, device=drawn.device)
    accepted = Accepted(nodes, counts, following)
    launch(trees, drawn, accepted)
    return accepted


def launch(trees: Trees, drawn: torch.Tensor, accepted: Accepted) -> None:
    """Runs the kernel into `accepted`; all tensors are contiguous."""
    sequences = trees.starts.numel() - 1
    if sequences:
        verify_kernel[(sequences,)](
            trees.starts,
            trees.tokens,
            trees.parents,
            drawn,
            *accepted,
            trees.most_nodes,
            BLOCK=block_size(trees.most_nodes),
            num_warps=NUM_WARPS,
        )


def block_size(most_nodes: int) -> int:
    """Returns how many nodes a program looks at."""
    return max(16, 1 << (most_nodes - 1).bit_length()) if most_nodes else 16


@triton.jit  # type: ignore[untyped-decorator]
def _child(tokens, parents, node, at, wanted, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the child of node `at` whose token is `wanted`, BLOCK where there is none."""
    right = (parents == at) & (node > at) & (tokens == wanted) & (wanted >= 0)
    return tl.min(tl.where(right, node, BLOCK), 0)


@triton.jit  # type: ignore[untyped-decorator]
def verify_kernel(  # type: ignore[no-untyped-def]
    starts_ptr,
    tokens_ptr,
    parents_ptr,
    drawn_ptr,
    nodes_ptr,
    counts_ptr,
    following_ptr,
    most_nodes,
    BLOCK: tl.constexpr,
):
    """Follows the draft of sequence `program_id(0)`, of at most `most_nodes` nodes."""
    sequence = tl.program_id(0).to(tl.int64)
    start = tl.load(starts_ptr + sequence)
    end = tl.load(starts_ptr + sequence + 1)
    node = tl.arange(0, BLOCK)
    row = start + 1 + node
    tokens = tl.load(tokens_ptr + row, mask=row < end, other=-1)
    parents = tl.load(parents_ptr + row, mask=row < end, other=BLOCK)
    path = tl.full((BLOCK,), _NO_NODE, tl.int64)
    count = tl.full((), 0, tl.int32)
    wanted = tl.load(drawn_ptr + start)
    child = _child(tokens, parents, node, _NO_NODE, wanted, BLOCK)
    while child < BLOCK:
        path = tl.where(node == count, child, path)
        count += 1
        wanted = tl.load(drawn_ptr + start + 1 + child)
        child = _child(tokens, parents, node, child, wanted, BLOCK)
    tl.store(nodes_ptr + sequence * most_nodes + node, path, mask=node < most_nodes)
    tl.store(counts_ptr + sequence, count.to(tl.int64))
    tl.store(following_ptr + sequence, wanted)
