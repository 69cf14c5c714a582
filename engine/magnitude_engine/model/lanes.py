"""A checkpoint's matrices in a profile's form."""

from __future__ import annotations

import torch

from magnitude_engine.model.decoder import LayerLinears
from magnitude_engine.model.linear import Dense, Tiled, stack_dense
from magnitude_engine.model.weights import LayerWeights, Matrix

CPU = torch.device("cpu")


def dense_linears(layer: LayerWeights, dtype: torch.dtype, device: torch.device) -> LayerLinears:
    """Returns a layer in dense form."""
    return LayerLinears(*(Dense(stack_dense(s, dtype, device)) for s in _stacks(layer)))


def tiled_linears(layer: LayerWeights) -> LayerLinears:
    """Returns a layer in the reference form."""
    return LayerLinears(*(Tiled(stack_dense(s, torch.float32, CPU)) for s in _stacks(layer)))


def _stacks(layer: LayerWeights) -> tuple[tuple[Matrix, ...], ...]:
    """Returns the matrices that multiply the same input together, in the order of `LayerLinears`."""
    return ((layer.q, layer.k, layer.v), (layer.out,), (layer.gate, layer.up), (layer.down,))
