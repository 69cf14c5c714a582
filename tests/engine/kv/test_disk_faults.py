"""What may happen to a disk: flipped bits, cut, swapped and foreign files, kill -9, full and broken disks.

Never a wrong byte, never an error for the caller; at most blocks that are misses.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import testkit.disk
from magnitude_engine.kv.blocks import HEADER_BYTES, BlockName
from magnitude_engine.kv.disk import DiskOptions, DiskTier
from magnitude_engine.kv.disk.folder import NO_SPACE, SystemFiles
from testkit.clock import ManualClock
from testkit.disk import (
    BLOCK,
    FILE,
    IDENTITY,
    MEMORY,
    OTHER_MODEL,
    PATIENCE_S,
    FaultyFiles,
    chain_of,
    fetched,
    file_of,
    files_in,
    held,
    opened,
    payload_of,
    stored,
)

Damage = Callable[[random.Random, bytearray], None]


def flip(chance: random.Random, data: bytearray) -> None:
    """Flips one bit; every other time in the header, which is a small part of a file."""
    bit = chance.randrange(8 * (HEADER_BYTES if chance.random() < 0.5 else len(data)))
    data[bit // 8] ^= 1 << bit % 8


def resize(chance: random.Random, data: bytearray) -> None:
    """Cuts a file or appends to it; the ends of the header and the file come often."""
    length = chance.choice((0, HEADER_BYTES - 1, HEADER_BYTES, FILE - 1, FILE + 1, chance.randrange(FILE)))
    extra = chance.choice((bytes(200), chance.randbytes(200)))
    data[:] = (bytes(data) + extra)[:length]


def damaged(path: Path, chance: random.Random, damage: Damage) -> None:
    """Changes a file in place."""
    data = bytearray(path.read_bytes())
    before = bytes(data)
    damage(chance, data)
    assert data != before
    path.write_bytes(data)


def blocks_of(count: int) -> list[BlockName]:
    """Returns the names of `count` blocks in chains of 50."""
    return [name for seed in range(-(-count // 50)) for name in chain_of(seed, 50)][:count]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory, where there is such a thing."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "count"), [(flip, 1000), (resize, 200)])
def test_no_damaged_file_is_ever_used(memory_path: Path, damage: Damage, count: int) -> None:
    chance = random.Random(7)
    tier = opened(memory_path, blocks=2000)
    blocks = blocks_of(count)
    stored(tier, blocks)
    for name in blocks:
        damaged(file_of(memory_path, name), chance, damage)
    assert [fetched(tier, [name]) for name in blocks] == [[]] * count
    assert held(tier, blocks) == [False] * count
    assert files_in(memory_path) == []
    stats = tier.stats
    assert (stats.rejected, stats.blocks, stats.bytes) == (count, 0, 0)
    stored(tier, blocks[:50])
    assert fetched(tier, blocks[:50]) == [payload_of(name) for name in blocks[:50]]
    tier.close()


@pytest.mark.thorough
def test_files_of_another_length_are_gone_after_a_restart(tmp_path: Path) -> None:
    chance = random.Random(8)
    tier = opened(tmp_path)
    blocks = blocks_of(60)
    stored(tier, blocks)
    tier.close()
    for name in blocks[:50]:
        damaged(file_of(tmp_path, name), chance, resize)
    again = opened(tmp_path)
    assert held(again, blocks) == [False] * 50 + [True] * 10
    assert (again.stats.rejected, again.stats.blocks) == (50, 10)
    assert len(files_in(tmp_path)) == 10
    again.close()


def test_a_damaged_block_ends_its_chain_and_costs_no_other(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    chain = chain_of(1, 6)
    stored(tier, chain)
    damaged(file_of(tmp_path, chain[3]), random.Random(1), flip)
    assert fetched(tier, chain) == [payload_of(name) for name in chain[:3]]
    stored(tier, chain)
    assert fetched(tier, chain) == [payload_of(name) for name in chain]
    assert (tier.stats.rejected, tier.stats.written) == (1, 7)
    tier.close()


def test_a_whole_block_in_anothers_place_is_not_used(tmp_path: Path) -> None:
    """Another page's, another tenant's with the same tokens, and another model's, each under my name."""
    mine = chain_of(1, 3)
    tenant = chain_of(1, 3, tenant="b")
    theirs = opened(tmp_path, identity=OTHER_MODEL)
    stored(theirs, mine[2:])
    theirs.close()
    tier = opened(tmp_path)
    stored(tier, mine)
    stored(tier, tenant)
    strangers = [file_of(tmp_path, mine[1]), file_of(tmp_path, tenant[1]), file_of(tmp_path, mine[2], OTHER_MODEL)]
    for name, stranger in zip(mine, strangers, strict=True):
        shutil.copyfile(stranger, file_of(tmp_path, name))
        assert fetched(tier, [name]) == []
    assert tier.stats.rejected == 3
    assert held(tier, mine) == [False] * 3
    assert fetched(tier, tenant) == [payload_of(name) for name in tenant]
    tier.close()


