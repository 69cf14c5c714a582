"""Draws the next token of each row, and reports log-probabilities.

The order of what is applied to a row's logits:

    logit_bias, frequency and presence penalties → mask → temperature → top_k → top_p → min_p → keyed noise

Penalties count the tokens generated so far in the row's choice. Truncation is by threshold with ties kept, and
the noise is a pure function of (seed, choice, position, token id): `magnitude_kernels.sample.reference` defines
both. So a row's token depends on that row alone, never on its neighbours in the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from magnitude_engine import api
from magnitude_engine.errors import RequestError
from magnitude_kernels import dispatch
from magnitude_kernels.sample.noise import row_key
from magnitude_kernels.sample.reference import SampleParams

_ALL_ALLOWED = -1
# Tokens whose greatest probability is looked for first.
_GROUP = 64


@dataclass(frozen=True, slots=True)
class RowSpec:
    """How to draw one token.

    Attributes:
        position: absolute position in the sequence of the token to be drawn.
        path: tokens generated so far in this choice, first to last (for penalties).
        mask: int32 [ceil(vocab / 32)], bit `token % 32` of word `token // 32` set where the grammar allows the
            token; None allows all.
        logprobs: None for none, else how many alternatives.
        confidence: whether how sure the model is shall be told.
    """

    sampling: api.Sampling
    choice: int
    position: int
    path: Sequence[int]
    mask: torch.Tensor | None
    logprobs: int | None
    confidence: bool = False


class RawLogprobs(NamedTuple):
    """Log-probabilities under the model's own distribution, before anything of `RowSpec` is applied.

    Attributes:
        token, logprob: the drawn token's.
        top: the likeliest tokens with theirs, likeliest first, equal ones by id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Confidence(NamedTuple):
    """How sure the model is of a token: entropy in nats, and by how much the likeliest leads, as probability."""

    entropy: float
    margin: float


class Drawn(NamedTuple):
    """One row's result. Where `finite` is False (a NaN or infinite logit, or a mask that allows nothing) `token`
    is -1, and `logprobs` and `confidence` are None."""

    token: int
    finite: bool
    logprobs: RawLogprobs | None
    confidence: Confidence | None = None


def check_sampling(sampling: api.Sampling, vocab: int) -> None:
    """Checks what `draw` takes for granted.

    Raises:
        RequestError: a value is out of bounds or not finite, or `logit_bias` names a token the model has not.
    """
    _check("temperature", sampling.temperature, 0, math.inf)
    _check("top_p", sampling.top_p, 0, 1)
    _check("min_p", sampling.min_p, 0, 1)
    _check("top_k", sampling.top_k, 0, math.inf)
    _check("frequency_penalty", sampling.frequency_penalty, -2, 2)
    _check("presence_penalty", sampling.presence_penalty, -2, 2)
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocab:
            raise RequestError(
                f"logit_bias names token {token}; the model's token ids are 0 to {vocab - 1}", param="logit_bias"
            )
        _check("logit_bias", bias, -100, 100)


def draw(logits: torch.Tensor, rows: Sequence[RowSpec]) -> list[Drawn]:
    """Draws one token per row of `logits` (float32 [rows, vocab], left unchanged)."""
    if not rows:
        return []
    if logits.dim() != 2 or logits.shape[0] != len(rows):
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not match {len(rows)} rows")
    sampled = dispatch.sample(_adjusted(logits, rows), _params(logits, rows))
    drawn = zip(rows, sampled.ids.tolist(), sampled.finite.tolist(), strict=True)
    return [
        Drawn(
            token,
            finite,
            raw_logprobs(logits[i], token, row.logprobs) if finite else None,
            confidence(logits[i]) if finite and row.confidence else None,
        )
        for i, (row, token, finite) in enumerate(drawn)
    ]


def drawn_in_parts(logits: torch.Tensor, rows: Sequence[RowSpec], sizes: Sequence[int]) -> list[Sequence[Drawn]]:
    """Returns what `draw` does, in parts of so many rows.

    On a CPU a row is drawn when it is asked for, so that those behind a wrong token of a draft never are; on a GPU
    launching costs more than the rows, and all are drawn at once.
    """
    ends = list(accumulate(sizes))
    places = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    if logits.device.type == "cpu":
        return [_Draws(logits[place], rows[place]) for place in places]
    with torch.inference_mode():
        drawn = draw(logits, rows)
    return [drawn[place] for place in places]


