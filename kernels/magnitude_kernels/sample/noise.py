"""Keyed noise: a pure function of (seed, choice, position, token id), without any state.

`row_key` hashes (seed, choice, position) to 64 bits; `bits` is the top 31 bits of output number `token id` of
the SplitMix64 stream that starts at that key (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). The integers are the same on every device. `exponential` turns them into Exp(1)
variates e; -log(e) is Gumbel noise, so that the row's token is argmax(w / e) for weights w.
"""

from __future__ import annotations

import torch

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

# The largest 24-bit fraction below 1: float32 rounds the topmost integers up to 1, where log1p(-v) has no value.
LARGEST_FRACTION = 1 - 2.0**-24


def signed(word: int) -> int:
    """Returns a 64-bit word as the int64 with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def mix(word: int) -> int:
    """Returns SplitMix64's output function of a 64-bit word."""
    word = ((word ^ (word >> 30)) * _MIX_1) & _WORD
    word = ((word ^ (word >> 27)) * _MIX_2) & _WORD
    return word ^ (word >> 31)


def row_key(seed: int, choice: int, position: int) -> int:
    """Returns the key of one row as an int64; negative and oversized seeds count modulo 2**64."""
    key = 0
    for word in (seed, choice, position):
        key = mix((key + word + _GOLDEN) & _WORD)
    return signed(key)


def bits(key: int, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the noise integers of `tokens` (int64 [n]) under `key`: int64 [n], uniform over 0 .. 2**31 - 1."""
    word = tokens * signed(_GOLDEN)
    word += signed((key + _GOLDEN) & _WORD)
    shifted = torch.empty_like(word)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        # A right shift of int64 copies the sign; the mask makes it the unsigned shift that SplitMix64 means.
        torch.bitwise_right_shift(word, shift, out=shifted)
        word ^= shifted.bitwise_and_((1 << (64 - shift)) - 1)
        word *= signed(factor)
    # SplitMix64's last step, word ^ word >> 31, leaves the top 31 bits as they are.
    word >>= 33
    word &= (1 << 31) - 1
    return word


def exponential(integers: torch.Tensor) -> torch.Tensor:
    """Returns float32 Exp(1) variates of noise integers: -log(1 - v) with v = (integer + 1/2) / 2**31.

    Small variates, which decide who wins, keep float32's full relative precision.
    """
    fraction = integers.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_FRACTION)
    return fraction.neg_().log1p_().neg_()