def test_a_swapped_name_is_not_used(tmp_path: Path) -> None:
    """The caller's name is compared in full, as if two pages had the same digest."""
    tier = opened(tmp_path)
    (name,) = chain_of(1, 1)
    stored(tier, [name])
    assert fetched(tier, [name._replace(ids=tuple(range(16)))]) == []
    assert fetched(tier, [name]) == []
    assert tier.stats.rejected == 1
    tier.close()


class WatchedFiles(SystemFiles):
    """Notes at each renaming whether the target was there, and the size of what takes its place."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int]] = []

    def replace(self, source: str, target: str) -> None:
        self.seen.append((Path(target).exists(), Path(source).stat().st_size))
        super().replace(source, target)


def test_a_block_appears_under_its_name_only_when_it_is_whole(tmp_path: Path) -> None:
    files = WatchedFiles()
    tier = opened(tmp_path, options=DiskOptions(files=files))
    stored(tier, chain_of(1, 3))
    assert files.seen == [(False, FILE)] * 3
    tier.close()


def killed_while_writing(folder: Path, size: int, lines: int, delay_s: float) -> None:
    """Starts a process that writes blocks, and kills it `delay_s` after its `lines`th report."""
    command = [sys.executable, testkit.disk.__file__, str(folder), str(size)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline().endswith(" 0\n")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_s)
        process.kill()
        assert process.wait() == -signal.SIGKILL


def check_after_kill(folder: Path, size: int) -> int:
    """Checks that what the folder claims to hold is there; returns how many blocks."""
    tier = DiskTier.open(folder, IDENTITY, size, 10**9)
    assert [path for path in files_in(folder) if path.suffix] == []
    found = 0
    for seed in range(tier.stats.blocks // 20 + 2):
        for name in chain_of(seed, 20):
            if tier.holds(name.key):
                assert fetched(tier, [name]) == [payload_of(name, size)]
                found += 1
    stats = tier.stats
    assert (stats.blocks, stats.rejected) == (found, 0)
    tier.close()
    return found


@pytest.mark.thorough
def test_kill_9_costs_only_what_was_being_written(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, BLOCK, 2, 0.01)
    assert check_after_kill(tmp_path, BLOCK) >= 40


@pytest.mark.slow
def test_many_kills_with_large_blocks(tmp_path: Path) -> None:
    chance = random.Random(9)
    for number in range(12):
        folder = tmp_path / str(number)
        killed_while_writing(folder, 368_640, 1, chance.random() / 20)
        assert check_after_kill(folder, 368_640) >= 20
        shutil.rmtree(folder)


@pytest.mark.parametrize("operation", ["write", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
def test_a_refusing_disk_costs_blocks_and_pauses(tmp_path: Path, operation: str, code: int) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tier = opened(tmp_path, options=DiskOptions(files=files, clock=clock, pause_s=1, longest_pause_s=3))
    chain = chain_of(1, 4)
    stored(tier, chain[:1])
    files.refuse[operation] = code
    for failures, pause in enumerate((1, 2, 3, 3), 1):
        tier.write(chain[1], payload_of(chain[1]))
        assert tier.flush(PATIENCE_S)
        assert tier.stats.failed_writes == failures
        assert not tier.write(chain[1], payload_of(chain[1]))
        clock.advance(pause - 0.01)
        assert not tier.write(chain[1], payload_of(chain[1]))
        clock.advance(0.02)
    # Where there is no space, room was made for the new block; nothing half-written is left.
    kept = [] if code in NO_SPACE else chain[:1]
    assert held(tier, chain) == [name in kept for name in chain]
    assert files_in(tmp_path) == [file_of(tmp_path, name) for name in kept]
    assert fetched(tier, chain) == [payload_of(name) for name in kept]
    files.refuse.clear()
    clock.advance(600)
    stored(tier, chain)
    assert fetched(tier, chain) == [payload_of(name) for name in chain]
    tier.close()


def test_a_failure_is_logged_once_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tier = opened(tmp_path, options=DiskOptions(files=files, clock=clock, longest_pause_s=1))
    files.refuse["write"] = errno.EIO
    (name,) = chain_of(1, 1)
    for _ in range(30):
        tier.write(name, payload_of(name))
        assert tier.flush(PATIENCE_S)
        clock.advance(2.1)
    assert tier.stats.failed_writes == 30
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "writing failed and pauses for 1 s" in told[0]
    assert "Input/output error" in told[0]
    tier.close()


def test_on_a_full_disk_new_blocks_take_the_place_of_old_ones(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tier = opened(tmp_path, options=DiskOptions(files=files, clock=clock))
    old, new = chain_of(1, 4), chain_of(2, 3)
    stored(tier, old)
    files.refuse["write"] = errno.ENOSPC
    assert tier.write(new[0], payload_of(new[0]))
    assert tier.flush(PATIENCE_S)
    files.refuse.clear()
    clock.advance(2)
    stored(tier, new)
    assert (held(tier, old), held(tier, new)) == ([True, False, False, False], [True] * 3)
    clock.advance(601)
    stored(tier, old)
    assert held(tier, [*old, *new]) == [True] * 7
    tier.close()


def test_a_file_that_cannot_be_deleted_still_counts(tmp_path: Path) -> None:
    files, clock = FaultyFiles(), ManualClock()
    tier = opened(tmp_path, blocks=2, options=DiskOptions(files=files, clock=clock))
    chain, new = chain_of(1, 2), chain_of(2, 1)
    stored(tier, chain)
    files.refuse["unlink"] = errno.EIO
    assert tier.write(new[0], payload_of(new[0]))
    assert tier.flush(PATIENCE_S)
    assert (held(tier, [*chain, *new]), tier.stats.bytes) == ([True, True, False], 2 * FILE)
    assert (tier.stats.failed_writes, tier.stats.evicted) == (1, 0)
    files.refuse.clear()
    clock.advance(2)
    stored(tier, new)
    assert (held(tier, [*chain, *new]), tier.stats.bytes) == ([True, False, True], 2 * FILE)
    tier.close()


def test_an_unreadable_block_is_deleted_and_a_busy_system_is_only_a_miss(tmp_path: Path) -> None:
    files = FaultyFiles()
    tier = opened(tmp_path, options=DiskOptions(files=files))
    chain = chain_of(1, 2)
    stored(tier, chain)
    files.refuse["read"] = errno.EMFILE
    assert fetched(tier, chain) == []
    assert (held(tier, chain), tier.stats.rejected) == ([True, True], 0)
    files.refuse["read"] = errno.EIO
    assert fetched(tier, chain) == []
    assert (held(tier, chain), tier.stats.rejected) == ([False, True], 1)
    assert files_in(tmp_path) == [file_of(tmp_path, chain[1])]
    files.refuse["unlink"] = errno.EROFS
    assert fetched(tier, chain[1:]) == []
    assert tier.stats.rejected == 2
    tier.close()


def test_a_disk_that_keeps_no_times_costs_only_the_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = FaultyFiles()
    files.refuse["stamp"] = errno.EROFS
    tier = opened(tmp_path, options=DiskOptions(files=files))
    chain = chain_of(1, 3)
    stored(tier, chain)
    assert fetched(tier, chain) == [payload_of(name) for name in chain]
    assert "the order of last uses cannot be kept" in caplog.text
    tier.close()


def no_large_files() -> None:
    """Limits this process to files of 64 KiB; more is EFBIG."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))


