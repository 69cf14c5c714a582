"""The row-wise functions of a layer: the kernels' form against torch's own, through the whole decoder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from magnitude_engine.model.decoder import Decoder
from magnitude_engine.model.pointwise import KernelPointwise
from magnitude_engine.model.runner import Runner, build_decoder
from magnitude_engine.model.weights import LlamaConfig
from testkit.steps import Walk, step
from testkit.tiny import TINY_VOCAB, RandomLlama

CPU = torch.device("cpu")
CONTEXT = 256
CONFIG = LlamaConfig(
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden=32,
    ffn=64,
    vocab=TINY_VOCAB,
    context=CONTEXT,
    epsilon=1e-5,
    rope_base=10_000.0,
)


def decoder_of(dtype: torch.dtype) -> Decoder:
    """Returns the native decoder."""
    return build_decoder(RandomLlama(CONFIG, 0, dtype), "native", CONTEXT, CPU, lambda fraction: None)


def with_kernels(decoder: Decoder) -> Decoder:
    """Returns the same model with the kernels' functions, whose norms take their weights as they are."""
    pointwise = KernelPointwise(CONFIG.epsilon)
    root = CONFIG.hidden**0.5
    norms = tuple(type(n)(*(w / root for w in n)) for n in decoder.norms)
    return replace(decoder, pointwise=pointwise, norms=norms, final_norm=decoder.final_norm / root)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str)
def test_the_kernels_form_stays_close(dtype: torch.dtype, tolerance: float) -> None:
    plain = decoder_of(dtype)
    found, expected = [], []
    for decoder, rows in ((with_kernels(plain), found), (plain, expected)):
        runner = Runner(decoder, "native", CONTEXT, CPU)
        cache = runner.allocate_cache(16)
        ids = torch.randint(0, TINY_VOCAB, (2, 60), generator=torch.Generator().manual_seed(4)).tolist()
        walks = [Walk(ids[0], range(6)), Walk(ids[1], range(6, 12))]
        for counts in ((40, 3), (1, 1), (1, 7)):
            rows += step(runner, cache, list(zip(walks, counts, strict=True)))
    mine, theirs = torch.cat(found), torch.cat(expected)
    assert float((mine - theirs).norm() / theirs.norm()) < tolerance
