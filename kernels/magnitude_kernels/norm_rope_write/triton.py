"""The kernels between two matrix products: rotary with the cache write, and residual with the norm.

They compute what `norm_rope_write.reference` defines, with sums and fused multiplications in an order of their own.
Against the definition in float64 the float32 result, before it is rounded to what is stored, is off by at most

    rope_write  keys, queries   2**-21 * (|x cosine| + |swap(x) sine|), after a head norm 2**-19 times that
                values          nothing: they are only rounded
    add_norm    h               nothing
                y               2**-19 * |y|

A row's result does not depend on its neighbours: a program reads nothing but its row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from magnitude_kernels.norm_rope_write.reference import HeadNorms, Places, check_stream, query_heads

# Heads of a row that one program turns: enough programs for a single row, enough work for each.
HEAD_BLOCK = 8
NUM_WARPS = 4
# A row is held in registers: wider ones take more warps, up to what a block may have.
WIDTH_PER_WARP = 1024
MOST_WARPS = 16
MOST_COLUMNS = 16_384


def rope_write(
    qkv: torch.Tensor, places: Places, keys: torch.Tensor, values: torch.Tensor, norms: HeadNorms | None = None
) -> torch.Tensor:
    """Writes keys and values into a layer's cache on a GPU; returns the queries. See `norm_rope_write.reference`."""
    heads = query_heads(qkv, places, keys, values)
    q = torch.empty((qkv.shape[0], heads, keys.shape[3]), dtype=keys.dtype, device=qkv.device)
    launch_rope_write(qkv, places, keys, values, norms, q)
    return q


def launch_rope_write(
    qkv: torch.Tensor,
    places: Places,
    keys: torch.Tensor,
    values: torch.Tensor,
    norms: HeadNorms | None,
    q: torch.Tensor,
) -> None:
    """Runs the kernel into `q` (contiguous [rows, heads, head_dim]) and the cache."""
    rows, heads, head_dim = q.shape
    kv_heads = keys.shape[2]
    if rows:
        rope_write_kernel[(rows, triton.cdiv(heads + 2 * kv_heads, HEAD_BLOCK))](
            qkv,
            qkv.stride(0),
            places.positions,
            places.slots,
            places.cosine,
            places.sine,
            None if norms is None else norms.q,
            None if norms is None else norms.k,
            0.0 if norms is None else norms.epsilon,
            q,
            keys,
            values,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=head_dim // 2,
            HAS_NORMS=norms is not None,
            HEAD_BLOCK=HEAD_BLOCK,
            PADDED=half_block(head_dim),
            num_warps=NUM_WARPS,
        )


def add_norm(
    h: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, epsilon: float, dtype: torch.dtype
) -> torch.Tensor:
    """Adds `x` to the rows `h` on a GPU and returns them normalised. See `norm_rope_write.reference`."""
    check_stream(h, x, weight, dtype)
    y = torch.empty(h.shape, dtype=dtype, device=h.device)
    launch_add_norm(h, x, weight, epsilon, y)
    return y


def launch_add_norm(
    h: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, epsilon: float, y: torch.Tensor
) -> None:
    """Runs the kernel into `y` (contiguous [rows, hidden]) and `h`."""
    rows, columns = h.shape
    padded, warps = row_block(columns)
    if rows:
        add_norm_kernel[(rows,)](
            h, x, weight, epsilon, y, COLUMNS=columns, HAS_X=x is not None, PADDED=padded, num_warps=warps
        )


