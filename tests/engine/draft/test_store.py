"""Past runs on disk: what comes back is what was saved, or nothing."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from magnitude_engine.draft.corpus import CorpusLimits, RunCorpus
from magnitude_engine.draft.store import RunsRejected, RunStore, decode, encode

RUNS = [[seed * 100 + at for at in range(20)] for seed in range(1, 5)]
IDENTITY = bytes(range(32))

SAVE_FOREVER = """
import sys
from pathlib import Path
from magnitude_engine.draft.corpus import RunCorpus
from magnitude_engine.draft.store import RunStore
store = RunStore(Path(sys.argv[1]), b"salt", "vocabulary")
corpus = RunCorpus()
for seed in range(1, 1_000_000):
    corpus.add([seed] * 2_000)
    store.save("tenant", corpus)
    print(seed, flush=True)
"""


def store_in(folder: Path, salt: bytes = b"salt", vocabulary: str = "vocabulary") -> RunStore:
    """Returns a store."""
    return RunStore(folder, salt, vocabulary)


def words(corpus: RunCorpus) -> list[list[int]]:
    """Returns the runs as lists."""
    return [list(run) for run in corpus.runs()]


def test_what_was_saved_comes_back_in_the_order_of_use(tmp_path: Path) -> None:
    corpus = RunCorpus(runs=RUNS)
    corpus.add(RUNS[0])
    store_in(tmp_path / "runs").save("tenant", corpus)
    loaded = store_in(tmp_path / "runs").load("tenant")
    assert words(loaded) == [*RUNS[1:], RUNS[0]]
    assert loaded.propose(RUNS[2][:9], 3, 3) == corpus.propose(RUNS[2][:9], 3, 3)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [store_in(tmp_path).path("tenant").name]
    assert store_in(tmp_path / "runs").path("tenant").stat().st_mode & 0o077 == 0


def test_a_smaller_limit_keeps_what_was_used_last(tmp_path: Path) -> None:
    store_in(tmp_path).save("tenant", RunCorpus(runs=RUNS))
    smaller = RunStore(tmp_path, b"salt", "vocabulary", CorpusLimits(tokens=80))
    assert words(smaller.load("tenant")) == RUNS[2:]


def test_no_file_no_runs_and_none_after_deletion(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert words(store.load("tenant")) == []
    store.save("tenant", RunCorpus(runs=RUNS))
    store.delete("tenant")
    store.delete("tenant")
    assert list(tmp_path.iterdir()) == []


def test_another_tenant_salt_or_vocabulary_finds_nothing_even_in_the_same_place(tmp_path: Path) -> None:
    store_in(tmp_path).save("tenant", RunCorpus(runs=RUNS))
    mine = store_in(tmp_path).path("tenant")
    others = [
        (store_in(tmp_path), "tenant2"),
        (store_in(tmp_path, salt=b"other"), "tenant"),
        (store_in(tmp_path, vocabulary="other"), "tenant"),
        (store_in(tmp_path, vocabulary="tvocabulary"), "tenan"),
    ]
    assert len({mine, *(store.path(tenant) for store, tenant in others)}) == 5
    for store, tenant in others:
        assert words(store.load(tenant)) == []
        store.path(tenant).write_bytes(mine.read_bytes())
        assert words(store.load(tenant)) == []
    assert b"tenant" not in mine.read_bytes()
    assert "tenant" not in mine.name


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    data = encode(IDENTITY, RunCorpus(runs=RUNS[:2]).runs())
    assert [list(run) for run in decode(IDENTITY, data)] == RUNS[:2]
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(RunsRejected):
            decode(IDENTITY, bytes(damaged))
    for end in range(len(data)):
        with pytest.raises(RunsRejected):
            decode(IDENTITY, data[:end])
    with pytest.raises(RunsRejected, match="corrupt"):
        decode(IDENTITY, data + b"\0")
    with pytest.raises(RunsRejected, match="foreign"):
        decode(bytes(32), data)


def test_rubbish_is_a_miss_and_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path)
    rng = random.Random(5)
    for size in (0, 10, 90, 500):
        store.path("tenant").write_bytes(rng.randbytes(size))
        assert words(store.load("tenant")) == []
    assert caplog.text.count("is not used") == 4
    store.save("tenant", RunCorpus(runs=RUNS))
    assert words(store.load("tenant")) == RUNS


def test_what_a_killed_process_left_behind_does_not_disturb(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save("tenant", RunCorpus(runs=RUNS[:1]))
    left = store.path("tenant").with_suffix(".runs.tmp")
    left.write_bytes(store.path("tenant").read_bytes()[:50])
    assert words(store.load("tenant")) == RUNS[:1]
    store.save("tenant", RunCorpus(runs=RUNS))
    assert not left.exists()
    assert words(store.load("tenant")) == RUNS


def test_a_failed_save_leaves_what_was_there(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save("tenant", RunCorpus(runs=RUNS[:1]))
    store.path("tenant").with_suffix(".runs.tmp").mkdir()
    with pytest.raises(OSError, match=r"\.tmp"):
        store.save("tenant", RunCorpus(runs=RUNS))
    assert words(store.load("tenant")) == RUNS[:1]


def test_a_salt_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at most 64 bytes, not 65"):
        store_in(tmp_path, salt=bytes(65))


@pytest.mark.slow
def test_kill_in_the_middle_of_saving(tmp_path: Path) -> None:
    rng = random.Random(6)
    for _ in range(5):
        child = subprocess.Popen((sys.executable, "-c", SAVE_FOREVER, str(tmp_path)), stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        saved = 0
        for _ in range(rng.randrange(5, 60)):
            saved = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        child.stdout.close()
        child.wait()
        seeds = [run[0] for run in words(store_in(tmp_path).load("tenant"))]
        assert seeds == list(range(seeds[0], seeds[-1] + 1))
        assert seeds[-1] >= saved
        assert all(run == [run[0]] * 2_000 for run in words(store_in(tmp_path).load("tenant")))
