"""Drawing tokens: what is kept, in what proportion it is drawn, and what may not influence it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from magnitude_engine import api
from magnitude_engine.decode.sample import Drawn, RowSpec, check_sampling, draw, drawn_in_parts
from magnitude_engine.errors import RequestError
from magnitude_kernels.sample import noise

WORD = (1 << 64) - 1


def row(
    choice: int = 0,
    position: int = 0,
    path: Sequence[int] = (),
    mask: torch.Tensor | None = None,
    logprobs: int | None = None,
    **sampling: float | dict[int, float],
) -> RowSpec:
    """A row with the given sampling fields."""
    return RowSpec(msgspec.convert(sampling, api.Sampling), choice, position, path, mask, logprobs)


def one(logits: list[float], spec: RowSpec) -> Drawn:
    """What is drawn from one row."""
    return draw(torch.tensor([logits]), [spec])[0]


def bitmask(vocab: int, allowed: set[int]) -> torch.Tensor:
    """The mask that allows these tokens."""
    words = [0] * ((vocab + 31) // 32)
    for token in allowed:
        words[token // 32] |= 1 << (token % 32)
    return torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)


# The definition once more, in double precision and plain Python.


def splitmix(state: int) -> int:
    """One output of SplitMix64 for a state that was already advanced."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def exponential(seed: int, choice: int, position: int, token: int) -> float:
    """The keyed noise of one token."""
    key = 0
    for part in (seed, choice, position):
        key = splitmix((key + part + 0x9E3779B97F4A7C15) & WORD)
    top = splitmix((key + (token + 1) * 0x9E3779B97F4A7C15) & WORD) >> 33
    return -math.log1p(-min((top + 0.5) / 2**31, 1 - 2**-24))


def processed(logits: list[float], spec: RowSpec, slack: float = 0.0) -> dict[int, float]:
    """Token → probability after everything in `spec` but the noise; `slack` moves the limit of top_p."""
    s = spec.sampling
    counts = Counter(spec.path)
    values = {
        t: v + s.logit_bias.get(t, 0) - s.frequency_penalty * counts[t] - s.presence_penalty * (counts[t] > 0)
        for t, v in enumerate(logits)
        if spec.mask is None or (int(spec.mask[t // 32]) >> (t % 32)) & 1
    }
    if s.top_k:
        values = {t: v for t, v in values.items() if sum(o > v for o in values.values()) < s.top_k}
    most = max(values.values())
    weights = {t: math.exp((v - most) / s.temperature) for t, v in values.items()}
    limit = s.top_p * sum(weights.values()) + slack
    above = {t: sum(weights[o] for o in values if values[o] > v) for t, v in values.items()}
    kept = {t: w for t, w in weights.items() if (s.top_p >= 1 or above[t] < limit or w == 1) and w >= s.min_p}
    total = sum(kept.values())
    return {t: w / total for t, w in kept.items()}


halves = st.integers(-8, 8).map(lambda n: n / 2)


@pytest.mark.thorough
@settings(deadline=None, max_examples=80)
@given(st.data())
def test_draw_follows_its_definition(data: st.DataObject) -> None:
    logits = data.draw(st.lists(halves, min_size=1, max_size=70))
    tokens = st.integers(0, len(logits) - 1)
    allowed = data.draw(st.none() | st.sets(tokens, min_size=1))
    spec = row(
        choice=data.draw(st.integers(0, 3)),
        position=data.draw(st.integers(0, 5000)),
        path=data.draw(st.lists(tokens, max_size=20)),
        mask=None if allowed is None else bitmask(len(logits), allowed),
        temperature=data.draw(st.sampled_from([0.1, 0.7, 1.0, 3.0])),
        top_k=data.draw(st.sampled_from([0, 1, 2, 5, 100])),
        top_p=data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.5, -1.0])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.5])),
        logit_bias=data.draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=4)),
        seed=data.draw(st.integers(-(2**63), 2**63 - 1)),
    )
    kept = processed(logits, spec)
    # A mass or a weight that meets its limit exactly is decided by rounding; so is a tie of two scores.
    assume(kept.keys() == processed(logits, spec, 1e-5).keys() == processed(logits, spec, -1e-5).keys())
    s = spec.sampling
    scores = sorted(
        ((p / exponential(s.seed, spec.choice, spec.position, t), t) for t, p in kept.items()), reverse=True
    )
    assume(len(scores) == 1 or scores[0][0] > scores[1][0] * (1 + 1e-5))
    assert one(logits, spec) == Drawn(scores[0][1], True, None)


