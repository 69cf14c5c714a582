"""Draws one token per row in plain torch: the definition of the operation, and its path on CPU.

For a row of logits l, after the bitmask has set forbidden tokens to -inf:

    temperature 0    the token with the largest l, the lowest id among equals
    otherwise        w = exp((l - max l) / temperature), and of w are kept
        top_k            #{j: l_j > l_i} < top_k
        top_p            sum of kept w_j with l_j > l_i  <  top_p * sum of kept w
        min_p            w_i >= min_p
                     drawn is argmax(w_i / e_i) over the kept, e_i the keyed Exp(1) noise of `noise`

Everything is a threshold on l, so that no order among equal logits matters and the likeliest token is always
kept. A row depends on nothing but itself: its neighbours and its place in the batch never change its token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from magnitude_kernels.sample import noise

LEAST_TEMPERATURE = torch.finfo(torch.float32).tiny
LARGEST_TEMPERATURE = torch.finfo(torch.float32).max
NO_TOKEN = -1
_FIRST_CANDIDATES = 256


@dataclass(frozen=True, slots=True)
class SampleParams:
    """How to draw, one entry per row; all tensors lie on the logits' device.

    Attributes:
        temperature: float32 [rows], 0 for greedy.
        top_k: int32 [rows], 0 for no limit.
        top_p, min_p: float32 [rows], 1 and 0 for no limit.
        keys: int64 [rows], from `noise.row_key`.
        mask: int32 [rows, ceil(vocab / 32)], bit `token % 32` of word `token // 32` set where the token is
            allowed; None allows all.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


class Sampled(NamedTuple):
    """What was drawn.

    Attributes:
        ids: int64 [rows], `NO_TOKEN` where not finite.
        finite: bool [rows], False where a logit is NaN or infinite, or the mask allows no token.
    """

    ids: torch.Tensor
    finite: torch.Tensor


class _Cut(NamedTuple):
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    key: int


def sample(logits: torch.Tensor, params: SampleParams) -> Sampled:
    """Draws a token for each row of `logits` (float32 [rows, vocab])."""
    cuts = [
        _Cut(*values)
        for values in zip(
            params.temperature.tolist(),
            params.top_k.tolist(),
            params.top_p.tolist(),
            params.min_p.tolist(),
            params.keys.tolist(),
            strict=True,
        )
    ]
    drawn = [_row(logits[i], cut, None if params.mask is None else params.mask[i]) for i, cut in enumerate(cuts)]
    ids = torch.tensor(drawn, dtype=torch.int64, device=logits.device)
    return Sampled(ids, ids != NO_TOKEN)


def allowed(mask: torch.Tensor, vocab: int) -> torch.Tensor:
    """Returns a bitmask (int32 [words]) as bool [vocab]."""
    shifts = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask.unsqueeze(1) >> shifts) & 1).to(torch.bool).flatten()[:vocab]


def _row(row: torch.Tensor, cut: _Cut, mask: torch.Tensor | None) -> int:
    """Returns the token of one row, or NO_TOKEN."""
    least, most = (value.item() for value in row.aminmax())
    if not (math.isfinite(least) and math.isfinite(most)):
        return NO_TOKEN
    if mask is not None:
        row = row.masked_fill(~allowed(mask, row.numel()), -math.inf)
        most = row.amax().item()
        if most == -math.inf:
            return NO_TOKEN
    if cut.temperature == 0:
        return int(row.argmax().item())
    tokens = None
    if 0 < cut.top_k < row.numel():
        tokens = (row >= row.topk(cut.top_k).values[-1]).nonzero().squeeze(1)
        row = row[tokens]
    temperature = min(max(cut.temperature, LEAST_TEMPERATURE), LARGEST_TEMPERATURE)
    weights = ((row - most) / temperature).exp_()
    keep = weights >= max(cut.min_p, noise.LEAST_WEIGHT)
    if cut.top_p < 1:
        keep &= row >= _nucleus(row, weights, cut.top_p)
    kept = keep.nonzero().squeeze(1)
    candidates = kept if tokens is None else tokens[kept]
    scores = weights[kept] / noise.exponential(noise.bits(cut.key, candidates))
    return int(candidates[scores.argmax()].item())


def _nucleus(row: torch.Tensor, weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Returns the smallest logit above which less than `top_p` of the weight lies.

    Only as many of the largest are put in order as are needed to reach the mass: a full sort of a vocabulary
    costs more than the rest of the draw.
    """
    mass = top_p * weights.sum(dtype=torch.float64)
    count = _FIRST_CANDIDATES
    while True:
        largest = row.topk(min(count, row.numel()))
        total = weights[largest.indices].cumsum(0, dtype=torch.float64)
        if count >= row.numel() or total[-1] >= mass:
            above = int((total < mass).sum().item())
            return largest.values[min(above, total.numel() - 1)]
        count *= 8
