"""The sampling kernel on a GPU: right on fresh inputs, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from magnitude_kernels import dispatch
from magnitude_kernels.sample import noise
from magnitude_kernels.sample.reference import SampleParams
from testkit.gpu import Case
from testkit.sampling import batch, complaints, on

VOCABULARIES = (49_152, 128_256)
ROWS = (1, 8, 64)
INPUTS = 8


class Kind(NamedTuple):
    """How the timed rows are drawn."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


KINDS = (Kind("greedy", temperature=0.0), Kind("plain"), Kind("top_k 40", top_k=40), Kind("top_p 0.9", top_p=0.9))


def check(device: torch.device) -> list[str]:
    """Returns what the operation draws wrongly, over awkward and whole vocabularies."""
    wrong = []
    start = torch.seed() % 2**31
    for i, vocab in enumerate((1, 31, 100, 1000, 4097, *VOCABULARIES)):
        for masked in (False, True):
            given = on(device, batch(vocab, 24, start + i, masked))
            wrong += [f"{line} (seed {start + i})" for line in complaints(given, dispatch.sample(*given))]
    return wrong


def cases(device: torch.device) -> Iterator[Case]:
    """Yields the sizes to time; each logit must be read once."""
    for vocab in VOCABULARIES:
        for rows in ROWS:
            logits = [torch.randn(rows, vocab, device=device) * 4 for _ in range(INPUTS)]
            for kind in KINDS:
                yield _case(logits, kind)


def _case(logits: list[torch.Tensor], kind: Kind) -> Case:
    rows, vocab = logits[0].shape
    device = logits[0].device
    params = SampleParams(
        temperature=torch.full((rows,), kind.temperature, device=device),
        top_k=torch.full((rows,), kind.top_k, dtype=torch.int32, device=device),
        top_p=torch.full((rows,), kind.top_p, device=device),
        min_p=torch.zeros(rows, device=device),
        keys=torch.tensor([noise.row_key(0, i, 0) for i in range(rows)], device=device),
        mask=None,
    )
    return Case(
        name=f"{kind.name}, {rows} x {vocab:,}",
        kernel=lambda i: dispatch.sample(logits[i % INPUTS], params),
        torch=lambda i: plain_torch(logits[i % INPUTS], kind),
        least_bytes=rows * vocab * 4,
    )


def plain_torch(logits: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Draws with torch's own operations and its own noise."""
    if kind.temperature == 0:
        return logits.argmax(1)
    logits = logits / kind.temperature
    if kind.top_k:
        values, ids = logits.topk(kind.top_k)
        return ids.gather(1, values.softmax(1).multinomial(1)).squeeze(1)
    if kind.top_p < 1:
        values, ids = logits.sort(descending=True)
        probabilities = values.softmax(1)
        probabilities[probabilities.cumsum(1) - probabilities >= kind.top_p] = 0
        return ids.gather(1, probabilities.multinomial(1)).squeeze(1)
    return logits.softmax(1).multinomial(1).squeeze(1)