def g_test(observed: Counter[int], expected: dict[int, float]) -> float:
    """The probability of a deviation at least this large (log-likelihood ratio test, chi-squared tail)."""
    draws = observed.total()
    if not set(observed) <= set(expected):
        return 0.0
    g = 2 * sum(n * math.log(n / (draws * expected[t])) for t, n in observed.items())
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(max(g, 0.0) / 2, dtype=torch.float64)))


LOGITS = [2.0, 1.5, 1.5, 1.0, 0.3, 0.0, -0.5, -1.0, -2.0, -6.0]
SPECS = {
    "plain": row(temperature=1.0),
    "hot": row(temperature=2.5),
    "top_k": row(temperature=0.8, top_k=3),
    "top_p": row(temperature=1.3, top_p=0.8),
    "everything": row(
        temperature=0.9,
        top_k=7,
        top_p=0.97,
        min_p=0.02,
        presence_penalty=0.7,
        frequency_penalty=0.2,
        logit_bias={6: 1.5},
        path=(0, 0, 3),
        mask=bitmask(len(LOGITS), set(range(10)) - {1}),
    ),
}


def observe(spec: RowSpec, draws: int) -> Counter[int]:
    """Counts tokens drawn under many seeds and positions."""
    rows = [
        replace(spec, position=i % 50, sampling=msgspec.structs.replace(spec.sampling, seed=i // 50))
        for i in range(draws)
    ]
    return Counter(d.token for d in draw(torch.tensor([LOGITS]).expand(draws, -1), rows))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_draws_follow_the_distribution(name: str) -> None:
    assert g_test(observe(SPECS[name], 1_000), processed(LOGITS, SPECS[name])) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_many_draws_follow_the_distribution(name: str) -> None:
    # Five names at 1e-5 each: a false alarm once in 20,000 changes of the noise.
    assert g_test(observe(SPECS[name], 20_000), processed(LOGITS, SPECS[name])) > 1e-5


@pytest.mark.thorough
def test_the_distribution_test_catches_wrong_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise.exponential
    monkeypatch.setattr(noise, "exponential", lambda integers: right(integers).sqrt())
    assert g_test(observe(SPECS["plain"], 1_000), processed(LOGITS, SPECS["plain"])) < 1e-9


def test_each_part_of_the_key_changes_the_noise() -> None:
    logits = torch.zeros(40, 1000)
    specs = [row(seed=s, choice=c, position=p) for s in range(5) for c in range(2) for p in range(4)]
    tokens = [d.token for d in draw(logits, specs)]
    assert len(set(tokens)) > 30
    assert tokens == [d.token for d in draw(logits, specs)]


@pytest.mark.parametrize("vocab", [1, 33, 1001, 5003])
def test_neighbours_do_not_matter(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(8, vocab, generator=generator) * 3
    kinds = (row(top_p=0.9), row(top_k=20), row(), row(min_p=0.1), row(temperature=0.0), row(temperature=1.5))
    specs = [replace(kinds[i % 6], choice=i, position=9) for i in range(8)]
    alone = [draw(logits[i : i + 1].clone(), [specs[i]])[0].token for i in range(8)]
    assert [d.token for d in draw(logits, specs)] == alone
    assert [d.token for d in draw(logits.flip(0), specs[::-1])] == alone[::-1]
    assert [d.token for d in draw(logits[2:5], specs[2:5])] == alone[2:5]


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert one([0.0, 3.0, 3.0, 3.0], row(temperature=0.0)).token == 1
    assert one([0.0, 3.0, 3.0, 3.0], row(temperature=0.0, mask=bitmask(4, {0, 2, 3}))).token == 2
    assert one([-0.0, 0.0], row(temperature=0.0)).token == 0


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-38, 1e-6])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    for seed in range(20):
        assert one([1.0, 5.0, 4.999, -300.0], row(temperature=temperature, seed=seed)) == Drawn(1, True, None)


@pytest.mark.thorough
@pytest.mark.parametrize("temperature", [1e6, 1e38, 1e300])
def test_huge_temperatures_are_uniform(temperature: float) -> None:
    seen = Counter(one([90.0, 5.0, -90.0, 0.0], row(temperature=temperature, seed=s)).token for s in range(400))
    assert g_test(seen, dict.fromkeys(range(4), 0.25)) > 1e-5


def test_rows_that_cannot_be_drawn_are_told_apart() -> None:
    good = [0.0, 1.0, 2.0]
    for temperature in (0.0, 1.0):
        rows = [row(temperature=temperature, logprobs=1) for _ in range(6)]
        rows[5] = row(temperature=temperature, mask=bitmask(3, set()))
        bad = [[0.0, bad, 1.0] for bad in (math.nan, math.inf, -math.inf)]
        drawn = draw(torch.tensor([good, *bad, good, good]), rows)
        assert [d.finite for d in drawn] == [True, False, False, False, True, False]
        assert drawn[0] == drawn[4]
        assert all(d == Drawn(-1, False, None) for d in drawn if not d.finite)


def test_penalties_count_the_path() -> None:
    logits = [3.0, 2.5, 0.0]
    assert one(logits, row(temperature=0.0)).token == 0
    assert one(logits, row(temperature=0.0, presence_penalty=0.6, path=(0,))).token == 1
    assert one(logits, row(temperature=0.0, frequency_penalty=0.2, path=(0, 0, 0))).token == 1
    assert one(logits, row(temperature=0.0, frequency_penalty=0.2, path=(0, 0))).token == 0
    assert one(logits, row(temperature=0.0, logit_bias={2: 100.0})).token == 2


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 4.0, -1.0]])
    before = logits.clone()
    spec = row(
        temperature=0.0, logit_bias={2: 50.0}, presence_penalty=2.0, path=(1,), mask=bitmask(5, {2, 4}), logprobs=3
    )
    drawn = draw(logits, [spec])[0]
    expected = torch.log_softmax(before[0].double(), 0)
    assert drawn.token == 2
    assert drawn.logprobs is not None
    assert drawn.logprobs.token == 2
    assert drawn.logprobs.logprob == pytest.approx(float(expected[2]), abs=1e-6)
    assert [t for t, _ in drawn.logprobs.top] == [1, 3, 2]
    assert [p for _, p in drawn.logprobs.top] == pytest.approx([float(expected[t]) for t in (1, 3, 2)], abs=1e-6)
    assert torch.equal(logits, before)


