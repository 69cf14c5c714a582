"""Draws one token per row in plain torch: the definition of the operation, and its path on CPU.

For a row of logits l, after the bitmask has set forbidden tokens to -inf (in passing: the logits themselves are left
as they are, since log-probabilities are reported of what the model said):

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
# More candidates than this fall into as many bins before any are sorted; a narrower spread of logits counts as none.
_BINS = 2048
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


class _Candidates(NamedTuple):
    """Tokens that may still be drawn, in order of id."""

    tokens: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor

    def where(self, keep: torch.Tensor) -> _Candidates:
        """Returns those at which `keep` is True."""
        kept = keep.nonzero().squeeze(1)
        return _Candidates(self.tokens[kept], self.logits[kept], self.weights[kept])


def sample(logits: torch.Tensor, params: SampleParams) -> Sampled:
    """Draws a token for each row of `logits` (float32 [rows, vocab]); raises ValueError for a mask of other sizes."""
    check_mask(logits, params.mask)
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


def check_mask(logits: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Raises ValueError for a mask that does not have one bit per token of each row, packed without gaps."""
    if mask is None:
        return
    wanted = (logits.shape[0], (logits.shape[1] + 31) // 32)
    if tuple(mask.shape) != wanted or mask.dtype != torch.int32 or not mask.is_contiguous():
        raise ValueError(
            f"logits {tuple(logits.shape)} need a contiguous mask of int32 {wanted}, one bit per token, "
            f"not {mask.dtype} {tuple(mask.shape)} with strides {mask.stride()}"
        )


def _row(row: torch.Tensor, cut: _Cut, mask: torch.Tensor | None) -> int:
    """Returns the token of one row, or NO_TOKEN."""
    values = row.numpy(force=True)
    if not (math.isfinite(values.max()) and math.isfinite(values.min())):
        return NO_TOKEN
    if mask is None and cut.temperature == 0:
        # A tenth of the time of torch's; of equals both take the first.
        return int(values.argmax())
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
    temperature = min(max(cut.temperature, LEAST_TEMPERATURE), LARGEST_TEMPERATURE)
    left = _Candidates(tokens, row, (row - row.amax()).div_(temperature).exp_())
    if cut.top_p < 1:
        left = _nucleus(left, cut.top_p)
    if cut.min_p > 0:
        left = left.where(left.weights >= cut.min_p)
    scores = left.weights / noise.exponential(noise.bits(cut.key, left.tokens))
    return int(left.tokens[scores.argmax()].item())


def _nucleus(left: _Candidates, top_p: float) -> _Candidates:
    """Returns the candidates above which lies less than `top_p` of the weight.

    Few of a vocabulary are ever put in order, since sorting it costs more than the rest of the draw: tokens that are
    too light to be kept go first, and of many that remain only those close to the limit are sorted.
    """
    total = left.weights.sum(dtype=torch.float64)
    wanted = top_p * total
    # All tokens lighter than this hold together less than half of what lies beyond the nucleus.
    left = left.where(left.weights >= (1 - top_p) * total / (2 * left.tokens.numel()))
    logits, weights = left.logits, left.weights
    skipped = torch.zeros_like(total)
    if logits.numel() > _BINS:
        depth = logits.amax() - logits
        bins = (depth * (_BINS / max(depth.amax().item(), _SHALLOWEST))).clamp_(max=_BINS - 1).to(torch.int64)
        mass = torch.bincount(bins, weights.double(), minlength=_BINS).cumsum(0)
        reached = int((mass < wanted).sum().item())
        if reached:
            skipped = mass[reached - 1]
        inside = (bins == reached).nonzero().squeeze(1)
        logits, weights = logits[inside], weights[inside]
    ordered, order = logits.sort(descending=True)
    above = weights[order].cumsum(0, dtype=torch.float64).add_(skipped)
    return left.where(left.logits >= ordered[min(int((above < wanted).sum().item()), ordered.numel() - 1)])
