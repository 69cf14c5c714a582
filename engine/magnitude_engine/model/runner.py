"""Runs a model: assembles a model for a profile, allocates its cache, computes steps.

profile     weights                              cache        device
reference   float32, fixed tiles                 float32      CPU
packed      4/8-bit, compiled code               bfloat16     CPU
native      the checkpoint's dtype               the same     GPU (or CPU)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from magnitude_engine.config import PAGE_TOKENS, Profile
from magnitude_engine.model.attention import Attention, GroupedAttention, SplitAttention
from magnitude_engine.model.batch import KeyValueCache, ModelShape, StepBatch, StepOutput
from magnitude_engine.model.decoder import Decoder, Embedding, Lane, LayerLinears, LayerNorms, Model
from magnitude_engine.model.fused import FusedAttention
from magnitude_engine.model.gguf import Blocks
from magnitude_engine.model.lanes import dense_linears, tiled_linears
from magnitude_engine.model.linear import Dense, Tiled
from magnitude_engine.model.packed import packed_model
from magnitude_engine.model.paged import PagedAttention
from magnitude_engine.model.pointwise import FastPointwise, FixedPointwise, KernelPointwise, Pointwise, Rotary
from magnitude_engine.model.weights import Checkpoint, LlamaConfig, dense
from magnitude_kernels import dispatch


class Runner:
    """One model on one device; `forward` is called by one thread at a time.

    Attributes:
        shape: the sizes that cache and sampling need.
        profile: the numeric profile.
        device: where weights, cache and step tensors live.
        cache_dtype: the type of keys and values.
        description: how the model multiplies, in words.
    """

    def __init__(self, model: Model, profile: Profile, context: int, device: torch.device) -> None:
        c = model.config
        self.shape = ModelShape(c.layers, c.kv_heads, c.head_dim, c.hidden, c.vocab, context)
        self.profile: Profile = profile
        self.device = device
        self.cache_dtype = model.cache_dtype
        self.description = model.description
        self._model = model

    def allocate_cache(self, pages: int) -> KeyValueCache:
        """Returns zeroed keys and values for `pages` pages of `PAGE_TOKENS` tokens."""
        return KeyValueCache.allocate(self.shape, pages, PAGE_TOKENS, self.cache_dtype, self.device)

    def forward(self, batch: StepBatch, cache: KeyValueCache, layers: Sequence[int] | None = None) -> StepOutput:
        """Computes one step: writes its keys and values, returns the wanted rows' logits.

        `layers` names the layers that are computed (all by default); with fewer the logits are only a guess.
        """
        with torch.inference_mode():
            return self._model.forward(batch, cache, layers)

    def recapture(self) -> bool:
        """To be called between steps while nothing waits, until it returns False: prepares for steps like the last."""
        return False


def build_model(
    checkpoint: Checkpoint, profile: Profile, context: int, device: torch.device, progress: Callable[[float], None]
) -> Model:
    """Loads the weights in the form of `profile`; `progress` gets 0..1.

    Raises:
        ModelUnsupported: sizes that the profile does not take.
    """
    if profile != "packed":
        return build_decoder(checkpoint, profile, context, device, progress)
    rotary = Rotary.build(checkpoint.config, context, checkpoint.rope_factors(), device)
    return packed_model(checkpoint, rotary, _embedding(checkpoint, profile, device), progress)


def build_decoder(
    checkpoint: Checkpoint, profile: Profile, context: int, device: torch.device, progress: Callable[[float], None]
) -> Decoder:
    """Loads the weights in the form of `reference` or `native`; `progress` gets 0..1."""
    c = checkpoint.config
    pointwise, attention = _functions(c, profile, device)
    dtype = torch.float32 if profile == "reference" else checkpoint.weight_dtype
    linears: list[LayerLinears] = []
    norms: list[LayerNorms] = []
    for index in range(c.layers):
        weights = checkpoint.layer(index)
        both = (pointwise.prepared(w.float()).to(device) for w in (weights.attention_norm, weights.ffn_norm))
        norms.append(LayerNorms(*both))
        linears.append(tiled_linears(weights) if profile == "reference" else dense_linears(weights, dtype, device))
        progress((index + 1) / c.layers)
    head = _head(checkpoint)
    if profile == "reference":
        lane = Lane("float32 tiles", dtype, tuple(linears), Tiled(head))
    else:
        lane = Lane(str(dtype).removeprefix("torch."), dtype, tuple(linears), Dense(head.to(dtype).to(device)))
    return Decoder(
        config=c,
        embedding=_embedding(checkpoint, profile, device),
        norms=tuple(norms),
        final_norm=pointwise.prepared(checkpoint.final_norm().float()).to(device),
        rotary=Rotary.build(c, context, checkpoint.rope_factors(), device),
        lane=lane,
        pointwise=pointwise,
        attention=attention,
    )


def _functions(c: LlamaConfig, profile: Profile, device: torch.device) -> tuple[Pointwise, Attention]:
    """Returns what lies between the products, for `reference` and `native`."""
    if profile == "reference":
        return FixedPointwise(c.epsilon), SplitAttention.build(c.heads, c.kv_heads)
    if device.type == "cpu":
        return FastPointwise.build(c, device), FusedAttention.build(c.heads, c.kv_heads, c.head_dim)
    if device.type == "cuda" and dispatch.HAS_TRITON:
        return KernelPointwise(c.epsilon), PagedAttention()
    return FastPointwise.build(c, device), GroupedAttention(c.heads // c.kv_heads)


def _head(checkpoint: Checkpoint) -> torch.Tensor:
    """Returns the output matrix as float32, [vocab, hidden]."""
    head = checkpoint.head()
    return dense(checkpoint.embedding() if head is None else head)


def _embedding(checkpoint: Checkpoint, profile: Profile, device: torch.device) -> Embedding:
    """Returns the embeddings as stored, or in the native dtype on its device."""
    matrix = checkpoint.embedding()
    if profile == "native":
        return Embedding(dense(matrix).to(checkpoint.weight_dtype).to(device))
    return Embedding(matrix if isinstance(matrix, Blocks) else matrix.to(torch.float32))