def test_logprobs_may_ask_for_none_or_for_more_than_there_are() -> None:
    few = one([0.0, 1.0], row(logprobs=0)).logprobs
    many = one([0.0, 1.0], row(logprobs=20)).logprobs
    assert few is not None
    assert many is not None
    assert few.top == ()
    assert [t for t, _ in many.top] == [1, 0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": math.nan}, "presence_penalty"),
        ({"logit_bias": {10: 1.0}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
    ],
)
def test_bad_values_are_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_sampling(msgspec.convert(fields, api.Sampling), vocab=10)
    assert caught.value.param == param
    assert param in caught.value.message


def test_good_values_pass() -> None:
    check_sampling(api.Sampling(temperature=2, top_p=0, top_k=5, logit_bias={9: -100}), vocab=10)


def test_a_wrong_number_of_rows_is_refused() -> None:
    assert draw(torch.zeros(0, 5), []) == []
    with pytest.raises(ValueError, match="2 rows"):
        draw(torch.zeros(1, 5), [row(), row()])


@pytest.mark.parametrize("vocab", [7, 64, 100, 4096, 49152])
def test_confidence_is_entropy_and_the_lead_of_the_likeliest(vocab: int) -> None:
    logits = 3 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    # The two likeliest in one group, in two groups, and equal ones.
    logits[0, [1, 2]] = torch.tensor([20.0, 19.5])
    logits[1, [1, vocab - 1]] = torch.tensor([20.0, 19.5])
    logits[2, [3, 4]] = 20.0
    for values, drawn in zip(logits, draw(logits, [replace(row(), confidence=True)] * 3), strict=True):
        exact = values.double().softmax(0)
        first, second = exact.topk(2).values.tolist()
        assert drawn.confidence == pytest.approx((-(exact * exact.log()).sum().item(), first - second), abs=2e-4)


def test_rows_drawn_one_by_one_are_those_drawn_together() -> None:
    logits = torch.randn(6, 50)
    rows = [row(position=at, temperature=at % 2, seed=at, logprobs=2) for at in range(6)]
    parts = drawn_in_parts(logits, rows, [1, 3, 2])
    assert [len(part) for part in parts] == [1, 3, 2]
    assert [part[at] for part in parts for at in reversed(range(len(part)))] == [
        draw(logits, rows)[at] for at in (0, 3, 2, 1, 5, 4)
    ]
