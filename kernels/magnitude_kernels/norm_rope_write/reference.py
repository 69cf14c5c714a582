"""What lies between two matrix products, in plain torch: the definition of two operations, and their path on CPU.

`rope_write` takes the stacked result of the q, k and v projections:

    qkv row      |-- q: heads --|-- k: kv_heads --|-- v: kv_heads --|       each head_dim wide
    q, k         normalised per head where the model has such norms, then turned to their positions
    k, v         written to their slots of the cache; a slot of NO_SLOT or any other negative one writes nothing
    q            returned

    norm    x / sqrt(mean(x**2) + epsilon) * weight
    turn    x * cosine[position] + swap(x) * sine[position]      swap exchanges the halves of head_dim

`add_norm` is the residual stream's step: h += x, and y = h / sqrt(mean(h**2) + epsilon) * weight.

All arithmetic is float32 and rounded once, to the type that is stored. Rows do not depend on each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NO_SLOT = -1
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Places:
    """Where the rows of a step stand, and the model's rotary tables.

    Attributes:
        positions: int64 [rows], below the tables' context.
        slots: int64 [rows], page * page tokens + offset, each at most once; negative for rows that only fill up.
        cosine, sine: float32 [context, head_dim], contiguous; the first half of the sines is negated.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of single heads, where a model has them (Qwen 3, Gemma 3); weights are float32 [head_dim]."""

    q: torch.Tensor
    k: torch.Tensor
    epsilon: float


def rope_write(
    qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor, norms: HeadNorms | None = None
) -> torch.Tensor:
    """Writes keys and values into a layer's cache; returns the queries.

    Args:
        qkv: [rows, (heads + 2 * kv_heads) * head_dim], no gaps within a row.
        keys, values: [pages, page tokens, kv_heads, head_dim], contiguous.

    Returns:
        The turned queries in the cache's dtype, [rows, heads, head_dim].
    """
    heads = query_heads(qkv, places, keys, values)
    kv_heads, head_dim = keys.shape[2:]
    split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
    q, k, v = torch.split(split.float(), [heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = norm(q, norms.q, norms.epsilon), norm(k, norms.k, norms.epsilon)
    written = places.slots >= 0
    slots = places.slots[written]
    keys.flatten(0, 1)[slots] = _turn(k, places)[written].to(keys.dtype)
    values.flatten(0, 1)[slots] = v[written].to(values.dtype)
    return _turn(q, places).to(keys.dtype)


def add_norm(
    h: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> torch.Tensor:
    """Adds `x` to the residual stream and normalises it.

    Args:
        h: float32 [rows, hidden], changed in place.
        x: [rows, hidden] of any float type, or None to add nothing.
        weight: float32 [hidden].

    Returns:
        The normalised rows in `dtype`, [rows, hidden].
    """
    check_stream(h, x, weight, dtype)
    if x is not None:
        h += x
    return norm(h, weight, epsilon).to(dtype)


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Returns the rows of float32 `x` over their root mean square, times `weight`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight


def _turn(x: torch.Tensor, places: Places) -> torch.Tensor:
    """Returns float32 [rows, heads, head_dim] turned to the rows' positions."""
    cosine, sine = places.cosine[places.positions][:, None], places.sine[places.positions][:, None]
    return x * cosine + x.roll(x.shape[-1] // 2, -1) * sine


def query_heads(qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor) -> int:
    """Returns the number of query heads; raises ValueError where the tensors do not fit together."""
    kv_heads, head_dim = keys.shape[2:]
    width = qkv.shape[1]
    if (
        keys.shape != values.shape
        or keys.dtype != values.dtype
        or not (keys.is_contiguous() and values.is_contiguous())
    ):
        raise ValueError(f"keys and values must be alike and contiguous: {tuple(keys.shape)}, {tuple(values.shape)}")
    if head_dim % 2 or width % head_dim or width // head_dim <= 2 * kv_heads or qkv.stride(1) != 1:
        raise ValueError(
            f"qkv of width {width} does not hold query heads beside {kv_heads} key and value heads of {head_dim}"
        )
    if not places.positions.shape == places.slots.shape == qkv.shape[:1]:
        raise ValueError(f"{qkv.shape[0]} rows need as many positions and slots, not {tuple(places.slots.shape)}")
    if places.cosine.shape[1:] != (head_dim,) or places.cosine.shape != places.sine.shape:
        raise ValueError(f"rotary tables for heads of {head_dim} are needed, not {tuple(places.cosine.shape)}")
    return width // head_dim - 2 * kv_heads


def check_stream(h: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError where the tensors of `add_norm` do not fit together."""
    fits = (x is None or x.shape == h.shape) and weight.shape == h.shape[1:]
    if not fits or h.dtype != torch.float32 or weight.dtype != torch.float32 or dtype not in DTYPES:
        raise ValueError(
            f"add_norm needs float32 rows and weight of one width, not {h.dtype} {tuple(h.shape)} and {weight.dtype} "
            f"{tuple(weight.shape)}, to {dtype}"
        )
    if not h.is_contiguous() or not (x is None or x.is_contiguous()):
        raise ValueError("add_norm needs contiguous rows: pass x.contiguous()")
