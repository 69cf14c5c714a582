"""What a layer does row by row between its products: norms, rotary with the cache write, the gate."""

from __future__ import annotations

from typing import Any

import numpy as np

from magnitude_kernels.cpu.compiled import compiled
from magnitude_kernels.cpu.emit import LANES, Emitter, Value, written


def _write_gate(e: Emitter, gates: Value, ups: Value, out: Value, count: Value) -> None:
    """Writes silu(gate) * up."""

    def body(at: Value, _: list[Value]) -> list[Value]:
        offset, b = e.times(at, 4), e.builder
        x = e.vector(e.at(gates, offset))
        share = b.fdiv(x, b.fadd(e.number(1.0), e.exp(b.fsub(e.number(0.0), x))))
        e.store(b.fmul(share, e.vector(e.at(ups, offset))), e.at(out, offset))
        return []

    e.loop(count, LANES, [], body)


def _write_narrow(e: Emitter, source: Value, target: Value, count: Value) -> None:
    """Writes float32 as bfloat16."""

    def body(at: Value, _: list[Value]) -> list[Value]:
        e.narrow_bfloat16(e.vector(e.at(source, e.times(at, 4))), e.at(target, e.times(at, 2)))
        return []

    e.loop(count, LANES, [], body)


gate, narrow = written("aaaa", _write_gate), written("aaa", _write_narrow)


@compiled
def norm(h: Any, weight: Any, epsilon: float, out: Any) -> None:
    """Writes h / sqrt(mean(h²) + epsilon) * weight for one row; `out` may be longer."""
    total = np.float32(0.0)
    for i in range(h.shape[0]):
        total += h[i] * h[i]
    scale = np.float32(1.0) / np.sqrt(total / np.float32(h.shape[0]) + np.float32(epsilon))
    for i in range(h.shape[0]):
        out[i] = h[i] * scale * weight[i]


@compiled
def add(h: Any, x: Any) -> None:
    """Adds a row to another; `x` may be longer."""
    for i in range(h.shape[0]):
        h[i] += x[i]


@compiled
def turn(x: Any, cosine: Any, sine: Any, factor: Any) -> None:
    """Turns a head by its position and scales it, in place; the sines' first half is negated."""
    half = cosine.shape[0] // 2
    for i in range(half):
        low, high = x[i], x[i + half]
        x[i] = (low * cosine[i] + high * sine[i]) * factor
        x[i + half] = (high * cosine[i + half] + low * sine[i + half]) * factor
