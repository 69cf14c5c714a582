"""`magnitude bench agent` on the real product: it is started, measured, forced, and ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from magnitude_proxy.bench import command, receipt, recorded
from testkit.model import smollm2_path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_product_is_measured_beside_its_static_mode(tmp_path: Path) -> None:
    words = ["--traces", str(recorded.OWN / "chat_branches.jsonl"), "--sessions", "1", "--steps", "2", "--tokens", "4"]
    both = ["--contender", "magnitude", "--contender", "magnitude-off"]
    names = [*both, "--mode", "fixed", "--mode", "forced", "--rounds", "1"]
    assert command.main(["agent", *words, *names, "--model", str(smollm2_path()), "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    found = receipt.read(path)
    samples = {(s.mode, s.contender, s.step): s for s in found.samples}
    assert len(samples) == len(found.samples) == 8
    assert not any(s.error for s in found.samples)
    assert all(0 < (s.first_s or 0) <= s.wall_s for s in found.samples)
    for mode in ("fixed", "forced"):
        first, second = (samples[mode, "magnitude", step] for step in range(2))
        # At least the common beginning of both prompts, but for what does not fill a page.
        assert (second.cached or 0) >= (first.prompt or 0) - 32
        assert [samples[mode, "magnitude-off", step].cached for step in range(2)] == [0, 0]
    assert all(s.output == 4 for s in found.samples if s.mode == "fixed")
    off = samples["forced", "magnitude-off", 1]
    assert (off.rows, off.prompt) == (
        (off.prompt or 0) + (off.output or 0) - 1,
        samples["fixed", "magnitude", 1].prompt,
    )
    assert (samples["forced", "magnitude", 1].rows or 0) < (off.rows or 0)
    measured = {entry.name: entry for entry in found.contenders}
    assert "--optimization-level off" in " ".join(measured["magnitude-off"].command)
    assert not any(word.startswith("/") for entry in found.contenders for word in entry.command)
    assert all(run.resident_mb > 50 for run in found.runs)
