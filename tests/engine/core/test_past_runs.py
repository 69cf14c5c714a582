"""Past runs outlive the engine: a later one on the same folder drafts from them, each tenant from its own."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from magnitude_engine import api
from magnitude_engine.build import RUNS_FOLDER
from magnitude_engine.draft.corpus import RunCorpus
from magnitude_engine.draft.runs import KEPT_TENANTS, SAVE_EVERY_S, PastRuns, open_store
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel
from testkit.clock import ManualClock
from testkit.engine import Recorder, alone, engine_config, generate, run

pytestmark = pytest.mark.thorough

WORDS = "tell me what you told others"
RUN = list(range(40, 80))


def request(**fields: Any) -> api.Generate:
    return generate(WORDS, **{"max_tokens": 24, "sampling": api.Sampling(temperature=1.0, seed=2), **fields})


def told(model: LoadedModel, folder: Path, asked: api.Generate, disk_mb: int = 64) -> Recorder:
    """Returns the answer of an engine on a folder that lives for one request."""
    engine = Engine(model, engine_config(kv_disk_mb=disk_mb, kv_dir=str(folder)), pages=96)
    runs = engine._stepper.speculation.runs
    try:
        runs.of(asked.tenant)
        runs.settle()
        (answer,) = run(engine, asked)
    finally:
        engine.close()
    assert answer.ids() == alone(model, asked).ids()
    return answer


def drafted(answer: Recorder) -> int:
    return answer.usage.accepted_tokens


@pytest.fixture
def unaided(model: LoadedModel, tmp_path: Path) -> int:
    """What an engine accepts that knows of no past runs."""
    return drafted(told(model, tmp_path / "unaided", request()))


def files(folder: Path) -> list[Path]:
    return sorted((folder / RUNS_FOLDER).glob("*.runs"))


def test_a_second_engine_drafts_from_the_first_ones_runs(model: LoadedModel, tmp_path: Path, unaided: int) -> None:
    told(model, tmp_path, request())
    assert drafted(told(model, tmp_path, request())) > unaided + 8
    kept = [*files(tmp_path), tmp_path / RUNS_FOLDER / "key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}
    assert stat.S_IMODE((tmp_path / RUNS_FOLDER).stat().st_mode) == 0o700


def test_tenants_have_their_own(model: LoadedModel, tmp_path: Path, unaided: int) -> None:
    told(model, tmp_path, request())
    assert drafted(told(model, tmp_path, request(tenant="other"))) == unaided
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize("damage", ["byte", "half", "key"])
def test_damaged_files_count_as_none(model: LoadedModel, tmp_path: Path, unaided: int, damage: str) -> None:
    told(model, tmp_path, request())
    (file,) = files(tmp_path)
    data = file.read_bytes()
    if damage == "byte":
        file.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    elif damage == "half":
        file.write_bytes(data[: len(data) // 2])
    else:
        (tmp_path / RUNS_FOLDER / "key").write_bytes(b"short")
    assert drafted(told(model, tmp_path, request())) == unaided
    # What the second engine was told is there for the third.
    assert drafted(told(model, tmp_path, request())) > unaided + 8


def test_nothing_is_written_without_the_disk_tier(model: LoadedModel, tmp_path: Path, unaided: int) -> None:
    assert drafted(told(model, tmp_path / "none", request(), disk_mb=0)) == unaided
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_costs_past_runs_only(
    model: LoadedModel, tmp_path: Path, unaided: int, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / RUNS_FOLDER).write_text("a file where the folder should be", "utf-8")
    assert drafted(told(model, tmp_path, request())) == unaided
    assert "past runs are not kept" in caplog.text


def runs_in(folder: Path, clock: ManualClock) -> PastRuns:
    store = open_store(folder, "vocabulary")
    assert store is not None
    return PastRuns(store, clock)


def test_saving_is_bounded_in_rate_and_happens_at_the_end(tmp_path: Path) -> None:
    clock = ManualClock()
    runs = runs_in(tmp_path, clock)
    for tenant in "ab":
        runs.add(tenant, RUN)
    runs.settle()
    assert list(tmp_path.glob("*.runs")) == []
    clock.advance(SAVE_EVERY_S)
    runs.add("a", RUN[::-1])
    runs.settle()
    assert len(list(tmp_path.glob("*.runs"))) == 2
    runs.add("c", RUN)
    runs.close()
    assert len(list(tmp_path.glob("*.runs"))) == 3


def test_tenants_that_make_room_are_saved_and_come_back(tmp_path: Path) -> None:
    runs = runs_in(tmp_path, ManualClock())
    runs.add("first", RUN)
    for number in range(KEPT_TENANTS):
        runs.of(str(number))
    runs.settle()
    again: RunCorpus = runs.of("first")
    runs.settle()
    assert [list(run) for run in again.runs()] == [RUN]
    runs.close()