def half_block(head_dim: int) -> int:
    """Returns half a head, rounded up to a power of two."""
    return max(16, 1 << (head_dim // 2 - 1).bit_length())


def row_block(columns: int) -> tuple[int, int]:
    """Returns the columns rounded up to a power of two, and the number of warps; raises ValueError past the limit."""
    if columns > MOST_COLUMNS:
        raise ValueError(f"add_norm holds rows of at most {MOST_COLUMNS} numbers, not {columns}")
    padded = max(16, 1 << (columns - 1).bit_length())
    return padded, min(MOST_WARPS, max(NUM_WARPS, padded // WIDTH_PER_WARP))


@triton.jit  # type: ignore[untyped-decorator]
def _normed(x1, x2, weight1, weight2, epsilon, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns both halves of heads [HEAD_BLOCK, PADDED] over their root mean square, times their weights."""
    mean = tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF)
    factor = tl.rsqrt(mean + epsilon)[:, None]
    return x1 * factor * weight1, x2 * factor * weight2


@triton.jit
def _head_weights(q_ptr, k_ptr, is_q, column, inside):  # type: ignore[no-untyped-def]
    """Returns the weights of a block of heads, those of q or of k."""
    q = tl.load(q_ptr + column, mask=inside, other=0.0)[None, :]
    k = tl.load(k_ptr + column, mask=inside, other=0.0)[None, :]
    return tl.where(is_q[:, None], q, k)


@triton.jit  # type: ignore[untyped-decorator]
def _store_halves(base_ptr, at, x1, x2, mask, HALF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores both halves of heads in the type of the target."""
    kind = base_ptr.dtype.element_ty
    tl.store(base_ptr + at, x1.to(kind), mask=mask)
    tl.store(base_ptr + at + HALF, x2.to(kind), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def rope_write_kernel(  # type: ignore[no-untyped-def]
    qkv_ptr,
    qkv_stride,
    positions_ptr,
    slots_ptr,
    cosine_ptr,
    sine_ptr,
    q_norm_ptr,
    k_norm_ptr,
    epsilon,
    q_ptr,
    keys_ptr,
    values_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Turns and stores HEAD_BLOCK heads of row `program_id(0)`, from head `program_id(1) * HEAD_BLOCK` on."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    column = tl.arange(0, PADDED)
    inside = column < HALF
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS
    present = (head < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    at = head[:, None] * (2 * HALF) + column[None, :]
    x1 = tl.load(qkv_ptr + row * qkv_stride + at, mask=present, other=0.0).to(tl.float32)
    x2 = tl.load(qkv_ptr + row * qkv_stride + at + HALF, mask=present, other=0.0).to(tl.float32)

    n1, n2 = x1, x2
    if HAS_NORMS:
        weight1 = _head_weights(q_norm_ptr, k_norm_ptr, is_q, column, inside)
        weight2 = _head_weights(q_norm_ptr + HALF, k_norm_ptr + HALF, is_q, column, inside)
        n1, n2 = _normed(x1, x2, weight1, weight2, epsilon, HALF)
    table = tl.load(positions_ptr + row) * (2 * HALF) + column
    cosine1 = tl.load(cosine_ptr + table, mask=inside, other=0.0)[None, :]
    cosine2 = tl.load(cosine_ptr + table + HALF, mask=inside, other=0.0)[None, :]
    sine1 = tl.load(sine_ptr + table, mask=inside, other=0.0)[None, :]
    sine2 = tl.load(sine_ptr + table + HALF, mask=inside, other=0.0)[None, :]
    turned1 = n1 * cosine1 + n2 * sine1
    turned2 = n2 * cosine2 + n1 * sine2

    _store_halves(q_ptr + row * (HEADS * 2 * HALF), at, turned1, turned2, present & is_q[:, None], HALF)
    slot = tl.load(slots_ptr + row)
    # Heads from here on are not written: all of them where the row has no slot.
    kept = tl.where(slot < 0, 0, HEADS + 2 * KV_HEADS)
    written = present & (head < kept)[:, None]
    place = slot * (KV_HEADS * 2 * HALF) - HEADS * 2 * HALF
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    _store_halves(keys_ptr + place, at, turned1, turned2, written & is_k[:, None], HALF)
    _store_halves(values_ptr + place - KV_HEADS * 2 * HALF, at, x1, x2, written & is_v[:, None], HALF)


@triton.jit  # type: ignore[untyped-decorator]
def add_norm_kernel(  # type: ignore[no-untyped-def]
    h_ptr,
    x_ptr,
    weight_ptr,
    epsilon,
    y_ptr,
    COLUMNS: tl.constexpr,
    HAS_X: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Adds and normalises row `program_id(0)` of [rows, COLUMNS]."""
    row = tl.program_id(0).to(tl.int64) * COLUMNS
    column = tl.arange(0, PADDED)
    inside = column < COLUMNS
    h = tl.load(h_ptr + row + column, mask=inside, other=0.0)
    if HAS_X:
        h += tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(h_ptr + row + column, h, mask=inside)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    factor = tl.rsqrt(tl.sum(h * h, 0) / COLUMNS + epsilon)
    tl.store(y_ptr + row + column, (h * factor * weight).to(y_ptr.dtype.element_ty), mask=inside)
