"""Builds a profile's matrix forms from a checkpoint, and measures which form serves how many rows.

The packed profile keeps the 4-bit codes for few rows and, where memory allows, a dense copy for many. Which of
float32 and bfloat16 the copy has, and where it takes over, differs between processors by an order of magnitude,
so both are measured at load.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from magnitude_engine.model.decoder import HeadLane, Lane, LayerLinears
from magnitude_engine.model.gguf import Blocks
from magnitude_engine.model.linear import Dense, Linear, Tiled, pack4, packable, quantise_rows, stack_dense
from magnitude_engine.model.weights import LayerWeights, LlamaConfig, Matrix

_PROBED_ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 64)
_PROBED_LAYERS = 8  # Enough that their weights do not all stay in the processor's cache.
_PROBE_ROUNDS = 5
_PROBE_SECONDS = 0.4  # A busy machine gets fewer rounds rather than a late start.
_MANY_ROWS = 128


@dataclass(frozen=True, slots=True)
class LaneTable:
    """Few rows go to one form, from a row count on to another.

    Attributes:
        few, many: the layers' forms; the same object where there is one.
        many_from: rows from which `many` serves.
        head_few, head_many, head_many_from: the same for the output matrix.
    """

    few: Lane
    many: Lane
    many_from: int
    head_few: HeadLane
    head_many: HeadLane
    head_many_from: int

    def layers(self, rows: int) -> Lane:
        """Returns the layers' form for a step of `rows` rows."""
        return self.many if rows >= self.many_from else self.few

    def head(self, rows: int) -> HeadLane:
        """Returns the head's form for `rows` wanted rows."""
        return self.head_many if rows >= self.head_many_from else self.head_few

    def describe(self) -> str:
        """Returns the choice in words, for the log."""
        if self.few is self.many:
            return self.few.name
        return (
            f"layers {self.few.name}, {self.many.name} from {self.many_from} rows; "
            f"head {self.head_few.name}, {self.head_many.name} from {self.head_many_from} rows"
        )


def stacks(layer: LayerWeights) -> tuple[tuple[Matrix, ...], ...]:
    """Returns the matrices that multiply the same input together, in the order of `LayerLinears`."""
    return ((layer.q, layer.k, layer.v), (layer.out,), (layer.gate, layer.up), (layer.down,))


def single(layers: Sequence[LayerLinears], head: Linear, dtype: torch.dtype, name: str) -> LaneTable:
    """Returns a table with one form for every number of rows."""
    lane, head_lane = Lane(name, dtype, tuple(layers)), HeadLane(name, dtype, head)
    return LaneTable(lane, lane, 1, head_lane, head_lane, 1)


def dense_linears(layer: LayerWeights, dtype: torch.dtype, device: torch.device) -> LayerLinears:
    """Returns a layer in dense form."""
    return LayerLinears(*(Dense(stack_dense(s, dtype, device)) for s in stacks(layer)))


def tiled_linears(layer: LayerWeights) -> LayerLinears:
    """Returns a layer in the reference form."""
    return LayerLinears(*(Tiled(stack_dense(s, torch.float32, torch.device("cpu"))) for s in stacks(layer)))


def packed_linears(layer: LayerWeights) -> LayerLinears:
    """Returns a layer in 4 bits where it is stored so, in 8-bit rows where 8, else dense bfloat16."""
    return LayerLinears(*(_packed(s) for s in stacks(layer)))


def _packed(matrices: Sequence[Matrix]) -> Linear:
    if packable(matrices):
        return pack4(matrices)
    if len(matrices) == 1 and isinstance(matrices[0], Blocks) and matrices[0].bits == 8:
        return quantise_rows(matrices[0])
    return Dense(stack_dense(matrices, torch.bfloat16, torch.device("cpu")))


def measure_layers(few: Lane, many: Lane, config: LlamaConfig) -> int:
    """Returns the row count from which `many` is faster on this machine."""

    def run(lane: Lane) -> Callable[[int], None]:
        def products(rows: int) -> None:
            for layer in lane.layers[:_PROBED_LAYERS]:
                _products(layer, lane.dtype, rows, config)

        return products

    return _takeover(run(few), run(many))


def measure_heads(few: HeadLane, many: HeadLane, config: LlamaConfig) -> int:
    """Returns the row count from which `many` is faster on this machine."""

    def run(lane: HeadLane) -> Callable[[int], object]:
        return lambda rows: lane.linear(torch.ones(rows, config.hidden, dtype=lane.dtype))

    return _takeover(run(few), run(many))


def faster_dense(layer: LayerWeights, config: LlamaConfig) -> torch.dtype:
    """Returns float32 or bfloat16, whichever multiplies many rows faster on this machine."""

    def run(dtype: torch.dtype) -> Callable[[int], None]:
        linears = dense_linears(layer, dtype, torch.device("cpu"))
        return lambda rows: _products(linears, dtype, rows, config)

    full, half = _compare(run(torch.float32), run(torch.bfloat16), _MANY_ROWS)
    return torch.bfloat16 if half < full else torch.float32


def _products(layer: LayerLinears, dtype: torch.dtype, rows: int, config: LlamaConfig) -> None:
    """Runs a layer's four matrix products on inputs of the right widths."""
    layer.qkv(torch.ones(rows, config.hidden, dtype=dtype))
    layer.out(torch.ones(rows, config.heads * config.head_dim, dtype=dtype))
    layer.gate_up(torch.ones(rows, config.hidden, dtype=dtype))
    layer.down(torch.ones(rows, config.ffn, dtype=dtype))


def _takeover(few: Callable[[int], object], many: Callable[[int], object]) -> int:
    """Bisects for the first probed row count where `many` is faster; the largest one always goes to it."""

    def wins(rows: int) -> bool:
        first, second = _compare(few, many, rows)
        return second < first

    return _PROBED_ROWS[bisect_left(_PROBED_ROWS[:-1], True, key=wins)]


def _compare(first: Callable[[int], object], second: Callable[[int], object], rows: int) -> tuple[float, float]:
    """Returns the best time of each in seconds, in turns.

    Processor time of this thread, which a busy machine inflates less than wall time.
    """
    best = [float("inf"), float("inf")]
    until = time.monotonic() + _PROBE_SECONDS
    for _ in range(_PROBE_ROUNDS):
        for index, function in enumerate((first, second)):
            began = time.thread_time()
            function(rows)
            best[index] = min(best[index], time.thread_time() - began)
        if time.monotonic() >= until:
            break
    return best[0], best[1]