@pytest.mark.thorough
def test_a_process_whose_writes_really_fail_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, testkit.disk.__file__, str(tmp_path), "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=no_large_files) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["0 1\n", "0 1\n"]
        process.kill()
    assert files_in(tmp_path) == []


REALLY_FULL = """
import sys
from pathlib import Path
from magnitude_engine.kv.disk import DiskOptions
from testkit.disk import *

folder = Path(sys.argv[1])
tier = opened(folder, options=DiskOptions(pause_s=0))
filler = folder / "filler"
stored(tier, chain_of(1, 20))
with filler.open("wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError as problem:
        print(problem.errno)
for seed in (2, 3):
    for name in chain_of(seed, 10):
        tier.write(name, payload_of(name))
    assert tier.flush(PATIENCE_S)
full = tier.stats
filler.unlink()
tier.close()
tier = opened(folder)
for seed in (1, 2, 3):
    for name, data in zip(chain_of(seed, 20), fetched(tier, chain_of(seed, 20))):
        assert data == payload_of(name)
assert tier.stats.rejected == 0
stored(tier, chain_of(4, 20))
whole = fetched(tier, chain_of(4, 20)) == [payload_of(name) for name in chain_of(4, 20)]
print(full.failed_writes > 0, full.evicted > 0, whole)
"""


