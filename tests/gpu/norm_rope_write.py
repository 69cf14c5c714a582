"""The kernels of `norm_rope_write` on a GPU: right on fresh inputs, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from magnitude_kernels import dispatch
from magnitude_kernels.norm_rope_write.reference import DTYPES, Places
from testkit.gpu import Case
from testkit.norming import EPSILON, PAGE_TOKENS, SHAPES, normed_wrongly, stream, turned_wrongly, turning

ROWS = (1, 32, 2048)
CONTEXT = 8192


class Model(NamedTuple):
    """Sizes of a layer."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int


MODELS = (
    Model("SmolLM2", 9, 3, 64, 576),
    Model("Llama 3 8B", 32, 8, 128, 4096),
    Model("Llama 3 70B", 64, 8, 128, 8192),
)


def check(device: torch.device) -> list[str]:
    """Returns what the operations compute wrongly, over awkward shapes of every dtype."""
    wrong = []
    start = torch.seed() % 2**31
    for i, dtype in enumerate(DTYPES):
        for shape in SHAPES:
            for normed in (False, True):
                given = turning(shape, dtype, normed, start + i).on(device)
                lines = turned_wrongly(given, dispatch.rope_write(*given))
                wrong += [f"{line}: {shape}, {dtype}, seed {start + i}" for line in lines]
        for columns in (1, 80, 576, 5000, 16_384):
            rows = stream(7, columns, dtype, True, start + i).on(device)
            h = rows.h.clone()
            lines = normed_wrongly(rows, h, dispatch.add_norm(h, rows.x, rows.weight, EPSILON, dtype))
            wrong += [f"{line}: 7 x {columns}, {dtype}, seed {start + i}" for line in lines]
    return wrong


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the sizes to time, in bfloat16; each number is read once and written once."""
    for model in MODELS:
        for rows in ROWS:
            yield _turn(model, rows, device)
            yield _norm(model, rows, device)


def _turn(model: Model, rows: int, device: torch.device) -> Case:
    _, heads, kv_heads, head_dim, _ = model
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=device).bfloat16()
    pages = rows // PAGE_TOKENS + 1
    keys, values = torch.zeros((2, pages, PAGE_TOKENS, kv_heads, head_dim), dtype=torch.bfloat16, device=device)
    places = Places(
        positions=torch.randint(0, CONTEXT, (rows,), device=device),
        slots=torch.randperm(pages * PAGE_TOKENS, device=device)[:rows],
        cosine=torch.randn(CONTEXT, head_dim, device=device),
        sine=torch.randn(CONTEXT, head_dim, device=device),
    )

    def plain(turn: int) -> torch.Tensor:
        split = qkv.view(rows, -1, head_dim)
        x = split[:, : heads + kv_heads].float()
        cosine, sine = places.cosine[places.positions][:, None], places.sine[places.positions][:, None]
        turned = (x * cosine + x.roll(head_dim // 2, -1) * sine).bfloat16()
        keys.flatten(0, 1).index_copy_(0, places.slots, turned[:, heads:])
        values.flatten(0, 1).index_copy_(0, places.slots, split[:, heads + kv_heads :])
        return turned[:, :heads]

    return Case(
        f"rope_write, {model.name}, {rows} rows",
        lambda turn: (dispatch.rope_write(qkv, places, keys, values),),
        plain,
        # Read and written in bfloat16; the tables' rows and two integers are read.
        rows * (4 * qkv.shape[1] + 8 * head_dim + 16),
    )


def _norm(model: Model, rows: int, device: torch.device) -> Case:
    h = torch.randn(rows, model.hidden, device=device)
    x = torch.randn(rows, model.hidden, device=device).bfloat16()
    weight = torch.ones(model.hidden, device=device)

    def plain(turn: int) -> torch.Tensor:
        h.add_(x)
        return functional.rms_norm(h, (model.hidden,), weight, EPSILON).bfloat16()

    return Case(
        f"add_norm, {model.name}, {rows} rows",
        lambda turn: (dispatch.add_norm(h, x, weight, EPSILON, torch.bfloat16),),
        plain,
        # h twice in float32, x and y in bfloat16; the weight.
        rows * model.hidden * 12 + 4 * model.hidden,
    )
