"""Rows to turn, write and normalise on awkward shapes, and judges of the results in double precision."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from magnitude_kernels.norm_rope_write.reference import NO_SLOT, HeadNorms, Places

CONTEXT = 300
PAGE_TOKENS = 16
EPSILON = 1e-5


class Shape(NamedTuple):
    """Sizes of a step."""

    rows: int
    heads: int
    kv_heads: int
    head_dim: int


# One row; SmolLM2's heads; a head that is no power of two; one key head for many query heads.
SHAPES = (Shape(1, 1, 1, 2), Shape(5, 9, 3, 64), Shape(3, 4, 4, 80), Shape(33, 12, 1, 128), Shape(0, 9, 3, 64))


class Turning(NamedTuple):
    """Inputs of `rope_write`; the cache holds marks."""

    qkv: torch.Tensor
    places: Places
    keys: torch.Tensor
    values: torch.Tensor
    norms: HeadNorms | None

    def on(self, device: torch.device) -> Turning:
        """Returns the same on another device."""
        p, n = self.places, self.norms
        places = Places(*(t.to(device) for t in (p.positions, p.slots, p.cosine, p.sine)))
        norms = None if n is None else HeadNorms(n.q.to(device), n.k.to(device), n.epsilon)
        # A slice of wider rows stays one.
        gap = self.qkv.stride(0) - self.qkv.shape[1]
        qkv = torch.nn.functional.pad(self.qkv, (0, gap)).to(device)[:, : self.qkv.shape[1]]
        return Turning(qkv, places, self.keys.to(device), self.values.to(device), norms)


def turning(shape: Shape, dtype: torch.dtype, normed: bool, seed: int) -> Turning:
    """Returns rows at any positions, some without a slot, and a cache that is NaN throughout."""
    draw = torch.Generator().manual_seed(seed)
    rows, heads, kv_heads, head_dim = shape
    wide = torch.randn(rows, (heads + 2 * kv_heads) * head_dim + 24, generator=draw) * 3
    angle = torch.rand(CONTEXT, head_dim // 2, generator=draw, dtype=torch.float64) * 6.3
    cosine, sine = angle.cos().float(), angle.sin().float()
    pages = rows // PAGE_TOKENS + 3
    slots = torch.randperm(pages * PAGE_TOKENS, generator=draw)[:rows]
    slots[2::3] = NO_SLOT
    places = Places(
        positions=torch.randint(0, CONTEXT, (rows,), generator=draw),
        slots=slots,
        cosine=torch.cat([cosine, cosine], -1),
        sine=torch.cat([-sine, sine], -1),
    )
    weights = 1 + 0.3 * torch.randn(2, head_dim, generator=draw)
    cache = torch.full((2, pages, PAGE_TOKENS, kv_heads, head_dim), math.nan, dtype=dtype)
    norms = HeadNorms(weights[0], weights[1], EPSILON) if normed else None
    # Rows with a gap between them, as a slice of a wider projection has.
    return Turning(wide.to(dtype)[:, :-24], places, cache[0], cache[1], norms)


def turned_wrongly(given: Turning, q: torch.Tensor, ulps: float = 0.5) -> list[str]:
    """Returns what is wrong with the queries and with the cache; stored numbers may be off by `ulps` of their type."""
    qkv, places, keys, values, norms = given.on(torch.device("cpu"))
    q = q.cpu()
    kv_heads, head_dim = keys.shape[2:]
    heads = q.shape[1]
    exact = qkv.double().reshape(q.shape[0], heads + 2 * kv_heads, head_dim)
    slack = 2.0**-21
    if norms is not None:
        slack = 2.0**-19
        weight = torch.cat([norms.q.expand(heads, -1), norms.k.expand(kv_heads, -1), torch.ones(kv_heads, head_dim)])
        size = (exact.square().mean(-1, keepdim=True) + norms.epsilon).sqrt()
        exact = torch.cat([exact[:, :-kv_heads] / size[:, :-kv_heads], exact[:, -kv_heads:]], 1) * weight.double()
    first, second = exact[:, :-kv_heads].chunk(2, -1)
    cosine, sine = (t[places.positions].double()[:, None] for t in (places.cosine, places.sine))
    swapped = torch.cat([second, first], -1)
    turned = exact[:, :-kv_heads] * cosine + swapped * sine
    allowed = ((exact[:, :-kv_heads] * cosine).abs() + (swapped * sine).abs()) * slack

    written = places.slots >= 0
    wrong = []
    if not near(q, turned[:, :heads], allowed[:, :heads], ulps):
        wrong.append("queries")
    wanted = (turned[:, heads:], allowed[:, heads:]), (exact[:, -kv_heads:], torch.zeros(()))
    for name, cache, (numbers, room) in zip(("keys", "values"), (keys, values), wanted, strict=True):
        tokens = cache.flatten(0, 1)
        others = torch.ones(tokens.shape[0], dtype=torch.bool)
        others[places.slots[written]] = False
        if not bool(tokens[others].isnan().all()):
            wrong.append(f"{name} that no row owns were written")
        if not near(tokens[places.slots[written]], numbers[written], room.expand_as(numbers)[written], ulps):
            wrong.append(name)
    return wrong


class Stream(NamedTuple):
    """Inputs of `add_norm`."""

    h: torch.Tensor
    x: torch.Tensor | None
    weight: torch.Tensor

    def on(self, device: torch.device) -> Stream:
        """Returns the same on another device."""
        return Stream(self.h.to(device), None if self.x is None else self.x.to(device), self.weight.to(device))


def stream(rows: int, columns: int, dtype: torch.dtype, added: bool, seed: int) -> Stream:
    """Returns rows of very different sizes, zeros among them."""
    draw = torch.Generator().manual_seed(seed)
    size = torch.tensor([1.0, 0.0, 1e-6, 1e4])[torch.arange(rows) % 4][:, None]
    h = torch.randn(rows, columns, generator=draw) * size
    x = (torch.randn(rows, columns, generator=draw) * size).to(dtype) if added else None
    return Stream(h, x, 1 + 0.3 * torch.randn(columns, generator=draw))


def normed_wrongly(before: Stream, h: torch.Tensor, y: torch.Tensor, ulps: float = 0.5) -> list[str]:
    """Returns what is wrong with the sum `h` and the normalised rows `y`."""
    wrong = []
    before = before.on(torch.device("cpu"))
    sums = before.h.double() + (0 if before.x is None else before.x.double())
    # One addition in float32 has one right answer.
    if not torch.equal(h.cpu(), sums.float()):
        wrong.append("sums")
    exact = sums.float().double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + EPSILON).sqrt() * before.weight.double()
    if not near(y.cpu(), exact, exact.abs() * 2.0**-19, ulps):
        wrong.append("norms")
    return wrong


def near(found: torch.Tensor, exact: torch.Tensor, room: torch.Tensor, ulps: float) -> bool:
    """Whether all numbers are within `room` and a rounding to their type of the exact ones; NaN is not."""
    limits = torch.finfo(found.dtype)
    rounding = (exact.abs() + room).clamp(min=limits.smallest_normal) * limits.eps * ulps
    return bool(((found.double() - exact).abs() <= room + rounding).all())
