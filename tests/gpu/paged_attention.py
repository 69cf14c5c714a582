"""Paged attention on a GPU: right on fresh inputs, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from magnitude_kernels import dispatch
from magnitude_kernels.paged_attention.ragged import Cache, lay_out
from magnitude_kernels.paged_attention.triton import TOLERANCE
from testkit.attention import PAGE, Given, Heads, complaints, given, on
from testkit.gpu import Case

AWKWARD = [(1, 1), (1, 15), (1, 16), (1, 17), (1, 255), (1, 257), (1, 4097), (3, 17), (9, 300), (64, 500), (70, 300)]
MODELS = (Heads(9, 3, 64), Heads(32, 8, 128), Heads(8, 1, 80), Heads(8, 1, 256))
LLAMA = Heads(32, 8, 128)
INPUTS = 4


class Size(NamedTuple):
    """A step of `sequences` alike, each of `rows` rows that end a context."""

    sequences: int
    rows: int
    context: int


# The first are small enough to be tried without a GPU.
SIZES = (
    Size(1, 1, 512),
    Size(1, 16, 256),
    Size(8, 1, 256),
    Size(1, 128, 256),
    Size(1, 1, 4096),
    Size(1, 1, 32_768),
    Size(8, 1, 4096),
    Size(64, 1, 4096),
    Size(8, 16, 4096),
    Size(1, 128, 16_384),
    Size(1, 512, 4096),
    Size(1, 2048, 2048),
    Size(1, 2048, 16_384),
    Size(4, 2048, 2048),
)


def check(device: torch.device) -> list[str]:
    """Returns what the operation gets wrong, over awkward lengths, models and types."""
    wrong = []
    start = torch.seed() % 2**31
    for i, heads in enumerate(MODELS if device.type == "cuda" else MODELS[:1]):
        for dtype, tolerance in TOLERANCE.items():
            step = on(device, given(AWKWARD, heads, dtype, start + i))
            found = complaints(step, dispatch.paged_attention(*step), tolerance)
            wrong += [f"{line} ({heads}, {dtype}, seed {start + i})" for line in found]
    return wrong


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the sizes to time: each key and value must be read once, and each that a row sees be multiplied."""
    for size in SIZES:
        steps = [alike(size, LLAMA, device) for _ in range(INPUTS)]
        plain = [contiguous(step) for step in steps]
        cache = size.sequences * size.context * LLAMA.kv_heads * LLAMA.size * 2 * 2
        seen = size.sequences * size.rows * (size.context - (size.rows - 1) / 2)
        yield Case(
            name=f"{size.sequences} x {size.rows:,} rows of {size.context:,}, 32/8 x 128, bf16",
            kernel=lambda i, steps=steps: dispatch.paged_attention(*steps[i % INPUTS]),
            torch=lambda i, plain=plain: sdpa(plain[i % INPUTS]),
            least_bytes=cache + 2 * size.sequences * size.rows * LLAMA.heads * LLAMA.size * 2,
            least_flops=int(seen * LLAMA.heads * LLAMA.size * 4),
        )


def alike(size: Size, heads: Heads, device: torch.device) -> Given:
    """Returns a step of `size` in bf16 whose pages lie in random order."""
    pages = -(-size.context // PAGE)
    order = torch.randperm(size.sequences * pages).view(size.sequences, pages)
    shape = (size.sequences * pages, PAGE, heads.kv_heads, heads.size)
    cache = Cache(*(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)))
    queries = torch.randn(size.sequences * size.rows, heads.heads, heads.size, device=device, dtype=torch.bfloat16)
    every = [size.sequences * [length] for length in (size.rows, size.context)]
    return Given(queries, cache, lay_out(*every, order.tolist(), device), heads.size**-0.5)


class Contiguous(NamedTuple):
    """The same step as torch's own attention wants it; gathering is not timed."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    causal: bool


def contiguous(step: Given) -> Contiguous:
    """Returns queries, keys and values as [sequences, heads, tokens, head_dim]."""
    sequences = step.ragged.counts.numel()
    context = int(step.ragged.contexts[0])
    rows = step.queries.shape[0] // sequences
    queries = step.queries.unflatten(0, (sequences, rows)).transpose(1, 2).contiguous()
    table = step.ragged.table.long()
    keys, values = (
        tensor[table].flatten(1, 2)[:, :context].transpose(1, 2).contiguous()
        for tensor in (step.cache.keys, step.cache.values)
    )
    if rows == 1 or rows == context:
        return Contiguous(queries, keys, values, None, rows > 1)
    own = torch.arange(context - rows, context, device=queries.device)
    mask = torch.arange(context, device=queries.device) <= own[:, None]
    return Contiguous(queries, keys, values, mask, causal=False)


def sdpa(given: Contiguous) -> torch.Tensor:
    """Attends with torch's own operation."""
    return functional.scaled_dot_product_attention(
        given.queries, given.keys, given.values, attn_mask=given.mask, is_causal=given.causal, enable_gqa=True
    )
