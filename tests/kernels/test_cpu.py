"""The compiled code of the packed profile against plain definitions in float64."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from magnitude_engine.model.gguf import Blocks
from magnitude_engine.model.packed import pack
from magnitude_kernels.cpu import attend, lay, product, rows
from magnitude_kernels.cpu.compiled import compiled, usable
from magnitude_kernels.cpu.emit import Emitter, Value, written
from magnitude_kernels.cpu.threads import Team, asked, begin, done, end, meet, take
from testkit.inprocess import wait_until

GENERATOR = np.random.default_rng(7)
POISON = np.float32(1e9)


def random(*size: int) -> np.ndarray:
    return GENERATOR.standard_normal(size).astype(np.float32)


def matrix(kind: int, outputs: int, inputs: int) -> Blocks | torch.Tensor:
    if kind == product.BFLOAT16:
        return torch.from_numpy(random(outputs, inputs))
    low, high = (-8, 8) if kind == product.FOUR_BITS else (-128, 128)
    codes = torch.from_numpy(GENERATOR.integers(low, high, (outputs, inputs)).astype(np.int8))
    scale = torch.from_numpy(random(outputs, inputs // 32)).abs().half().float() / 64
    minimum = torch.from_numpy(random(outputs, inputs // 32)).half().float() if kind == product.FOUR_BITS else 0 * scale
    return Blocks(codes, scale, minimum + 8 * scale if kind == product.FOUR_BITS else minimum, kind)


@compiled
def _multiply(table: int, count: int, x: int, x_row: int, out: int, out_row: int, inputs: int, counter: int) -> None:
    product.multiply(table, count, x, x_row, out, out_row, inputs, counter)


@compiled
def _code(x: int, out: int, count: int) -> None:
    rows.code(x, out, count)


def coded(x: np.ndarray) -> np.ndarray:
    out = np.empty((len(x), x.shape[1] // rows.GROUP * rows.CODED_GROUP), np.uint8)
    for row, target in zip(x, out, strict=True):
        _code(row.ctypes.data, target.ctypes.data, len(row))
    return out


def multiplied(weight: Blocks | torch.Tensor, x: np.ndarray) -> np.ndarray:
    inputs = x.shape[1]
    packed = pack(weight)
    table, counter = np.array(packed.row(), np.int64), np.zeros(1, np.int64)
    if table[4]:
        x = coded(x)
    out = np.full((len(x), packed.blocks * product.OUTPUTS + 16), POISON, np.float32)
    _multiply(
        table.ctypes.data, len(x), x.ctypes.data, x.strides[0], out.ctypes.data, out.strides[0], inputs,
        counter.ctypes.data,
    )  # fmt: skip
    assert (out[:, packed.blocks * product.OUTPUTS :] == POISON).all()
    return out[:, : packed.blocks * product.OUTPUTS]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", [product.FOUR_BITS, product.EIGHT_BITS, product.BFLOAT16])
def test_products_are_those_of_the_dense_weights_and_a_row_has_the_same_bits_in_any_company(kind: int) -> None:
    outputs, inputs = 100, 96
    weight, x = matrix(kind, outputs, inputs), random(23, inputs)
    dense = weight.dense() if isinstance(weight, Blocks) else weight.bfloat16().float()
    whole = multiplied(weight, x)
    expected = x.astype(np.float64) @ dense.double().numpy().T
    assert np.abs(whole[:, :outputs] - expected).max() < 5e-5 * np.abs(expected).max()
    assert (whole[:, outputs:] == 0).all()
    for count in range(1, 23):
        assert np.array_equal(multiplied(weight, x[:count]), whole[:count]), count


def _exponential(e: Emitter, source: Value, target: Value) -> None:
    e.store(e.exp(e.vector(source)), target)


_write_exp = written("aa", _exponential)


@compiled
def _exp(source: int, target: int, count: int) -> None:
    for n in range(0, count, 8):
        _write_exp(source + n * 4, target + n * 4)


def test_the_exponential_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 4096, dtype=np.float32)
    found = np.empty_like(x)
    _exp(x.ctypes.data, found.ctypes.data, len(x))
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(found - exact) <= 2 * np.spacing(exact.astype(np.float32))).all()


@compiled
def _norm(h: int, weight: int, out: int, count: int, epsilon: float) -> None:
    rows.norm(h, weight, out, count, np.float32(epsilon))


@compiled
def _gate(gates: int, ups: int, out: int, count: int) -> None:
    rows.gate(gates, ups, out, count)


@compiled
def _turn(x: int, cosine: int, sine: int, size: int, factor: float) -> None:
    rows.turn(x, cosine, sine, size, np.float32(factor))


@compiled
def _narrow(source: int, target: int, count: int) -> None:
    rows.narrow(source, target, count)


def test_rows_are_normalised_gated_turned_and_narrowed() -> None:
    h, weight, out = random(72), random(72), np.empty(72, np.float32)
    _norm(h.ctypes.data, weight.ctypes.data, out.ctypes.data, 72, 1e-5)
    wide = h.astype(np.float64)
    assert np.allclose(out, wide / np.sqrt((wide**2).mean() + 1e-5) * weight, rtol=1e-5)

    _gate(h.ctypes.data, weight.ctypes.data, out.ctypes.data, 72)
    assert np.allclose(out, wide / (1 + np.exp(-wide)) * weight, rtol=1e-5, atol=1e-7)

    for size in (8, 24, 64):
        x, cosine, sine = random(size), random(size), random(size)
        expected = (x.astype(np.float64) * cosine + np.roll(x, size // 2).astype(np.float64) * sine) * 0.5
        _turn(x.ctypes.data, cosine.ctypes.data, sine.ctypes.data, size, 0.5)
        assert np.allclose(x, expected, rtol=1e-5, atol=1e-6)

    narrow = np.empty(72, np.uint16)
    _narrow(h.ctypes.data, narrow.ctypes.data, 72)
    assert np.array_equal(narrow, torch.from_numpy(h).bfloat16().view(torch.uint16).numpy())


@compiled
def _attend(
    query: int, group: int, count: int, keys: int, values: int, slots: int, row: int, size: int, space: int, out: int
) -> None:
    """Attends over all keys in blocks and parts, as a step does for one row."""
    state_bytes = (attend.STATE + size) * 4
    laid = space
    scores = laid + lay.BLOCK * (size + 2) * 4
    padded = scores + 3 * lay.BLOCK * 4
    states = padded + lay.BLOCK * 8
    totals = states + group * state_bytes
    for n in range(group):
        attend.empty(totals + n * state_bytes, size)
    for n in range(group):
        rows.code_head(query + n * size * 4, size, np.float32(min(32767, (1 << 19) // size - 1)))
    for part in range(0, count, attend.PART):
        for n in range(group):
            attend.empty(states + n * state_bytes, size)
        for start in range(part, min(part + attend.PART, count), lay.BLOCK):
            seen = min(lay.BLOCK, count - start)
            lay.lay(keys, values, slots + start * 8, seen, row, row, size, laid, padded)
            attend.attend_block(query, size * 4, group, seen, size, laid, states, scores)
        for n in range(group):
            attend.merge(totals + n * state_bytes, states + n * state_bytes, size)
    for n in range(group):
        attend.finish(totals + n * state_bytes, out + n * size * 4, size)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [8, 24, 64, 96])
def test_attention_over_scattered_slots_is_softmax(group: int, size: int) -> None:
    for count in (1, 31, 33, 256, 601):
        # Slots that no row may see hold what would show.
        keys, values = (torch.full((700, 2, size), float("nan")).bfloat16() for _ in range(2))
        slots = GENERATOR.permutation(700)[:count].astype(np.int64)
        keys[slots], values[slots] = torch.randn(count, 2, size).bfloat16(), torch.randn(count, 2, size).bfloat16()
        query, out = random(group, size) / np.float32(size**0.5), np.empty((group, size), np.float32)
        codes = query.copy()
        space = np.zeros(lay.BLOCK * (size + 7) + 2 * group * (8 + size), np.float32)
        _attend(
            codes.ctypes.data, group, count, keys.data_ptr() + size * 2, values.data_ptr() + size * 2,
            slots.ctypes.data, 2 * size * 2, size, space.ctypes.data, out.ctypes.data,
        )  # fmt: skip
        found, held = keys[slots, 1].double().numpy(), values[slots, 1].double().numpy()
        score = query.astype(np.float64) @ found.T
        share = np.exp2(score - score.max(-1, keepdims=True))
        expected = share / share.sum(-1, keepdims=True) @ held
        # bfloat16 is off by 2 to the power of -9 of each value.
        assert np.abs(out - expected).max() < 2**-11 * np.abs(held).max(), count


@compiled
def _count_up(counter: int, meeting: int, found: int, threads: int) -> None:
    for n in range(200):
        take(counter, 1)
        meet(meeting, threads)
        if take(counter, 0) != (n + 1) * threads:
            take(found, 1)
        meet(meeting, threads)


@compiled
def _count_together(numbers: int, team: int, thread: int, threads: int) -> None:
    if thread == 0:
        begin(team, threads)
        _count_up(numbers, numbers + 8, numbers + 16, threads)
        end(team, threads)
        return
    while asked(team, thread):
        _count_up(numbers, numbers + 8, numbers + 16, threads)
        done(team)


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [1, 3])
def test_threads_meet(threads: int) -> None:
    numbers = np.zeros(3, np.int64)
    before = threading.active_count()
    at = numbers.ctypes.data
    team = Team(threads, lambda state, thread: _count_together(at, state, thread, threads))
    for pause in (0.0, 0.0, 0.05):
        time.sleep(pause)
        numbers[:] = 0
        team.step()
        assert numbers[0] == 200 * threads
        assert numbers[2] == 0
    team.close()
    wait_until(lambda: threading.active_count() == before)


def test_compiled_code_is_kept_in_a_folder_of_ones_own_only(tmp_path: Path) -> None:
    assert usable(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0
    (tmp_path / "file").touch()
    assert not usable(tmp_path / "file" / "b")
    assert not usable(Path("/proc/compiled"))
