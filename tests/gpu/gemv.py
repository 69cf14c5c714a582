"""The kernels of packed products on a GPU: right on fresh inputs, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.nn import functional

from magnitude_kernels import dispatch
from magnitude_kernels.gemv.reference import DTYPES, GROUP, Packed, pack
from magnitude_kernels.gemv.triton import TOLERANCE
from testkit.gpu import Case
from testkit.packing import KINDS, complaints, product

# Llama 3 8B: attention's output, and the feed-forward's way back.
SIZES = ((4096, 4096), (14336, 4096))
ROWS = (1, 4, 16)
# So many weights that together they exceed the cache.
INPUTS = 8


def check(device: torch.device) -> list[str]:
    """Returns what the operation multiplies wrongly, over every kind of weight and type."""
    wrong = []
    start = torch.seed() % 2**31
    for kind in KINDS:
        for i, dtype in enumerate(DTYPES):
            for size in ((1, 32, 1), (3, 96, 70), (16, 608, 129), (5, 2048, 960)):
                given = product(kind, size, dtype, start + i)
                packed, x = _on(device, given.packed), given.x.to(device)
                found = complaints(given, dispatch.gemv(x, packed), TOLERANCE, torch.finfo(dtype).eps / 2)
                wrong += [f"{line} ({kind}, {size}, {dtype}, seed {start + i})" for line in found]
    return wrong


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the sizes to time; each weight must be read once."""
    for inputs, outputs in SIZES if device.type == "cuda" else ((256, 128),):
        for bits in (4, 8):
            weights = [_random(bits, inputs, outputs, device) for _ in range(INPUTS)]
            dense = [weight.dense().bfloat16() for weight in weights]
            for rows in ROWS:
                yield _case(f"{bits} bits, {rows} x {inputs:,} x {outputs:,}", weights, dense, rows)


def _case(name: str, weights: list[Packed], dense: list[torch.Tensor], rows: int) -> Case:
    x = torch.randn(rows, weights[0].inputs, dtype=torch.bfloat16, device=dense[0].device)
    read = [weights[0].codes, weights[0].scale, weights[0].minimum, x]
    moved = sum(tensor.numel() * tensor.itemsize for tensor in read if tensor is not None)
    return Case(
        name,
        kernel=lambda turn: dispatch.gemv(x, weights[turn % INPUTS]),
        torch=lambda turn: functional.linear(x, dense[turn % INPUTS]),
        least_bytes=moved + rows * weights[0].outputs * x.itemsize,
    )


def _random(bits: int, inputs: int, outputs: int, device: torch.device) -> Packed:
    """Returns a weight as Q4_1 or Q8_0 has it."""
    end = 1 << (bits - 1)
    codes = torch.randint(-end, end, (outputs, inputs), dtype=torch.int8, device=device)
    scale = torch.rand(outputs, inputs // GROUP, device=device) / end
    return pack(codes, scale, -scale if bits == 4 else torch.zeros_like(scale), bits)


def _on(device: torch.device, weight: Packed) -> Packed:
    minimum = None if weight.minimum is None else weight.minimum.to(device)
    return replace(weight, codes=weight.codes.to(device), scale=weight.scale.to(device), minimum=minimum)
