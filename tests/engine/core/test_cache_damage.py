"""Bits that flip and files that are cut short on disk: each is found, no request fails, and no token changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.engine import Engine
from magnitude_engine.kv.blocks import HEADER_BYTES
from magnitude_engine.model.loader import LoadedModel
from testkit.disk import files_in
from testkit.engine import alone, generate, run
from testkit.tiered import disk_stats, evict, save, tiered

SESSIONS = 25
SEEDED = api.Sampling(temperature=1.1, seed=5)
# Three pages, the last token in the fourth; no two sessions share one.
REQUESTS = [
    generate(tuple(random.Random(seed).choices(range(3, 250), k=3 * PAGE_TOKENS + 1)), sampling=SEEDED, max_tokens=3)
    for seed in range(SESSIONS)
]

Damage = Callable[[random.Random, Path], None]


def flip(draw: random.Random, file: Path) -> None:
    """Flips one bit, in the header half of the time."""
    data = bytearray(file.read_bytes())
    at = draw.randrange(HEADER_BYTES) if draw.random() < 0.5 else draw.randrange(len(data))
    data[at] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def cut(draw: random.Random, file: Path) -> None:
    """Cuts a file short somewhere, to nothing now and then."""
    with file.open("r+b") as handle:
        handle.truncate(draw.choice([0, draw.randrange(HEADER_BYTES), draw.randrange(file.stat().st_size)]))


def damaged(engine: Engine, folder: Path, draw: random.Random, damage: Damage) -> list[int]:
    """Damages one random block of each session; returns which one of its three."""
    by_name = {file.name: file for file in files_in(folder)}
    chosen = []
    for request in REQUESTS:
        assert isinstance(request.input, api.TokenInput)
        chain = engine._stepper.manager.chain("t", request.input.ids)
        chosen.append(draw.randrange(len(chain)))
        damage(draw, by_name[chain[chosen[-1]].hex()])
    return chosen


def rounds(model: LoadedModel, folder: Path, count: int, damage: Damage, restart: bool = False) -> None:
    """Damages a block of each session and asks them all, `count` times."""
    draw = random.Random(count)
    engine = tiered(model, folder)
    run(engine, *REQUESTS)
    expected = [alone(model, request).ids() for request in REQUESTS]
    for number in range(count):
        save(engine)
        evict(engine)
        assert disk_stats(engine).blocks >= 3 * SESSIONS
        chosen = damaged(engine, folder, draw, damage)
        before = disk_stats(engine).rejected
        if restart:
            engine.close()
            engine, before = tiered(model, folder), 0
        answers = run(engine, *REQUESTS)
        assert [answer.ids() for answer in answers] == expected, f"round {number}"
        assert disk_stats(engine).rejected - before == SESSIONS
        # What stands before the damaged block is used, and nothing from it on.
        assert [answer.usage.cached_disk_tokens for answer in answers] == [i * PAGE_TOKENS for i in chosen]
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, cut])
def test_a_round_of_damage(model: LoadedModel, tmp_path: Path, damage: Damage) -> None:
    rounds(model, tmp_path, 1, damage)


@pytest.mark.slow
def test_a_thousand_flipped_bits(model: LoadedModel, tmp_path: Path) -> None:
    rounds(model, tmp_path, 1000 // SESSIONS, flip)


@pytest.mark.slow
@pytest.mark.parametrize("restart", [False, True], ids=["alive", "restarted"])
def test_two_hundred_files_cut_short(model: LoadedModel, tmp_path: Path, restart: bool) -> None:
    rounds(model, tmp_path, 100 // SESSIONS, cut, restart)


@pytest.mark.slow
def test_all_blocks_in_each_others_place(model: LoadedModel, tmp_path: Path) -> None:
    """Whole blocks under wrong names are as bad as broken ones."""
    engine = tiered(model, tmp_path)
    run(engine, *REQUESTS)
    save(engine)
    evict(engine)
    files = sorted(files_in(tmp_path))
    contents = [file.read_bytes() for file in files]
    for file, data in zip(files, contents[1:] + contents[:1], strict=True):
        file.write_bytes(data)
    answers = run(engine, *REQUESTS)
    assert [answer.ids() for answer in answers] == [alone(model, request).ids() for request in REQUESTS]
    assert [answer.usage.cached_disk_tokens for answer in answers] == [0] * SESSIONS
    assert disk_stats(engine).rejected == SESSIONS
    engine.close()
