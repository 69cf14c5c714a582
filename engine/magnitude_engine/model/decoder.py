"""The Llama decoder: one forward pass over the rows of a step.

    ids → embedding → [ norm → q k v → rotary → cache → attention → out → norm → gated feed-forward ] × layers
        → wanted rows only → norm → head

How a profile multiplies, normalises and attends is passed in; the order of operations is written once, here. The
residual stream is float32 in every profile; a lane's dtype is that of its matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from magnitude_engine.model.attention import Attention
from magnitude_engine.model.batch import KeyValueCache, StepBatch, StepOutput
from magnitude_engine.model.gguf import GROUP, Blocks
from magnitude_engine.model.linear import Linear, in_tiles
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
    """One form of all layers' matrices; inputs have `dtype`."""

    name: str
    dtype: torch.dtype
    layers: tuple[LayerLinears, ...]


@dataclass(frozen=True, slots=True)
class HeadLane:
    """One form of the output matrix; its input has `dtype`."""

    name: str
    dtype: torch.dtype
    linear: Linear


class Lanes(Protocol):
    """Which form serves how many rows."""

    def describe(self) -> str:
        """Returns the choice in words."""

    def layers(self, rows: int) -> Lane:
        """Returns the layers' form for a step of `rows` rows."""

    def head(self, rows: int) -> HeadLane:
        """Returns the head's form for `rows` wanted rows."""


class Pointwise(Protocol):
    """The row-wise functions of a layer."""

    def prepared(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns a norm's weight in the form that `norm` takes."""

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns h / sqrt(mean(h²) + epsilon) * weight for float32 [rows, hidden] and a prepared weight."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up for [rows, 2 * ffn]."""


@dataclass(frozen=True, slots=True)
class FastPointwise:
    """As few operations as there can be: at one row, each costs more to start than to run.

    With n columns, sqrt(mean(h²) + epsilon) is hypot(|h|, floor) / sqrt(n), where floor = sqrt(n * epsilon);
    the weight takes up the sqrt(n).
    """

    floor: torch.Tensor

    @classmethod
    def build(cls, config: LlamaConfig, device: torch.device) -> FastPointwise:
        """Returns the functions for a model."""
        return cls(torch.tensor(math.sqrt(config.hidden * config.epsilon), device=device))

    def prepared(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the weight times the root of its length."""
        return weight * math.sqrt(weight.shape[0])

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the normalised rows."""
        length = torch.hypot(torch.linalg.vector_norm(h, dim=-1, keepdim=True), self.floor)
        return h.div(length).mul_(weight)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns the gated rows."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class FixedPointwise:
    """Fixed shapes, so that a row's bits depend on nothing beside it.

    Vector code and the scalar code of its remainders round exponentials differently; where a remainder falls
    depends on the shape of the whole tensor. Sums go in fixed tiles, the exponential row by row.
    """

    epsilon: float

    def prepared(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the weight as it is."""
        return weight

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the normalised rows."""

        def tile(x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)

        return in_tiles(tile, h) * weight

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns the gated rows."""
        gate, up = gate_up.chunk(2, -1)
        return torch.stack([functional.silu(row.clone()) for row in gate]) * up


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position tables, float32 [context, head_dim]: cosines, and sines with the first half negated."""

    cosine: torch.Tensor
    sine: torch.Tensor

    @classmethod
    def build(cls, config: LlamaConfig, context: int, factors: torch.Tensor | None, device: torch.device) -> Rotary:
        """Returns tables for positions 0..context-1, computed in float64."""
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
        frequency = config.rope_base**-exponent
        if factors is not None:
            frequency = frequency / factors.double()
        angle = torch.arange(context, dtype=torch.float64)[:, None] * frequency
        cosine, sine = angle.cos().float(), angle.sin().float()
        return cls(torch.cat([cosine, cosine], -1).to(device), torch.cat([-sine, sine], -1).to(device))


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
    lanes: Lanes
    pointwise: Pointwise
    attention: Attention

    def forward(self, batch: StepBatch, cache: KeyValueCache) -> StepOutput:
        """Writes the step's keys and values into `cache` and returns the wanted rows' logits."""
        lane = self.lanes.layers(batch.ids.shape[0])
        plan = self.attention.plan(batch, cache.keys[0].dtype)
        turn = self._turn(batch.positions)
        h = self.embedding(batch.ids)
        for index, (linears, norms) in enumerate(zip(lane.layers, self.norms, strict=True)):
            qkv = linears.qkv(self.pointwise.norm(h, norms.attention).to(lane.dtype))
            q = self._store(qkv, turn, batch.slots, (cache.keys[index], cache.values[index]))
            attended = self.attention(q, cache.keys[index], cache.values[index], plan)
            h += linears.out(attended.to(lane.dtype))
            x = self.pointwise.norm(h, norms.ffn).to(lane.dtype)
            h += linears.down(self.pointwise.gate(linears.gate_up(x)))
        return self._finish(h[batch.logit_rows])

    def _turn(self, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Returns the rotation of these positions, for [rows, heads, head_dim]."""
        cosine, sine = self.rotary.cosine[positions][:, None], self.rotary.sine[positions][:, None]
        half = self.config.head_dim // 2
        return lambda x: (x * cosine).add_(x.roll(half, -1).mul_(sine))

    def _store(
        self,
        qkv: torch.Tensor,
        turn: Callable[[torch.Tensor], torch.Tensor],
        slots: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Writes keys and values at their slots; returns the rotated queries [rows, heads, head_dim]."""
        c = self.config
        heads = qkv.view(qkv.shape[0], c.heads + 2 * c.kv_heads, c.head_dim)
        turned = turn(heads[:, : c.heads + c.kv_heads].float())
        keys, values = cache
        keys.flatten(0, 1).index_copy_(0, slots, turned[:, c.heads :].to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, slots, heads[:, c.heads + c.kv_heads :].to(values.dtype))
        return turned[:, : c.heads]

    def _finish(self, hidden: torch.Tensor) -> StepOutput:
        """Returns float32 logits of the given rows, and their normalised activations."""
        if not hidden.shape[0]:
            return StepOutput(hidden.new_empty((0, self.config.vocab)), hidden)
        hidden = self.pointwise.norm(hidden, self.final_norm)
        lane = self.lanes.head(hidden.shape[0])
        return StepOutput(lane.linear(hidden.to(lane.dtype)).float(), hidden)
