"""The watchdog's judgement of a worker, and its delays."""

from __future__ import annotations

import pytest

from magnitude_engine import api
from magnitude_engine.watchdog import Pulse, WatchLimits, restart_delay

LIMITS = WatchLimits(hang_s=20, start_s=300)


def status(steps: int, running: int = 0, waiting: int = 0) -> api.Status:
    return api.Status(incarnation="i", steps=steps, running=running, waiting=waiting, pages_free=1, pages_total=1)


def test_a_worker_that_loads_is_well_until_the_start_limit() -> None:
    pulse = Pulse(LIMITS, started=100.0)
    assert pulse.verdict(399.0) is None
    assert "does not listen" in str(pulse.verdict(401.0))


def test_an_idle_worker_is_well() -> None:
    pulse = Pulse(LIMITS, started=0.0)
    for now in range(1, 200):
        pulse.observe(status(7), float(now))
        assert pulse.verdict(float(now)) is None


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (0, 1)])
def test_a_worker_with_work_whose_steps_stand_still_hangs(running: int, waiting: int) -> None:
    pulse = Pulse(LIMITS, started=0.0)
    pulse.observe(status(7), 50.0)
    for now in range(51, 72):
        pulse.observe(status(7, running, waiting), float(now))
        assert pulse.verdict(float(now)) is None
    pulse.observe(status(7, running, waiting), 72.0)
    assert "has not finished a step" in str(pulse.verdict(72.0))


def test_a_slow_worker_is_well() -> None:
    pulse = Pulse(LIMITS, started=0.0)
    for now in range(1, 400):
        pulse.observe(status(now // 19, running=9), float(now))
        assert pulse.verdict(float(now)) is None


def test_a_worker_that_falls_silent_hangs() -> None:
    pulse = Pulse(LIMITS, started=0.0)
    pulse.observe(status(1), 10.0)
    assert pulse.verdict(30.0) is None
    assert "no status" in str(pulse.verdict(30.1))


def test_delays_grow_to_a_limit_and_spread() -> None:
    assert [restart_delay(n, 0.0) for n in (1, 2, 3, 20)] == [0.5, 1.0, 2.0, 30.0]
    assert restart_delay(1, 1.0) == 0.75
