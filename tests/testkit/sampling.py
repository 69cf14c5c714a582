"""What a sampling kernel or its reference may draw: awkward inputs, and a judge in double precision."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch

from magnitude_kernels.sample import noise
from magnitude_kernels.sample.reference import LEAST_TEMPERATURE, NO_TOKEN, Sampled, SampleParams


class Batch(NamedTuple):
    """Inputs of the operation."""

    logits: torch.Tensor
    params: SampleParams


def batch(vocab: int, rows: int, seed: int, masked: bool) -> Batch:
    """Returns rows of every kind: greedy and sampled, cut in each way, with ties, zeros, extremes and bad rows.

    Masks allow everything, what chance says, nothing, or one token; bits past the vocabulary are set or not.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(values: list[float]) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    logits = torch.randn(rows, vocab, generator=generator) * pick([0.5, 3.0, 8.0]).unsqueeze(1)
    kinds = torch.randint(8, (rows,), generator=generator).tolist()
    for row, kind in zip(logits, kinds, strict=True):
        if kind == 0:
            row.copy_((row * 2).round() / 2)
        elif kind == 1:
            row.fill_(-1.5)
        elif kind == 2:
            row.clamp_(min=0.0)
        elif kind == 3:
            row[:: max(1, vocab // 3)] = -0.0
        elif kind == 4 and vocab > 3:
            row[3] = (math.nan, math.inf, -math.inf)[seed % 3]
    words = (vocab + 31) // 32
    mask = torch.randint(-(2**31), 2**31, (rows, words), generator=generator).to(torch.int32)
    mask[0::3] = -1
    mask[2::3] = 0
    # One token alone, at either end of the vocabulary or of a word, whatever its logit.
    for row in range(5, rows, 6):
        token = min((0, 31, 32, vocab - 1)[row // 6 % 4], vocab - 1)
        mask[row, token // 32] = 1 << token % 32 if token % 32 < 31 else -(2**31)
    keys = [noise.row_key(seed, i, 7) for i in range(rows)]
    params = SampleParams(
        temperature=pick([0.0, 0.3, 1.0, 1.7, 1e-40, 1e30]),
        top_k=pick([0, 0, 1, 3, 40, 100_000]).to(torch.int32),
        top_p=pick([0.0, 0.3, 0.9, 1.0, 1.0]),
        min_p=pick([0.0, 0.0, 0.1, 1.0]),
        keys=torch.tensor(keys),
        mask=mask if masked else None,
    )
    return Batch(logits, params)


def on(device: torch.device, given: Batch) -> Batch:
    """Returns the batch on another device."""
    p = given.params
    columns = {name: getattr(p, name).to(device) for name in ("temperature", "top_k", "top_p", "min_p", "keys")}
    return Batch(given.logits.to(device), replace(p, **columns, mask=None if p.mask is None else p.mask.to(device)))


def complaints(given: Batch, drawn: Sampled, tolerance: float = 1e-5) -> list[str]:
    """Returns what is wrong with `drawn`, one line per row; see `winners` for the tolerance."""
    given = on(torch.device("cpu"), given)
    found = []
    for i, (token, finite) in enumerate(zip(drawn.ids.tolist(), drawn.finite.tolist(), strict=True)):
        right = winners(given, i, tolerance)
        if (token not in right) or finite != (token != NO_TOKEN):
            found.append(f"row {i} of {tuple(given.logits.shape)}: drew {token} (finite {finite}), right {right}")
    return found


def winners(given: Batch, i: int, tolerance: float) -> list[int]:
    """Returns the tokens that row `i` may draw, by the definition in float64.

    There is more than one only where two scores are within `tolerance` (relative) of each other, or where a mass
    is that close to its limit or a weight to its own.
    """
    p, row = given.params, given.logits[i].double()
    if not row.isfinite().all():
        return [NO_TOKEN]
    tokens = torch.arange(row.numel())
    if p.mask is not None:
        tokens = tokens[((p.mask[i][tokens // 32] >> (tokens % 32)) & 1).bool()]
    if tokens.numel() == 0:
        return [NO_TOKEN]
    row = row[tokens]
    if p.temperature[i] == 0:
        return [int(tokens[row == row.max()].min())]
    if 0 < p.top_k[i] < row.numel():
        kept = row >= row.sort(descending=True).values[p.top_k[i] - 1]
        tokens, row = tokens[kept], row[kept]
    weights = ((row - row.max()) / p.temperature[i].clamp(min=LEAST_TEMPERATURE).double()).exp()
    sure, maybe = torch.ones_like(row, dtype=torch.bool), torch.ones_like(row, dtype=torch.bool)
    if p.top_p[i] < 1:
        above = mass_above(row, weights)
        sure = (above < (p.top_p[i].double() - tolerance) * weights.sum()) | (row == row.max())
        maybe = (above < (p.top_p[i].double() + tolerance) * weights.sum()) | (row == row.max())
    sure &= weights >= p.min_p[i].double() * (1 + tolerance)
    maybe &= weights >= p.min_p[i].double() * (1 - tolerance)
    sure |= row == row.max()
    fractions = ((noise.bits(int(p.keys[i]), tokens).double() + 0.5) / 2**31).clamp(max=noise.LARGEST_FRACTION)
    scores = weights / -torch.log1p(-fractions)
    return sorted(tokens[maybe & (scores >= scores[sure].max() * (1 - tolerance))].tolist())


def mass_above(row: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns for each logit the sum of the weights of strictly larger ones."""
    ordered, order = row.sort(descending=True)
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), weights[order].cumsum(0)])
    return sums[torch.searchsorted(-ordered, -row)]
