"""The sampling kernel: mask, temperature, top-k, top-p, min-p and keyed noise in one launch, one program per row.

It computes what `sample.reference` defines. A program reads its row in blocks and keeps nothing but scalars, so
any vocabulary fits:

    1. extremes of the row, and whether every logit is finite
    2. top_k: bisection for the smallest float f with #{l > f} < top_k
    3. top_p: bisection for the smallest f, at least that of 2, with sum{w: l > f} < top_p * sum{w: l >= f_2}
    4. argmax of w / e over l >= f and w >= min_p, the lowest id among equals

Bisection runs over the integers that order float32 values (at most 32 rounds) and compares floats, so that
nothing is sorted and ties fall together. Steps 2 and 3 are skipped for rows that do not ask for them.

Against the reference in float64: noise integers, masks and top-k are equal; the mass of top-p and the scores
w / e are within 1e-5 (relative), so another token is drawn only where two scores, or a mass and its limit, are
closer than that. The order of summation is fixed: a row's token does not depend on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from magnitude_kernels.sample.reference import (
    LARGEST_TEMPERATURE,
    LEAST_TEMPERATURE,
    NO_TOKEN,
    Sampled,
    SampleParams,
    check_mask,
)

MAX_BLOCK = 4096
NUM_WARPS = 8

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)
_LARGEST_FRACTION = tl.constexpr(1 - 2.0**-24)
_LEAST_TEMPERATURE = tl.constexpr(LEAST_TEMPERATURE)
_LARGEST_TEMPERATURE = tl.constexpr(LARGEST_TEMPERATURE)
_INFINITY = tl.constexpr(float("inf"))


def sample(logits: torch.Tensor, params: SampleParams) -> Sampled:
    """Draws a token for each row of `logits` (float32 [rows, vocab], on a GPU)."""
    rows = logits.shape[0]
    # What the kernel did not write would read as a row that is not finite.
    ids = torch.full((rows,), NO_TOKEN, dtype=torch.int64, device=logits.device)
    finite = torch.zeros(rows, dtype=torch.int8, device=logits.device)
    launch(logits, params, ids, finite)
    return Sampled(ids, finite.to(torch.bool))


def launch(logits: torch.Tensor, params: SampleParams, ids: torch.Tensor, finite: torch.Tensor) -> None:
    """Runs the kernel into `ids` (int64 [rows]) and `finite` (int8 [rows])."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(
            f"sample needs float32 rows without gaps, not {logits.dtype} with a step of {logits.stride(1)}: "
            "pass logits.float().contiguous()"
        )
    check_mask(logits, params.mask)
    vocab = logits.shape[1]
    sample_kernel[(logits.shape[0],)](
        logits,
        logits.stride(0),
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.keys,
        params.mask,
        ids,
        finite,
        VOCAB=vocab,
        HAS_MASK=params.mask is not None,
        BLOCK=block_size(vocab),
        num_warps=NUM_WARPS,
    )


def block_size(vocab: int) -> int:
    """Returns how many logits a program reads at once."""
    return min(MAX_BLOCK, max(16, 1 << (vocab - 1).bit_length()))


