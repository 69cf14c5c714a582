"""The disk tier: what is written is read again, also after a restart; room, order of eviction, locks, concurrency."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import testkit.disk
from magnitude_engine.errors import ConfigError
from magnitude_engine.kv.blocks import BlockName
from magnitude_engine.kv.disk import DiskOptions, DiskTier
from magnitude_engine.kv.disk.index import DiskIndex
from testkit.clock import ManualClock
from testkit.disk import (
    BLOCK,
    FILE,
    IDENTITY,
    MEMORY,
    OTHER_MODEL,
    PATIENCE_S,
    GatedFiles,
    chain_of,
    fetched,
    file_of,
    files_in,
    held,
    opened,
    payload_of,
    stored,
)
from testkit.inprocess import wait_until


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    """A tier with room for 1,000 blocks."""
    made = opened(tmp_path)
    yield made
    made.close()


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory, where there is such a thing."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        yield Path(folder)


def test_what_is_written_is_read_in_order(tier: DiskTier, tmp_path: Path) -> None:
    chain = chain_of(1, 12)
    stored(tier, chain)
    assert held(tier, chain) == [True] * 12
    assert fetched(tier, chain) == [payload_of(name) for name in chain]
    stats = tier.stats
    assert (stats.blocks, stats.bytes, stats.written, stats.rejected) == (12, 12 * FILE, 12, 0)
    assert stats.read_bytes == 12 * BLOCK
    assert tier.read_rate is not None
    assert tier.read_rate > 0
    assert sum(path.stat().st_size for path in files_in(tmp_path)) == stats.bytes


def test_only_the_owner_may_read_the_files(tier: DiskTier, tmp_path: Path) -> None:
    stored(tier, chain_of(1, 1))
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    del modes["VERSION"]
    assert set(modes.values()) == {0o700, 0o600}


def test_a_payload_is_writable_and_the_readers_own(tier: DiskTier) -> None:
    chain = chain_of(1, 1)
    stored(tier, chain)
    ready = threading.Event()
    ticket = tier.read(chain, ready.set)
    assert ready.wait(PATIENCE_S)
    ticket.payloads[0][0] ^= 255
    assert fetched(tier, chain) == [payload_of(chain[0])]


def test_a_memoryview_may_change_after_it_was_queued(tmp_path: Path) -> None:
    files = GatedFiles()
    tier = opened(tmp_path, options=DiskOptions(files=files))
    (name,) = chain_of(1, 1)
    buffer = bytearray(payload_of(name))
    assert tier.write(name, memoryview(buffer))
    buffer[:] = bytes(BLOCK)
    files.writes.set()
    files.reads.set()
    assert tier.flush(PATIENCE_S)
    assert fetched(tier, [name]) == [payload_of(name)]
    tier.close()


def test_a_read_ends_before_the_first_miss(tier: DiskTier) -> None:
    chain = chain_of(1, 6)
    stored(tier, chain[:2] + chain[3:])
    assert fetched(tier, chain) == [payload_of(name) for name in chain[:2]]
    assert fetched(tier, chain_of(2, 3)) == []
    assert fetched(tier, []) == []


def test_a_block_that_waits_to_be_written_is_read_from_memory(tmp_path: Path) -> None:
    files = GatedFiles()
    files.reads.set()
    tier = opened(tmp_path, options=DiskOptions(files=files))
    chain = chain_of(1, 2)
    for name in chain:
        assert tier.write(name, payload_of(name))
    assert held(tier, chain) == [True, True]
    assert fetched(tier, chain) == [payload_of(name) for name in chain]
    assert fetched(tier, [chain[0]._replace(parent=bytes(16))]) == []
    files.writes.set()
    assert tier.flush(PATIENCE_S)
    assert tier.stats.blocks == 2
    tier.close()


def test_the_same_block_is_written_once(tier: DiskTier) -> None:
    chain = chain_of(1, 3)
    for _ in range(3):
        stored(tier, chain)
    assert tier.stats.written == 3


def test_a_block_of_the_wrong_form_is_refused_at_once(tier: DiskTier) -> None:
    (name,) = chain_of(1, 1)
    with pytest.raises(ValueError, match=f"a block has {BLOCK} bytes, not 7"):
        tier.write(name, b"7 bytes")
    with pytest.raises(ValueError, match="16 token ids"):
        tier.write(name._replace(ids=()), bytes(BLOCK))
    assert not tier.holds(name.key)


def test_a_full_queue_drops_and_later_accepts(tmp_path: Path) -> None:
    files = GatedFiles()
    tier = opened(tmp_path, options=DiskOptions(files=files, queue_bytes=3 * BLOCK))
    chain = chain_of(1, 5)
    assert [tier.write(name, payload_of(name)) for name in chain] == [True, True, True, False, False]
    assert not tier.flush(0.01)
    assert tier.stats.dropped == 2
    files.writes.set()
    assert tier.flush(PATIENCE_S)
    stored(tier, chain)
    assert tier.stats.blocks == 5
    tier.close()


@pytest.mark.thorough
def test_while_the_engine_computes_blocks_are_written_with_gaps_until_half_the_queue_is_full(tmp_path: Path) -> None:
    tier = opened(tmp_path, options=DiskOptions(gap_s=10 * PATIENCE_S, queue_bytes=8 * BLOCK))
    chain = chain_of(1, 12)
    assert tier.flush(PATIENCE_S)
    tier.yield_to(live=True)
    # One is written at once; of the others four wait, and those that have left memory go until only these are left.
    assert tier.write(chain[0], payload_of(chain[0]), idly=True)
    wait_until(lambda: tier.stats.written == 1)
    assert [tier.write(name, payload_of(name), idly=True) for name in chain[1:6]] == [True] * 4 + [False]
    assert tier.write(chain[5], payload_of(chain[5]))
    assert tier.write(chain[6], payload_of(chain[6]))
    wait_until(lambda: tier.stats.written == 3)
    time.sleep(0.05)
    assert tier.stats.written == 3
    tier.yield_to(live=False)
    wait_until(lambda: tier.stats.written == 7)
    tier.yield_to(live=True)
    assert tier.write(chain[7], payload_of(chain[7]), idly=True)
    assert tier.write(chain[8], payload_of(chain[8]), idly=True)
    assert tier.flush(PATIENCE_S)
    assert tier.stats.written == 9
    tier.close()


def test_blocks_and_their_order_survive_a_restart(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    old, new = chain_of(1, 5), chain_of(2, 5)
    stored(tier, old)
    stored(tier, new)
    tier.touch([name.key for name in old])
    tier.close()
    again = opened(tmp_path, blocks=7)
    assert again.flush(PATIENCE_S)
    assert held(again, old) == [True] * 5
    assert held(again, new) == [True] * 2 + [False] * 3
    assert fetched(again, old) == [payload_of(name) for name in old]
    assert again.stats.evicted == 3
    again.close()


def test_last_uses_are_noted_without_a_flush(tmp_path: Path) -> None:
    tier = opened(tmp_path, options=DiskOptions(note_uses_s=0.01))
    old, new = chain_of(1, 3), chain_of(2, 3)
    stored(tier, old)
    stored(tier, new)
    tier.touch([name.key for name in old])
    newest = file_of(tmp_path, new[0]).stat().st_mtime_ns
    end = time.monotonic() + PATIENCE_S
    while file_of(tmp_path, old[2]).stat().st_mtime_ns < newest and time.monotonic() < end:
        time.sleep(0.005)
    times = [file_of(tmp_path, name).stat().st_mtime_ns for name in (*new[::-1], *old[::-1])]
    assert times == sorted(times)
    tier.close()


def test_a_wall_clock_that_goes_back_does_not_upset_the_order(tmp_path: Path) -> None:
    first = opened(tmp_path)
    old = chain_of(1, 3)
    stored(first, old)
    first.close()
    again = opened(tmp_path, options=DiskOptions(wall_ns=lambda: 1))
    new = chain_of(2, 3)
    stored(again, new)
    again.close()
    last = opened(tmp_path, blocks=3)
    assert last.flush(PATIENCE_S)
    assert (held(last, old), held(last, new)) == ([False] * 3, [True] * 3)
    last.close()


def test_the_size_limit_holds_and_the_least_recently_used_chain_loses_its_end(tmp_path: Path) -> None:
    tier = opened(tmp_path, blocks=10)
    first, second, third = chain_of(1, 4), chain_of(2, 4), chain_of(3, 4)
    for chain in (first, second):
        stored(tier, chain)
    tier.touch([name.key for name in first])
    for name in third:
        stored(tier, [name])
        assert sum(path.stat().st_size for path in files_in(tmp_path)) == tier.stats.bytes <= 10 * FILE
    assert held(tier, first) == [True] * 4
    assert held(tier, second) == [True, True, False, False]
    assert held(tier, third) == [True] * 4
    assert tier.stats.evicted == 2
    tier.close()


def test_a_chain_longer_than_the_tier_keeps_its_beginning(tmp_path: Path) -> None:
    files = GatedFiles()
    tier = opened(tmp_path, blocks=4, options=DiskOptions(files=files))
    chain = chain_of(1, 9)
    for name in chain:
        assert tier.write(name, payload_of(name))
    tier.touch([name.key for name in chain])
    files.writes.set()
    assert tier.flush(PATIENCE_S)
    assert held(tier, chain) == [True] * 4 + [False] * 5
    assert (tier.stats.dropped, tier.stats.evicted) == (5, 0)
    tier.close()


def test_other_models_blocks_are_not_read_count_and_go_first(tmp_path: Path) -> None:
    theirs = opened(tmp_path, identity=OTHER_MODEL)
    chain = chain_of(1, 6)
    stored(theirs, chain)
    theirs.close()
    ours = opened(tmp_path, blocks=8)
    assert held(ours, chain) == [False] * 6
    assert (ours.stats.blocks, ours.stats.bytes, ours.stats.foreign_bytes) == (0, 6 * FILE, 6 * FILE)
    mine = chain_of(2, 8)
    stored(ours, mine[:4])
    assert (ours.stats.foreign_bytes, ours.stats.evicted) == (4 * FILE, 2)
    stored(ours, mine[4:])
    assert (ours.stats.blocks, ours.stats.foreign_bytes, ours.stats.evicted) == (8, 0, 6)
    ours.close()
    back = opened(tmp_path, identity=OTHER_MODEL)
    assert (back.stats.blocks, back.stats.foreign_bytes) == (0, 8 * FILE)
    back.close()


def test_a_limit_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"one block has {FILE}") as caught:
        DiskTier.open(tmp_path, IDENTITY, BLOCK, FILE - 1)
    assert caught.value.param == "kv_disk_mb"


@pytest.mark.thorough
def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    command = [sys.executable, testkit.disk.__file__, str(tmp_path), str(BLOCK)]
    refused = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert refused.stdout.startswith(f"kv_dir another process (pid {os.getpid()}) uses the cache folder {tmp_path}: ")
    assert "another folder" in refused.stdout
    assert "--kv-disk-mb 0" in refused.stdout
    with pytest.raises(ConfigError, match=f"pid {os.getpid()}"):
        opened(tmp_path)
    tier.close()
    opened(tmp_path).close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be used: .*Not a directory.*choose another folder") as caught:
        opened(tmp_path / "file" / "kv")
    assert caught.value.param == "kv_dir"


def test_a_folder_of_another_version_is_refused_and_not_touched(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    stored(tier, chain_of(1, 3))
    tier.close()
    (tmp_path / "VERSION").write_text("2\n")
    before = {path: path.stat().st_mtime_ns for path in files_in(tmp_path)}
    with pytest.raises(ConfigError, match="version '2' and this program knows version 1") as caught:
        opened(tmp_path, blocks=1)
    assert caught.value.param == "kv_dir"
    assert {path: path.stat().st_mtime_ns for path in files_in(tmp_path)} == before
    (tmp_path / "VERSION").write_text("")
    opened(tmp_path).close()
    assert (tmp_path / "VERSION").read_text() == "1\n"


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    base = tmp_path / IDENTITY.hex()
    others = [
        tmp_path / "photos" / "ab" / ("a" * 32),
        base / "notes" / "x",
        base / "ab" / "README",
        base / "ab" / "x.tmp",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(FILE))
    (base / "ab" / ("ab" * 16)).symlink_to(others[0])
    tier = opened(tmp_path, blocks=1)
    assert (tier.stats.blocks, tier.stats.bytes, tier.stats.rejected) == (0, 0, 0)
    stored(tier, chain_of(1, 1))
    stored(tier, chain_of(2, 1))
    tier.close()
    assert all(path.stat().st_size == FILE for path in others)


def test_leftovers_are_removed_at_the_start(tmp_path: Path) -> None:
    tier = opened(tmp_path)
    chain = chain_of(1, 2)
    stored(tier, chain)
    tier.close()
    kept, cut = (file_of(tmp_path, name) for name in chain)
    half = kept.with_name(f"{kept.name[:2]}{'0' * 30}.tmp")
    half.write_bytes(bytes(100))
    os.truncate(cut, FILE - 1)
    again = opened(tmp_path)
    assert files_in(tmp_path) == [kept]
    assert held(again, chain) == [True, False]
    assert (again.stats.blocks, again.stats.bytes, again.stats.rejected) == (1, FILE, 1)
    again.close()


def test_a_folder_that_vanishes_is_a_miss_and_is_made_again(tier: DiskTier, tmp_path: Path) -> None:
    chain = chain_of(1, 3)
    stored(tier, chain)
    (tmp_path / IDENTITY.hex()).rename(tmp_path / "moved")
    for length in range(3):
        assert len(fetched(tier, chain)) == length
        assert held(tier, chain[: length + 1]) == [True] * length + [False]
        stored(tier, chain[: length + 1])
    assert fetched(tier, chain) == [payload_of(name) for name in chain]


def test_a_late_report_of_a_lost_file_leaves_its_successor_alone() -> None:
    (name,) = chain_of(1, 1)
    index = DiskIndex(FILE, [name.key])
    old = index.get(name.key)
    assert old is not None
    assert index.forget(old)
    index.queue(name, payload_of(name))
    assert not index.forget(old)
    new = index.next()
    assert new is not None
    index.settle(new)
    assert not index.forget(old)
    assert (len(index), index.bytes) == (1, FILE)
    assert index.forget(new)
    assert (len(index), index.bytes) == (0, 0)


@pytest.mark.slow
def test_ten_thousand_blocks_are_found_at_the_start(memory_path: Path) -> None:
    made = 10_000
    base = memory_path / IDENTITY.hex()
    keys = [random.Random(1).randbytes(14) + number.to_bytes(2, "big") for number in range(made)]
    for number, key in enumerate(keys):
        key = bytes([number % 256]) + key[1:]
        path = base / key.hex()[:2] / key.hex()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(FILE)
    tier = opened(memory_path, blocks=made)
    assert tier.stats.blocks == made
    tier.close()


def test_a_cancelled_read_stops_early(tmp_path: Path) -> None:
    files = GatedFiles()
    files.writes.set()
    tier = opened(tmp_path, options=DiskOptions(files=files))
    chain = chain_of(1, 5)
    stored(tier, chain)
    files.reached.clear()
    ready = threading.Event()
    ticket = tier.read(chain, ready.set)
    assert files.reached.wait(PATIENCE_S)
    assert not ticket.done
    ticket.cancel()
    files.reads.set()
    assert ready.wait(PATIENCE_S)
    assert (ticket.done, len(ticket.payloads)) == (True, 1)
    tier.close()


def test_closing_ends_reads_and_says_so_once(tmp_path: Path) -> None:
    files = GatedFiles()
    files.writes.set()
    tier = opened(tmp_path, options=DiskOptions(files=files))
    chain = chain_of(1, 3)
    stored(tier, chain)
    files.reached.clear()
    calls: list[int] = []
    tickets = [tier.read(chain, partial(calls.append, number)) for number in range(3)]
    assert files.reached.wait(PATIENCE_S)
    closing = threading.Thread(target=tier.close)
    closing.start()
    while not tickets[2].done:
        time.sleep(0.001)
    files.reads.set()
    closing.join(PATIENCE_S)
    late = tier.read(chain, lambda: calls.append(3))
    assert [ticket.done for ticket in (*tickets, late)] == [True] * 4
    assert [len(ticket.payloads) for ticket in (*tickets, late)] == [1, 0, 0, 0]
    assert sorted(calls) == [0, 1, 2, 3]
    assert not tier.write(chain_of(2, 1)[0], bytes(BLOCK))
    assert tier.flush(0)
    tier.close()


@pytest.mark.thorough
def test_closing_writes_what_is_queued_and_leaves_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    tier = opened(tmp_path)
    chain = chain_of(1, 50)
    for name in chain:
        assert tier.write(name, payload_of(name))
    tier.close()
    assert threading.active_count() == before
    again = opened(tmp_path)
    assert held(again, chain) == [True] * 50
    again.close()


def test_a_failing_callback_does_not_end_the_reader(tier: DiskTier, caplog: pytest.LogCaptureFixture) -> None:
    chain = chain_of(1, 1)
    stored(tier, chain)

    def fail() -> None:
        raise ValueError("the caller's mistake")

    tier.read(chain, fail)
    assert fetched(tier, chain) == [payload_of(chain[0])]
    assert "a callback failed" in caplog.text


def test_the_read_rate_is_bytes_over_time(tmp_path: Path) -> None:
    clock = ManualClock()
    files = GatedFiles()
    files.writes.set()
    tier = opened(tmp_path, options=DiskOptions(files=files, clock=clock))
    chain = chain_of(1, 1)
    stored(tier, chain)
    assert tier.read_rate is None
    files.reached.clear()
    ready = threading.Event()
    tier.read(chain, ready.set)
    assert files.reached.wait(PATIENCE_S)
    clock.advance(0.5)
    files.reads.set()
    assert ready.wait(PATIENCE_S)
    assert tier.read_rate == pytest.approx(2 * BLOCK)
    assert tier.stats.read_seconds == pytest.approx(0.5)
    tier.close()


@pytest.mark.thorough
def test_threads_read_and_write_at_once(tmp_path: Path) -> None:
    """More blocks than fit, so that reads race with eviction and rewriting; nothing wrong is ever returned."""
    tier = opened(tmp_path, blocks=60, options=DiskOptions(readers=2))
    wrong: list[BlockName] = []
    read = [0]

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(25):
            chain = chain_of(chance.randrange(8), 12)
            for name in chain:
                tier.write(name, payload_of(name))
            tier.touch([name.key for name in chain])
            got = fetched(tier, chain_of(chance.randrange(8), 12))
            read[0] += len(got)
        for number in range(8):
            chain = chain_of(number, 12)
            wrong.extend(
                name for name, data in zip(chain, fetched(tier, chain), strict=False) if data != payload_of(name)
            )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.flush(PATIENCE_S)
    stats = tier.stats
    assert (wrong, stats.rejected, stats.failed_writes) == ([], 0, 0)
    assert read[0] > 100
    assert stats.evicted > 0
    assert stats.bytes == sum(path.stat().st_size for path in files_in(tmp_path)) <= 60 * FILE
    tier.close()
    again = opened(tmp_path)
    assert again.stats.blocks == stats.blocks
    again.close()


def test_figures_are_values(tier: DiskTier) -> None:
    before = tier.stats
    stored(tier, chain_of(1, 1))
    assert before.written == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.written = 1  # type: ignore[misc]


def test_what_is_discarded_is_gone_also_while_it_is_written(tmp_path: Path) -> None:
    files = GatedFiles()
    files.writes.set()
    tier = opened(tmp_path, options=DiskOptions(files=files))
    chain = chain_of(5, 3)
    stored(tier, chain[:1])
    files.writes.clear()
    files.reached.clear()
    for name in chain[1:]:
        assert tier.write(name, payload_of(name))
    assert files.reached.wait(PATIENCE_S)
    tier.discard([name.key for name in chain])
    assert held(tier, chain) == [False, False, False]
    files.writes.set()
    assert tier.flush(PATIENCE_S)
    tier.close()
    assert files_in(tmp_path) == []
    assert tier.stats.bytes == 0
