"""The rounding kernels on a GPU: right on fresh inputs, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from magnitude_kernels import dispatch
from magnitude_kernels.kv_quantise import reference
from testkit.gpu import Case
from testkit.quantising import complaints, rows

# Rows of 128: the keys and values of 16, 128 and 1,024 pages of a Llama 3 8B.
NUMBERS = (16 * 16 * 8 * 64, 128 * 16 * 8 * 64, 1024 * 16 * 8 * 64)
COLUMNS = 128


def check(device: torch.device) -> list[str]:
    """Returns what the operation rounds wrongly, over awkward rows of every dtype."""
    wrong = []
    start = torch.seed() % 2**31
    for i, dtype in enumerate(reference.DTYPES):
        for columns in (1, 64, 80, 128, 2048):
            x = rows(333, columns, dtype, start + i).to(device)
            found = dispatch.quantise(x)
            back = dispatch.dequantise(found, dtype)
            where = f"(rows of {columns}, {dtype}, seed {start + i})"
            wrong += [f"{line} {where}" for line in complaints(x, found, back)]
            if not torch.equal(found.codes.cpu(), reference.quantise(x.cpu()).codes):
                wrong.append(f"codes are not the reference's {where}")
    return wrong


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the sizes to time; bfloat16 is read or written once, codes and scales as well."""
    for number in NUMBERS if device.type == "cuda" else (1024,):
        x = torch.randn(number, COLUMNS, dtype=torch.bfloat16, device=device)
        found = dispatch.quantise(x)
        moving = number * (3 * COLUMNS + 4)
        yield _quantise(x, moving)
        yield _dequantise(found, moving)


def _quantise(x: torch.Tensor, moving: int) -> Case:
    def plain(turn: int) -> torch.Tensor:
        scales = x.float().abs().amax(-1, keepdim=True) / 127
        return (x / scales).round_().to(torch.int8)

    return Case(f"quantise, {x.shape[0]:,} x {COLUMNS}", lambda turn: dispatch.quantise(x), plain, moving)


def _dequantise(found: reference.Quantised, moving: int) -> Case:
    return Case(
        f"dequantise, {found.codes.shape[0]:,} x {COLUMNS}",
        lambda turn: (dispatch.dequantise(found, torch.bfloat16),),
        lambda turn: (found.codes * found.scales[:, None]).bfloat16(),
        moving,
    )
