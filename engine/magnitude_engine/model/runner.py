"""Runs a model: assembles a decoder for a profile, allocates its cache, computes steps.

profile     weights                              cache        device
reference   float32, fixed tiles                 float32      CPU
packed      4/8-bit, a dense copy for many rows  bfloat16     CPU
native      the checkpoint's dtype               the same     GPU (or CPU)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from magnitude_engine.config import PAGE_TOKENS, Profile
from magnitude_engine.model.attention import Attention, GroupedAttention, SplitAttention
from magnitude_engine.model.batch import KeyValueCache, ModelShape, StepBatch, StepOutput
from magnitude_engine.model.decoder import Decoder, Embedding, HeadLane, Lane, LayerNorms
from magnitude_engine.model.fused import FusedAttention
from magnitude_engine.model.gguf import Blocks
from magnitude_engine.model.lanes import (
    LaneTable,
    dense_linears,
    faster_dense,
    measure_heads,
    measure_layers,
    packed_linears,
    single,
    tiled_linears,
)
from magnitude_engine.model.linear import Dense, Tiled, quantise_rows
from magnitude_engine.model.paged import PagedAttention
from magnitude_engine.model.pointwise import FastPointwise, FixedPointwise, KernelPointwise, Pointwise, Rotary
from magnitude_engine.model.weights import Checkpoint, LayerWeights, dense
from magnitude_kernels import dispatch

CPU = torch.device("cpu")


class Runner:
    """One model on one device; `forward` is called by one thread at a time.

    Attributes:
        shape: the sizes that cache and sampling need.
        profile: the numeric profile.
        device: where weights, cache and step tensors live.
        cache_dtype: the type of keys and values.
        lanes: which matrix forms serve how many rows, in words.
    """

    def __init__(self, decoder: Decoder, profile: Profile, context: int, device: torch.device) -> None:
        c = decoder.config
        self.shape = ModelShape(c.layers, c.kv_heads, c.head_dim, c.hidden, c.vocab, context)
        self.profile: Profile = profile
        self.device = device
        self.cache_dtype = {"reference": torch.float32, "packed": torch.bfloat16}.get(
            profile, decoder.lanes.layers(1).dtype
        )
        self.lanes = decoder.lanes.describe()
        self._decoder = decoder

    def allocate_cache(self, pages: int) -> KeyValueCache:
        """Returns zeroed keys and values for `pages` pages of `PAGE_TOKENS` tokens."""
        return KeyValueCache.allocate(self.shape, pages, PAGE_TOKENS, self.cache_dtype, self.device)

    def forward(self, batch: StepBatch, cache: KeyValueCache, layers: Sequence[int] | None = None) -> StepOutput:
        """Computes one step: writes its keys and values, returns the wanted rows' logits.

        `layers` names the layers that are computed (all by default); with fewer the logits are only a guess.
        """
        with torch.inference_mode():
            return self._decoder.forward(batch, cache, layers)

    def recapture(self) -> bool:
        """To be called between steps while nothing waits, until it returns False: prepares for steps like the last."""
        return False


def build_decoder(
    checkpoint: Checkpoint,
    profile: Profile,
    context: int,
    device: torch.device,
    dense_budget: int,
    progress: Callable[[float], None],
) -> Decoder:
    """Loads the weights in the forms of `profile`.

    `dense_budget` is how many bytes the packed profile may use for its dense copy; `progress` gets 0..1.
    """
    c = checkpoint.config
    exact = profile == "reference"
    pointwise: Pointwise = FixedPointwise(c.epsilon) if exact else FastPointwise.build(c, device)
    attention: Attention
    if exact:
        attention = SplitAttention.build(c.heads, c.kv_heads)
    elif device.type == "cpu":
        attention = FusedAttention.build(c.heads, c.kv_heads, c.head_dim)
    else:
        attention = GroupedAttention(c.heads // c.kv_heads)
    if profile == "native" and device.type == "cuda" and dispatch.HAS_TRITON:
        pointwise, attention = KernelPointwise(c.epsilon), PagedAttention()
    norms: list[LayerNorms] = []

    def layer(index: int) -> LayerWeights:
        weights = checkpoint.layer(index)
        both = (pointwise.prepared(w.float()).to(device) for w in (weights.attention_norm, weights.ffn_norm))
        norms.append(LayerNorms(*both))
        progress((index + 1) / c.layers)
        return weights

    if profile == "reference":
        lanes = single(
            [tiled_linears(layer(i)) for i in range(c.layers)], Tiled(_head(checkpoint)), torch.float32, "float32 tiles"
        )
    elif profile == "native":
        dtype = checkpoint.weight_dtype
        linears = [dense_linears(layer(i), dtype, device) for i in range(c.layers)]
        lanes = single(linears, Dense(_head(checkpoint).to(dtype).to(device)), dtype, str(dtype).removeprefix("torch."))
    else:
        lanes = _packed_lanes(checkpoint, layer, dense_budget)
    return Decoder(
        config=c,
        embedding=_embedding(checkpoint, profile, device),
        norms=tuple(norms),
        final_norm=pointwise.prepared(checkpoint.final_norm().float()).to(device),
        rotary=Rotary.build(c, context, checkpoint.rope_factors(), device),
        lanes=lanes,
        pointwise=pointwise,
        attention=attention,
    )


def _packed_lanes(checkpoint: Checkpoint, layer: Callable[[int], LayerWeights], dense_budget: int) -> LaneTable:
    """Packs the layers, adds a dense copy where it fits, and measures where it takes over."""
    c = checkpoint.config
    dtype = faster_dense(checkpoint.layer(0), c)
    values = c.layers * (c.hidden * c.head_dim * 2 * (c.heads + c.kv_heads) + 3 * c.hidden * c.ffn) + c.vocab * c.hidden
    copied = values * dtype.itemsize <= dense_budget
    packed, copies = [], []
    for index in range(c.layers):
        weights = layer(index)
        packed.append(packed_linears(weights))
        if copied:
            copies.append(dense_linears(weights, dtype, CPU))
    weight = _head(checkpoint)
    head = quantise_rows(weight)
    few = single(packed, head, torch.bfloat16, "packed")
    if not copied:
        return few
    name = str(dtype).removeprefix("torch.")
    many = Lane(name, dtype, tuple(copies))
    head_many = HeadLane(name, dtype, Dense(weight.to(dtype)))
    with torch.inference_mode():
        many_from = measure_layers(few.few, many, c)
        head_many_from = measure_heads(few.head_few, head_many, c)
    return LaneTable(few.few, many, many_from, few.head_few, head_many, head_many_from)


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