class _Draws(Sequence[Drawn]):
    """Rows that are drawn one by one."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[RowSpec]) -> None:
        self._logits = logits
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, at: Any) -> Any:
        with torch.inference_mode():
            return draw(self._logits[at : at + 1], self._rows[at : at + 1])[0]


def raw_logprobs(row: torch.Tensor, token: int, count: int | None) -> RawLogprobs | None:
    """Returns the log-probabilities of `token` and of the `count` likeliest under the logits `row` [vocab]."""
    if count is None:
        return None
    total = row.logsumexp(0)
    top: tuple[tuple[int, float], ...] = ()
    if count > 0:
        least = row.topk(min(count, row.numel())).values[-1]
        candidates = (row >= least).nonzero().squeeze(1)
        order = row[candidates].argsort(descending=True, stable=True)[:count]
        chosen = candidates[order]
        top = tuple(zip(chosen.tolist(), (row[chosen] - total).tolist(), strict=True))
    return RawLogprobs(token, float(row[token] - total), top)


def confidence(row: torch.Tensor) -> Confidence:
    """Returns how sure the model is whose logits are `row` [vocab], before anything of `RowSpec` is applied.

    The two likeliest are found among the greatest of groups, since looking for them takes longer than all the rest.
    """
    probabilities = row.softmax(0)
    groups = probabilities.view(-1, math.gcd(row.numel(), _GROUP) if row.numel() > _GROUP else 1)
    (first, second), (group, _) = (found.tolist() for found in groups.amax(1).topk(2))
    beside = groups[int(group)].topk(2).values[-1].item() if groups.shape[1] > 1 else 0.0
    # log p = x - max(x) + log(max p), of which the entropy is the mean.
    entropy = -math.log(first) - torch.dot(probabilities, row - row.amax()).item()
    return Confidence(max(entropy, 0.0), first - max(second, beside))


def _check(name: str, value: float, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        bound = f"at least {least}" if most == math.inf else f"between {least} and {most}"
        raise RequestError(f"{name} must be a number {bound}, not {value}", param=name)


def _adjusted(logits: torch.Tensor, rows: Sequence[RowSpec]) -> torch.Tensor:
    """Returns the logits with biases and penalties added; `logits` itself where no row has any."""
    changes = [_changes(row) for row in rows]
    if not any(changes):
        return logits
    adjusted = logits.clone()
    for i, change in enumerate(changes):
        if change:
            tokens = torch.tensor(list(change), dtype=torch.int64, device=logits.device)
            adjusted[i, tokens] += torch.tensor(list(change.values()), dtype=logits.dtype, device=logits.device)
    return adjusted


def _changes(row: RowSpec) -> dict[int, float]:
    """Returns token id → what is added to its logit."""
    sampling = row.sampling
    changes = dict(sampling.logit_bias)
    if sampling.frequency_penalty or sampling.presence_penalty:
        for token, count in Counter(row.path).items():
            penalty = sampling.frequency_penalty * count + sampling.presence_penalty
            changes[token] = changes.get(token, 0.0) - penalty
    return changes


def _params(logits: torch.Tensor, rows: Sequence[RowSpec]) -> SampleParams:
    device = logits.device
    keys = [row_key(row.sampling.seed, row.choice, row.position) for row in rows]

    def column(values: list[float] | list[int], kind: torch.dtype) -> torch.Tensor:
        # Several times as fast as torch.tensor for a few numbers.
        return torch.from_numpy(np.array(values)).to(device, kind)

    return SampleParams(
        temperature=column([row.sampling.temperature for row in rows], torch.float32),
        top_k=column([row.sampling.top_k for row in rows], torch.int32),
        top_p=column([row.sampling.top_p for row in rows], torch.float32),
        min_p=column([row.sampling.min_p for row in rows], torch.float32),
        keys=column(keys, torch.int64),
        mask=_masks(logits, rows),
    )


def _masks(logits: torch.Tensor, rows: Sequence[RowSpec]) -> torch.Tensor | None:
    """Returns the rows' masks as one tensor, None where no row has one."""
    if all(row.mask is None for row in rows):
        return None
    words = (logits.shape[1] + 31) // 32
    masks = torch.full((len(rows), words), _ALL_ALLOWED, dtype=torch.int32, device=logits.device)
    for i, row in enumerate(rows):
        if row.mask is not None:
            masks[i] = row.mask
    return masks
