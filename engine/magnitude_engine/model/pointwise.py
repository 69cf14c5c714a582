"""What a layer does row by row between its matrix products: norms, rotary with the cache write, the gate.

`FastPointwise` takes as few of torch's operations as there can be, `FixedPointwise` gives a row the same bits
whatever stands beside it, `KernelPointwise` takes the kernels of `norm_rope_write`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from magnitude_engine.model.batch import StepBatch
from magnitude_engine.model.linear import in_tiles
from magnitude_engine.model.weights import LlamaConfig
from magnitude_kernels import dispatch
from magnitude_kernels.norm_rope_write.reference import Places


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


# Takes a layer's qkv rows, keys and values; writes the rows' keys and values, returns the turned queries
# [rows, heads, head_dim].
Placing = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Pointwise(Protocol):
    """The row-wise functions of a layer."""

    def prepared(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns a norm's weight in the form that `norm` takes."""

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns h / sqrt(mean(h²) + epsilon) * weight for float32 [rows, hidden] and a prepared weight."""

    def add_norm(
        self, h: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Adds `x` to the stream `h` in place, and returns its norm in `dtype`."""

    def placing(self, batch: StepBatch, rotary: Rotary, config: LlamaConfig) -> Placing:
        """Returns how this step's queries, keys and values are turned and written."""

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up for [rows, 2 * ffn]."""


def plain_placing(batch: StepBatch, rotary: Rotary, config: LlamaConfig) -> Placing:
    """Returns the turning and writing of a step by torch's own operations; queries stay float32."""
    cosine, sine = rotary.cosine[batch.positions][:, None], rotary.sine[batch.positions][:, None]
    heads, kv_heads, head_dim = config.heads, config.kv_heads, config.head_dim

    def place(qkv: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        split = qkv.view(qkv.shape[0], heads + 2 * kv_heads, head_dim)
        x = split[:, : heads + kv_heads].float()
        turned = (x * cosine).add_(x.roll(head_dim // 2, -1).mul_(sine))
        keys.flatten(0, 1).index_copy_(0, batch.slots, turned[:, heads:].to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, batch.slots, split[:, heads + kv_heads :].to(values.dtype))
        return turned[:, :heads]

    return place


class TorchPointwise(ABC):
    """What the forms by torch's own operations have in common."""

    __slots__ = ()

    @abstractmethod
    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the normalised rows."""

    def add_norm(
        self, h: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Adds `x` to the stream `h` in place, and returns its norm in `dtype`."""
        if x is not None:
            h += x
        return self.norm(h, weight).to(dtype)

    def placing(self, batch: StepBatch, rotary: Rotary, config: LlamaConfig) -> Placing:
        """Returns how this step's queries, keys and values are turned and written."""
        return plain_placing(batch, rotary, config)


@dataclass(frozen=True, slots=True)
class FastPointwise(TorchPointwise):
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
class KernelPointwise:
    """One kernel for what lies between two matrix products; for GPUs."""

    epsilon: float

    def prepared(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the weight as it is."""
        return weight

    def norm(self, h: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Returns the normalised rows."""
        return dispatch.add_norm(h, None, weight, self.epsilon, torch.float32)

    def add_norm(
        self, h: torch.Tensor, x: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Adds `x` to the stream `h` in place, and returns its norm in `dtype`."""
        return dispatch.add_norm(h, x, weight, self.epsilon, dtype)

    def placing(self, batch: StepBatch, rotary: Rotary, config: LlamaConfig) -> Placing:
        """Returns how this step's queries, keys and values are turned and written; queries have the cache's dtype."""
        places = Places(batch.positions, batch.slots, rotary.cosine, rotary.sine)
        return lambda qkv, keys, values: dispatch.rope_write(qkv, places, keys, values)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns the gated rows."""
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)


@dataclass(frozen=True, slots=True)
class FixedPointwise(TorchPointwise):
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