@pytest.mark.slow
def test_a_really_full_disk_costs_cache_and_recovers(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=1m none "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}"'
    probe = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{tmp_path}"']
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, sys.executable, REALLY_FULL],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, f"{errno.ENOSPC}\nTrue True True\n"), ended.stderr


class AnyOrder(RuleBasedStateMachine):
    """Any order of calls, restarts and damage against a dictionary of what must still be there."""

    ROOM = 12
    CHAINS = tuple(chain_of(seed, 6) for seed in range(4))

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.tier = opened(self.folder, self.ROOM)
        self.order: list[BlockName] = []
        self.chance = random.Random(1)

    def teardown(self) -> None:
        self.tier.close()
        shutil.rmtree(self.folder)

    @rule(chain=st.sampled_from(CHAINS), pages=st.integers(1, 6))
    def write(self, chain: list[BlockName], pages: int) -> None:
        for name in chain[:pages]:
            assert self.tier.write(name, payload_of(name))
            assert self.tier.flush(PATIENCE_S)
            if name not in self.order:
                self.order = [*self.order, name][-self.ROOM :]

    @rule(chain=st.sampled_from(CHAINS), pages=st.integers(1, 6))
    def touch(self, chain: list[BlockName], pages: int) -> None:
        self.tier.touch([name.key for name in chain[:pages]])
        used = [name for name in reversed(chain[:pages]) if name in self.order]
        self.order = [name for name in self.order if name not in used] + used

    @rule(chain=st.sampled_from(CHAINS))
    def read(self, chain: list[BlockName]) -> None:
        there = [name in self.order for name in chain]
        length = there.index(False) if False in there else len(chain)
        assert fetched(self.tier, chain) == [payload_of(name) for name in chain[:length]]

    @rule(damage=st.sampled_from([flip, resize]), where=st.integers(0, 11))
    def damage(self, damage: Damage, where: int) -> None:
        if where < len(self.order):
            name = self.order.pop(where)
            assert self.tier.flush(PATIENCE_S)
            damaged(file_of(self.folder, name), self.chance, damage)
            assert fetched(self.tier, [name]) == []

    @rule()
    def restart(self) -> None:
        self.tier.close()
        self.tier = opened(self.folder, self.ROOM)

    @invariant()
    def holds_what_it_should(self) -> None:
        for chain in self.CHAINS:
            assert held(self.tier, chain) == [name in self.order for name in chain]
        stats = self.tier.stats
        assert (stats.blocks, stats.bytes) == (len(self.order), len(self.order) * FILE)
        assert stats.bytes == sum(path.stat().st_size for path in files_in(self.folder))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=12, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
