"""Sampling under drafts has the target's distribution: a G-test on the real engine, over a model that is a chain.

Each next token depends on the last alone, so that the counts of pairs are judged against known probabilities. Drafts
are trees of its likeliest paths and know nothing of the noise. What the test is worth is shown by planted faults.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from magnitude_engine import api, step, stepper
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.decode.sample import Drawn, RowSpec
from magnitude_engine.draft.tree import DraftTree, merge
from magnitude_engine.engine import Engine
from magnitude_engine.kv.tensors import SlotMove
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.request import Sequence as Choice
from magnitude_engine.step import Verified
from testkit.drafting import chain, drafted_by, markov
from testkit.engine import engine_config, generate, run
from testkit.tiny import TINY_VOCAB

WORDS = range(65, 73)
TEMPERATURE = 0.8
IMPOSSIBLE = -200.0
BATCH, LENGTH = 32, 500
FEW, MANY, MOST = 2_500, 20_000, 200_000
# One in a hundred thousand: every seed is fixed, so a right engine passes always or never.
LEAST = 1e-5

Fault = Callable[[pytest.MonkeyPatch], None]


def table() -> torch.Tensor:
    """Returns logits for each last token: eight words are possible, some of them likely."""
    logits = torch.full((TINY_VOCAB, TINY_VOCAB), IMPOSSIBLE)
    noise = torch.randn(TINY_VOCAB, len(WORDS), generator=torch.Generator().manual_seed(5))
    logits[:, WORDS.start : WORDS.stop] = 1.3 * noise
    return logits


def sampled(model: LoadedModel, draws: int) -> tuple[torch.Tensor, int]:
    """Returns how often each word followed each, and how many drafted tokens were accepted."""
    logits = table()
    likeliest = logits.topk(2, dim=1).indices.tolist()

    def draft(sequence: Choice) -> DraftTree:
        """Two words may come next, two behind each of them, and one behind the likeliest two."""
        last = sequence.tokens[-1]
        paths = [(first, second) for first in likeliest[last] for second in likeliest[first]]
        return functools.reduce(merge, [chain(p) for p in paths], chain([*paths[0], likeliest[paths[0][1]][0]]))

    config = engine_config(max_batch_size=BATCH, max_waiting=draws // LENGTH)
    engine = drafted_by(draft, Engine(markov(model, logits), config, pages=BATCH * (LENGTH // PAGE_TOKENS + 2)))
    requests = [
        generate((WORDS[0],), sampling=api.Sampling(temperature=TEMPERATURE, seed=seed), max_tokens=LENGTH)
        for seed in range(draws // LENGTH)
    ]
    counts = torch.zeros(len(WORDS), len(WORDS), dtype=torch.float64)
    answers = run(engine, *requests)
    for answer in answers:
        ids = [WORDS[0], *answer.ids()]
        for before, after in itertools.pairwise(ids):
            counts[before - WORDS.start, after - WORDS.start] += 1
    return counts, sum(answer.usage.accepted_tokens for answer in answers)


def likelihood(counts: torch.Tensor) -> float:
    """Returns the probability of a deviation at least this large, if the target's distribution was drawn from."""
    words = slice(WORDS.start, WORDS.stop)
    target = (table()[words, words].double() / TEMPERATURE).softmax(dim=1)
    expected = counts.sum(dim=1, keepdim=True) * target
    g = 2 * torch.xlogy(counts, counts / expected).sum()
    degrees = torch.tensor(len(WORDS) * (len(WORDS) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, g.clamp(min=0) / 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    "draws",
    [
        FEW,
        MANY,
        pytest.param(MOST, marks=pytest.mark.timeout(600)),
    ],
)
def test_drafted_sampling_has_the_targets_distribution(model: LoadedModel, draws: int) -> None:
    counts, accepted = sampled(model, draws)
    assert counts.sum() == draws
    assert 0.2 * draws < accepted < 0.8 * draws
    assert likelihood(counts) > LEAST


def noise_of_the_first(patch: pytest.MonkeyPatch) -> None:
    """All rows of a draft are drawn with the noise of its first."""
    right = step.row_specs

    def wrong(sequence: Choice, draft: DraftTree) -> list[RowSpec]:
        specs = right(sequence, draft)
        return [RowSpec(s.sampling, s.choice, specs[0].position, s.path, s.mask, s.logprobs) for s in specs]

    patch.setattr(step, "row_specs", wrong)


def logits_of_the_first(patch: pytest.MonkeyPatch) -> None:
    """All rows of a draft are drawn from the logits of its first."""
    right = stepper.drawn_in_parts

    def wrong(logits: torch.Tensor, specs: Sequence[RowSpec], sizes: Sequence[int]) -> list[Sequence[Drawn]]:
        firsts = [end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True) for _ in range(size)]
        return right(logits[firsts], specs, sizes)

    patch.setattr(stepper, "drawn_in_parts", wrong)


def some_drafts_believed(patch: pytest.MonkeyPatch) -> None:
    """In one place of eight a drafted token is taken although another was drawn."""
    right = stepper.Stepper._commit_all
    draws = random.Random(3)

    def wrong(self: stepper.Stepper, verified: Verified, moves: list[list[SlotMove]]) -> int:
        drawn = list(verified.drawn)
        for parent, token in zip(verified.draft.parents, verified.draft.tokens, strict=True):
            if draws.random() < 0.125:
                drawn[parent + 1] = drawn[parent + 1]._replace(token=token)
        return right(self, verified._replace(drawn=tuple(drawn)), moves)

    patch.setattr(stepper.Stepper, "_commit_all", wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "draws"),
    [
        (noise_of_the_first, FEW),
        (noise_of_the_first, MANY),
        (logits_of_the_first, MANY),
        (some_drafts_believed, MANY),
    ],
)
def test_a_planted_fault_is_caught(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, fault: Fault, draws: int
) -> None:
    fault(monkeypatch)
    counts, _ = sampled(model, draws)
    assert likelihood(counts) < LEAST