@triton.jit  # type: ignore[untyped-decorator]
def _load(logits_ptr, mask_ptr, start, VOCAB: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns one block of logits, -inf where the mask forbids the token or the vocabulary has ended."""
    tokens = start + tl.arange(0, BLOCK)
    inside = tokens < VOCAB
    logits = tl.load(logits_ptr + tokens, mask=inside, other=-_INFINITY)
    if HAS_MASK:
        words = tl.load(mask_ptr + tokens // 32, mask=inside, other=0)
        logits = tl.where(((words >> (tokens % 32)) & 1) != 0, logits, -_INFINITY)
    return logits


@triton.jit
def _order(value):  # type: ignore[no-untyped-def]
    """Returns the integer (int64) that has the rank of a float32."""
    pattern = value.to(tl.int32, bitcast=True)
    return (pattern ^ ((pattern >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _value(order):  # type: ignore[no-untyped-def]
    """Returns the float32 whose rank is `order`."""
    pattern = order.to(tl.int32)
    return (pattern ^ ((pattern >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _exponential(key, tokens):  # type: ignore[no-untyped-def]
    """Returns Exp(1) noise of `tokens`; see `sample.noise`."""
    word = (tokens.to(tl.uint64) + 1) * _GOLDEN + key
    word = (word ^ (word >> 30)) * _MIX_1
    word = (word ^ (word >> 27)) * _MIX_2
    v = ((word >> 33).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    v = tl.minimum(v, _LARGEST_FRACTION)
    # The series keeps small variates exact: 1 - v would round them off, and hardware logarithms near 1 as well.
    series = v * (1 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return tl.where(v < 0.0625, series, -tl.log(1 - v))


@triton.jit  # type: ignore[untyped-decorator]
def _extremes(logits_ptr, mask_ptr, VOCAB: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the largest and the smallest allowed logit, and whether all raw logits are finite and one is allowed."""
    most = tl.full((), -_INFINITY, tl.float32)
    least = tl.full((), _INFINITY, tl.float32)
    broken = tl.full((), 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        raw = tl.load(logits_ptr + tokens, mask=tokens < VOCAB, other=0.0)
        # A comparison with NaN is false.
        broken += tl.sum(tl.where(tl.abs(raw) < _INFINITY, 0, 1))
        logits = _load(logits_ptr, mask_ptr, start, VOCAB, HAS_MASK, BLOCK)
        most = tl.maximum(most, tl.max(logits, 0))
        least = tl.minimum(least, tl.min(tl.where(logits > -_INFINITY, logits, _INFINITY), 0))
    return most, least, (broken == 0) & (most > -_INFINITY)


@triton.jit  # type: ignore[untyped-decorator]
def _count_above(logits_ptr, mask_ptr, limit, VOCAB: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns how many allowed logits exceed `limit`."""
    count = tl.full((), 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        logits = _load(logits_ptr, mask_ptr, start, VOCAB, HAS_MASK, BLOCK)
        count += tl.sum((logits > limit).to(tl.int32), 0)
    return count


@triton.jit  # type: ignore[untyped-decorator]
def _mass_above(  # type: ignore[no-untyped-def]
    logits_ptr,
    mask_ptr,
    limit,
    most,
    temperature,
    VOCAB: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
    INCLUSIVE: tl.constexpr,
):
    """Returns the sum of the weights exp((logit - most) / temperature) of logits over `limit`, or over and at it."""
    mass = tl.full((), 0.0, tl.float32)
    for start in range(0, VOCAB, BLOCK):
        logits = _load(logits_ptr, mask_ptr, start, VOCAB, HAS_MASK, BLOCK)
        counted = (logits >= limit) if INCLUSIVE else (logits > limit)
        mass += tl.sum(tl.where(counted, tl.exp((logits - most) / temperature), 0.0), 0)
    return mass


@triton.jit  # type: ignore[untyped-decorator]
def _best(  # type: ignore[no-untyped-def]
    logits_ptr,
    mask_ptr,
    key,
    floor,
    least_weight,
    most,
    temperature,
    VOCAB: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns the token with the best weight over noise among logits of at least `floor`."""
    best = tl.full((), -1.0, tl.float32)
    token = tl.full((), 0, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        logits = _load(logits_ptr, mask_ptr, start, VOCAB, HAS_MASK, BLOCK)
        weights = tl.exp((logits - most) / temperature)
        keep = (logits >= floor) & (weights >= least_weight)
        scores = tl.where(keep, weights / _exponential(key, tokens), -1.0)
        highest = tl.max(scores, 0)
        first = tl.min(tl.where(scores == highest, tokens, VOCAB), 0)
        token = tl.where(highest > best, first, token)
        best = tl.maximum(best, highest)
    return token


@triton.jit  # type: ignore[untyped-decorator]
def _first_at(logits_ptr, mask_ptr, value, VOCAB: tl.constexpr, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Returns the lowest token whose logit is `value`."""
    token = tl.full((), VOCAB, tl.int32)
    for start in range(0, VOCAB, BLOCK):
        logits = _load(logits_ptr, mask_ptr, start, VOCAB, HAS_MASK, BLOCK)
        tokens = start + tl.arange(0, BLOCK)
        token = tl.minimum(token, tl.min(tl.where(logits == value, tokens, VOCAB), 0))
    return token


@triton.jit  # type: ignore[untyped-decorator]
def sample_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    logits_stride,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    mask_ptr,
    ids_ptr,
    finite_ptr,
    VOCAB: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draws the token of row `program_id(0)`; `logits_stride` counts elements, a mask has ceil(VOCAB / 32) words."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    if HAS_MASK:
        mask_ptr += row * ((VOCAB + 31) // 32)
    asked = tl.load(temperature_ptr + row)
    temperature = tl.minimum(tl.maximum(asked, _LEAST_TEMPERATURE), _LARGEST_TEMPERATURE)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    most, least, finite = _extremes(logits_ptr, mask_ptr, VOCAB, HAS_MASK, BLOCK)
    sampled = finite & (asked != 0)

    # The answer of either search lies in low .. high; where nothing is to be searched they start equal.
    low = tl.where(finite, _order(least), 0)
    high = tl.where(sampled & (top_k > 0) & (top_k < VOCAB), _order(most), low)
    while low < high:
        middle = low + (high - low) // 2
        fits = _count_above(logits_ptr, mask_ptr, _value(middle), VOCAB, HAS_MASK, BLOCK) < top_k
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle + 1)

    high = tl.where(sampled & (top_p < 1), _order(most), low)
    wanted = tl.full((), 0.0, tl.float32)
    if low < high:
        floor = _value(low)
        wanted = top_p * _mass_above(logits_ptr, mask_ptr, floor, most, temperature, VOCAB, HAS_MASK, BLOCK, True)
    while low < high:
        middle = low + (high - low) // 2
        mass = _mass_above(logits_ptr, mask_ptr, _value(middle), most, temperature, VOCAB, HAS_MASK, BLOCK, False)
        high = tl.where(mass < wanted, middle, high)
        low = tl.where(mass < wanted, low, middle + 1)

    if sampled:
        key = tl.load(keys_ptr + row).to(tl.uint64, bitcast=True)
        min_p = tl.load(min_p_ptr + row)
        token = _best(logits_ptr, mask_ptr, key, _value(low), min_p, most, temperature, VOCAB, HAS_MASK, BLOCK)
    else:
        token = _first_at(logits_ptr, mask_ptr, most, VOCAB, HAS_MASK, BLOCK)
    tl.store(ids_ptr + row, tl.where(finite, token, -1).to(tl.int64))
    tl.store(finite_ptr + row, finite.to(tl.int8))
