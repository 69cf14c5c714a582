"""Attention of draft trees on a GPU: right on fresh inputs, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gpu.paged_attention import INPUTS, LLAMA, MODELS, Contiguous, Size, alike, contiguous, sdpa
from magnitude_kernels import dispatch
from magnitude_kernels.paged_attention.triton import TOLERANCE
from testkit.attention import complaints, given, on, random_trees
from testkit.gpu import Case

AWKWARD = [(1, 1), (5, 5), (1, 17), (7, 15), (16, 300), (63, 70), (64, 90), (3, 5000)]
SIZES = (
    Size(1, 8, 256),
    Size(1, 16, 256),
    Size(2, 16, 256),
    Size(1, 64, 256),
    Size(1, 16, 4096),
    Size(1, 64, 4096),
    Size(8, 16, 4096),
    Size(1, 16, 32_768),
)


def check(device: torch.device) -> list[str]:
    """Returns what the operation gets wrong, over random trees, models and types."""
    wrong = []
    start = torch.seed() % 2**31
    for i, heads in enumerate(MODELS if device.type == "cuda" else MODELS[:1]):
        for dtype, tolerance in TOLERANCE.items():
            step = on(device, given(AWKWARD, heads, dtype, start + i))
            parents, bits = random_trees([count for count, _ in AWKWARD], start + i)
            out = dispatch.tree_attention(step.queries, step.cache, step.ragged, bits.to(device), step.scale)
            found = complaints(step, out, tolerance, parents)
            wrong += [f"{line} ({heads}, {dtype}, seed {start + i})" for line in found]
    return wrong


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the sizes to time; each key and value must be read once."""
    for size in SIZES:
        steps = [alike(size, LLAMA, device) for _ in range(INPUTS)]
        ancestors = random_trees(size.sequences * [size.rows], seed=size.rows)[1].to(device)
        plain = [masked(contiguous(step), ancestors, size) for step in steps]
        yield Case(
            name=f"{size.sequences} trees of {size.rows} after {size.context - size.rows:,}, 32/8 x 128, bf16",
            kernel=lambda i, steps=steps, ancestors=ancestors: dispatch.tree_attention(
                steps[i % INPUTS].queries,
                steps[i % INPUTS].cache,
                steps[i % INPUTS].ragged,
                ancestors,
                LLAMA.size**-0.5,
            ),
            torch=lambda i, plain=plain: sdpa(plain[i % INPUTS]),
            least_bytes=size.sequences * (size.context * LLAMA.kv_heads + size.rows * LLAMA.heads) * LLAMA.size * 4,
            least_flops=size.sequences * size.rows * (size.context - size.rows) * LLAMA.heads * LLAMA.size * 4,
        )


def masked(plain: Contiguous, ancestors: torch.Tensor, size: Size) -> Contiguous:
    """Returns the step with the trees as a mask [sequences, 1, rows, context]."""
    nodes = torch.arange(size.rows, device=ancestors.device)
    seen = (ancestors.view(size.sequences, size.rows, 1) >> nodes & 1).bool() | (nodes == nodes[:, None])
    before = torch.ones(size.sequences, size.rows, size.context - size.rows, dtype=torch.bool, device=seen.device)
    return plain._replace(mask=torch.cat([before, seen], 2)[:, None], causal=False)
