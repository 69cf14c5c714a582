"""The tiny model as it runs on a GPU: native profile, paged attention."""

from __future__ import annotations

from dataclasses import replace

import torch

from magnitude_engine.model.decoder import Decoder
from magnitude_engine.model.paged import PagedAttention
from magnitude_engine.model.runner import build_decoder
from magnitude_engine.model.weights import LlamaConfig
from testkit.tiny import TINY_VOCAB, RandomLlama

CONTEXT = 512
_CONFIG = LlamaConfig(
    layers=2,
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


def paged_decoder(device: torch.device) -> Decoder:
    """Returns the decoder in float32 on `device`."""
    checkpoint = RandomLlama(_CONFIG, 0, torch.float32)
    decoder = build_decoder(checkpoint, "native", CONTEXT, device, lambda fraction: None)
    return replace(decoder, attention=PagedAttention())
