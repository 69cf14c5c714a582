"""Attention over a shared prefix on a GPU: right on fresh inputs, and how fast against reading it for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from gpu.paged_attention import INPUTS, LLAMA, MODELS, Size, alike, contiguous, sdpa
from magnitude_kernels import dispatch
from magnitude_kernels.paged_attention.triton import TOLERANCE
from testkit.attention import PAGE, Given, complaints, given, on, share
from testkit.gpu import Case

PREFIX = 768


class Fan(NamedTuple):
    """Sequences of one row each, with `prefix` tokens of their contexts in common."""

    sequences: int
    prefix: int
    context: int


FANS = (
    Fan(2, 256, 320),
    Fan(4, 256, 512),
    Fan(4, 512, 640),
    Fan(8, 512, 640),
    Fan(4, 4096, 4352),
    Fan(16, 4096, 4352),
    Fan(16, 32_768, 33_024),
)


def check(device: torch.device) -> list[str]:
    """Returns what the operation gets wrong, over models and types; the last sequence shares nothing."""
    wrong = []
    start = torch.seed() % 2**31
    lengths = [(1, PREFIX + 1), (9, PREFIX + 300), (1, PREFIX + 17), (20, PREFIX + 64), (1, PREFIX + 5)]
    for i, heads in enumerate(MODELS if device.type == "cuda" else MODELS[:1]):
        for dtype, tolerance in TOLERANCE.items():
            step = on(device, given(lengths, heads, dtype, start + i, prefix=PREFIX))
            shared = share(step, PREFIX, [0, 1, 2, 3])
            out = dispatch.shared_prefix(step.queries, step.cache, step.ragged, shared, step.scale)
            found = complaints(step, out, tolerance)
            wrong += [f"{line} ({heads}, {dtype}, seed {start + i})" for line in found]
    return wrong


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the sizes to time; the prefix must be read once, the rest of each context once."""
    for fan in FANS:
        steps = [common(fan, device) for _ in range(INPUTS)]
        plain = [contiguous(step) for step in steps]
        shared = share(steps[0], fan.prefix, range(fan.sequences))
        read = fan.prefix + fan.sequences * (fan.context - fan.prefix)
        yield Case(
            name=f"{fan.sequences} rows of {fan.context:,}, {fan.prefix:,} shared, 32/8 x 128, bf16",
            kernel=lambda i, steps=steps, shared=shared: dispatch.shared_prefix(
                steps[i % INPUTS].queries, steps[i % INPUTS].cache, steps[i % INPUTS].ragged, shared, LLAMA.size**-0.5
            ),
            torch=lambda i, plain=plain: sdpa(plain[i % INPUTS]),
            least_bytes=(read * LLAMA.kv_heads + fan.sequences * LLAMA.heads) * LLAMA.size * 4,
            least_flops=fan.sequences * fan.context * LLAMA.heads * LLAMA.size * 4,
        )


def common(fan: Fan, device: torch.device) -> Given:
    """Returns a step in bf16 whose sequences have the first pages of the first."""
    step = alike(Size(fan.sequences, 1, fan.context), LLAMA, device)
    table = step.ragged.table.clone()
    table[:, : fan.prefix // PAGE] = table[0, : fan.prefix // PAGE]
    return step._replace(ragged=replace(step.ragged, table=table))
