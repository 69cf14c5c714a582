"""The Llama decoder: one forward pass over the rows of a step.

    ids → embedding → [ norm → q k v → rotary → cache → attention → out → norm → gated feed-forward ] × layers
        → wanted rows only → norm → head

How a profile multiplies, normalises and attends is passed in; the order of operations is written once, here. The
residual stream is float32 in every profile; a lane's dtype is that of its matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from magnitude_engine.model.attention import Attention
from magnitude_engine.model.batch import KeyValueCache, StepBatch, StepOutput
from magnitude_engine.model.gguf import GROUP, Blocks
from magnitude_engine.model.linear import Linear
from magnitude_engine.model.pointwise import Pointwise, Rotary
from magnitude_engine.model.weights import LlamaConfig, Matrix


class LayerLinears(NamedTuple):
    """The four matrix products of a layer; q, k and v are stacked, so are gate and up."""

    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class LayerNorms(NamedTuple):
    """The two norm weights of a layer, float32 [hidden]."""

    attention: torch.Tensor
    ffn: torch.Tensor


@dataclass(frozen=True, slots=True)
class Lane:
    """A model's matrices in one form; inputs have `dtype`."""

    name: str
    dtype: torch.dtype
    layers: tuple[LayerLinears, ...]
    head: Linear


class Model(Protocol):
    """What computes steps.

    Attributes:
        config: the model's sizes.
        description: how it multiplies, in words.
        cache_dtype: of keys and values.
    """

    @property
    def config(self) -> LlamaConfig: ...
    @property
    def description(self) -> str: ...
    @property
    def cache_dtype(self) -> torch.dtype: ...

    def forward(self, batch: StepBatch, cache: KeyValueCache, layers: Sequence[int] | None = None) -> StepOutput:
        """Writes the step's keys and values into `cache` and returns the wanted rows' logits."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embeddings, kept as stored: a dense matrix, or blocks decoded row by row."""

    matrix: Matrix

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns float32 [rows, hidden]."""
        if not isinstance(self.matrix, Blocks):
            return self.matrix[ids].float()
        codes, scale, minimum = self.matrix.codes[ids], self.matrix.scale[ids], self.matrix.minimum[ids]
        grouped = codes.float().view(*scale.shape, GROUP)
        return (grouped * scale[..., None] + minimum[..., None]).flatten(-2)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's layers and the profile's ways to compute them."""

    config: LlamaConfig
    embedding: Embedding
    norms: tuple[LayerNorms, ...]
    final_norm: torch.Tensor
    rotary: Rotary
    lane: Lane
    pointwise: Pointwise
    attention: Attention

    @property
    def description(self) -> str:
        """How it multiplies, in words."""
        return self.lane.name

    @property
    def cache_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        return self.lane.dtype

    def forward(self, batch: StepBatch, cache: KeyValueCache, layers: Sequence[int] | None = None) -> StepOutput:
        """Writes the step's keys and values into `cache` and returns the wanted rows' logits.

        `layers` names the layers that are computed, in order: all by default, fewer for a cheap guess.
        """
        lane = self.lane
        plan = self.attention.plan(batch, cache.keys[0].dtype)
        place = self.pointwise.placing(batch, self.rotary, self.config)
        h = self.embedding(batch.ids)
        added: torch.Tensor | None = None
        for index in range(self.config.layers) if layers is None else layers:
            linears, norms = lane.layers[index], self.norms[index]
            keys, values = cache.keys[index], cache.values[index]
            qkv = linears.qkv(self.pointwise.add_norm(h, added, norms.attention, lane.dtype))
            attended = self.attention(place(qkv, keys, values), keys, values, plan)
            out = linears.out(attended.to(lane.dtype))
            x = self.pointwise.add_norm(h, out, norms.ffn, lane.dtype)
            added = linears.down(self.pointwise.gate(linears.gate_up(x)))
        if added is not None:
            h += added
        return self._finish(h[batch.logit_rows])

    def _finish(self, hidden: torch.Tensor) -> StepOutput:
        """Returns float32 logits of the given rows, and their normalised activations."""
        if not hidden.shape[0]:
            return StepOutput(hidden.new_empty((0, self.config.vocab)), hidden)
        hidden = self.pointwise.norm(hidden, self.final_norm)
        return StepOutput(self.lane.head(hidden.to(self.lane.dtype)).float(), hidden)
