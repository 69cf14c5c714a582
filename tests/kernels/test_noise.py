"""The noise is SplitMix64's, and stays what it was: answers are resumed from it."""

from __future__ import annotations

import torch

from magnitude_kernels.sample import noise

# The first outputs of SplitMix64 from state 1234567, as published with the algorithm's reference code.
KNOWN = (
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
)

KEY_OF_ZEROS = 2558736989570252433


def test_integers_are_those_of_splitmix64() -> None:
    assert noise.bits(1234567, torch.arange(5)).tolist() == [word >> 33 for word in KNOWN]
    assert [noise.mix((1234567 + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) for i in range(5)] == list(KNOWN)


def test_integers_do_not_depend_on_the_selection() -> None:
    for key in (0, -1, -(2**63), 2**63 - 1, 99):
        every = noise.bits(key, torch.arange(1000))
        assert torch.equal(noise.bits(key, torch.tensor([3, 999, 0])), every[[3, 999, 0]])
        assert 0 <= int(every.min()) < 2**27
        assert 2**31 - 2**27 < int(every.max()) < 2**31


def test_keys_stay_what_they_were() -> None:
    assert noise.row_key(0, 0, 0) == KEY_OF_ZEROS
    assert noise.row_key(-1, 0, 5) == noise.row_key(2**64 - 1, 0, 5)
    keys = {noise.row_key(s, c, p) for s in range(20) for c in range(20) for p in range(20)}
    assert len(keys) == 8000
    assert all(-(2**63) <= key < 2**63 for key in keys)


def test_exponentials_keep_their_precision() -> None:
    edges = torch.tensor([0, 1, 2, 1000, 2**20, 2**30, 2**31 - 2**7, 2**31 - 1])
    integers = torch.cat([edges, noise.bits(5, torch.arange(20_000))])
    fractions = ((integers.double() + 0.5) / 2**31).clamp(max=noise.LARGEST_FRACTION)
    exact = -torch.log1p(-fractions)
    # Next to 1 float32 can say no more than its 24 bits; there the variate is large and cannot win.
    near_one = fractions > 1 - 2.0**-12
    error = ((noise.exponential(integers).double() - exact) / exact).abs()
    assert float(error[~near_one].max()) < 1e-3
    assert float(error[fractions < 0.5].max()) < 2e-7
    assert bool(noise.exponential(integers).isfinite().all())
