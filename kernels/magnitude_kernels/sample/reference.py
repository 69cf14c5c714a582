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

# Temperatures beyond these draw as these do; a smaller one would overflow the quotient.
LEAST_TEMPERATURE = 1e-30
LARGEST_TEMPERATURE = torch.finfo(torch.float32).max
NO_TOKEN = -1
# Bins of logits, evenly spaced down to a weight of exp(-30); the last takes what lies deeper.
_BINS = 2048
_DEEPEST = 30.0
_SHALLOWEST = 1e-30


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
    if not all(math.isfinite(extreme.item()) for extreme in row.aminmax()):
        return NO_TOKEN
    tokens = torch.arange(row.numel(), device=row.device)
    if mask is not None:
        tokens = tokens[allowed(mask, row.numel())]
        if tokens.numel() == 0:
            return NO_TOKEN
        row = row[tokens]
    if cut.temperature == 0:
        return int(tokens[row.argmax()].item())
    if 0 < cut.top_k < row.numel():
        kept = (row >= row.topk(cut.top_k).values[-1]).nonzero().squeeze(1)
        tokens, row = tokens[kept], row[kept]
    most = row.amax()
    scaled = (row - most).div_(min(max(cut.temperature, LEAST_TEMPERATURE), LARGEST_TEMPERATURE))
    weights = scaled.exp()
    if cut.top_p < 1 or cut.min_p > 0:
        keep = weights >= cut.min_p
        if cut.top_p < 1:
            keep &= row >= _nucleus(row, scaled, weights, cut.top_p)
        kept = keep.nonzero().squeeze(1)
        tokens, weights = tokens[kept], weights[kept]
    scores = weights.div_(noise.exponential(noise.bits(cut.key, tokens)))
    return int(tokens[scores.argmax()].item())


def _nucleus(row: torch.Tensor, scaled: torch.Tensor, weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """Returns the smallest logit of `row` above which less than `top_p` of the weight lies.

    Of a long row only the bin of logits in which the mass is reached is put in order, since sorting a vocabulary
    costs more than the rest of the draw.
    """
    wanted = top_p * weights.sum(dtype=torch.float64)
    skipped = torch.zeros((), dtype=torch.float64, device=row.device)
    if row.numel() > _BINS:
        depth = min(max(-scaled.amin().item(), _SHALLOWEST), _DEEPEST)
        bins = (scaled * (-_BINS / depth)).clamp_(max=_BINS - 1).to(torch.int64)
        mass = torch.bincount(bins, weights.double(), minlength=_BINS).cumsum(0)
        reached = int((mass < wanted).sum().item())
        if reached:
            skipped = mass[reached - 1]
        inside = (bins == reached).nonzero().squeeze(1)
        row, weights = row[inside], weights[inside]
    logits, order = row.sort(descending=True)
    above = weights[order].cumsum(0, dtype=torch.float64).add_(skipped)
    return logits[min(int((above < wanted).sum().item()), logits.numel() - 1)]
