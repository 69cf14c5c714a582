"""Durations and lengths learned from the last calls."""

from __future__ import annotations

from magnitude_engine.kv.toolstats import MAX_TENANTS, MAX_TOOLS, SAMPLES, Recent, ToolTable


def recent(*values: float) -> Recent:
    """Returns what is left of these values."""
    kept = Recent()
    for value in values:
        kept.add(value)
    return kept


def test_one_outlier_moves_nothing() -> None:
    assert recent(1.0, 1.1).median is None
    assert recent(1.0, 1.1, 900.0).median == 1.1
    assert recent(900.0, 1.0, 1.1, 1.2).median == 1.1
    assert recent(1.0, 1.1, 1.2, 900.0).beyond(2.0) is None


def test_a_lasting_change_is_learned() -> None:
    assert recent(*[1.0] * SAMPLES, *[5.0] * (SAMPLES // 2 + 1)).median == 5.0
    kept = recent(*[float(i % 7) for i in range(1000)])
    assert kept._ordered == sorted(kept._latest) == sorted(float(i % 7) for i in range(1000 - SAMPLES, 1000))


def test_what_is_left_depends_on_what_has_passed() -> None:
    bimodal = recent(*[1.0] * 20, *[600.0] * 12)
    assert (bimodal.beyond(0.0), bimodal.beyond(2.0), bimodal.beyond(601.0)) == (1.0, 598.0, None)


def test_calls_made_together_are_done_when_the_slowest_is() -> None:
    tools = ToolTable()
    for _ in range(3):
        tools.took("t", ["fast"], 1.0)
        tools.took("t", ["slow"], 60.0)
    assert tools.duration("t", ["fast", "slow", "new"]) == 60.0
    assert tools.remaining("t", ["fast", "slow", "new"], 10.0) == 50.0
    assert tools.remaining("t", ["fast", "slow"], 61.0) is None
    assert (tools.duration("t", ["new"]), tools.duration("other", ["fast"])) == (None, None)


def test_of_calls_made_together_the_one_that_was_waited_for_is_learned() -> None:
    tools = ToolTable()
    for _ in range(3):
        tools.took("t", ["fast"], 1.0)
        tools.took("t", ["slow"], 60.0)
    for _ in range(SAMPLES):
        tools.took("t", ["fast", "slow", "new"], 50.0)
    assert [tools.duration("t", [tool]) for tool in ("fast", "slow", "new")] == [1.0, 50.0, None]
    for _ in range(3):
        tools.took("t", ["fast", "new"], 70.0)
    assert [tools.duration("t", [tool]) for tool in ("fast", "new")] == [1.0, 70.0]


def test_tools_whose_durations_are_told_are_all_learned() -> None:
    tools = ToolTable()
    for _ in range(3):
        # The client took half a second more to come back with the slowest result.
        tools.took("t", ["Bash", "Read", "Bash"], 5.0, {"Bash": 4.5, "Read": 0.1, "Edit": 9.0})
        tools.took("t", ["Glob", "Grep"], 1.0, {"Glob": 0.5})
    assert [tools.duration("t", [tool]) for tool in ("Bash", "Read", "Edit")] == [5.0, 0.1, None]
    assert tools.duration("t", ["Glob"]) == tools.duration("t", ["Grep"]) == 1.0


def test_tools_and_tenants_are_bounded() -> None:
    tools = ToolTable()
    for _ in range(3):
        tools.returned("quiet", "search", 100)
    for number in range(3 * MAX_TOOLS):
        tools.returned("loud", f"tool-{number}", 1)
    assert tools.find("quiet", "search") is not None
    assert tools.find("loud", "tool-0") is None
    assert tools.find("loud", f"tool-{3 * MAX_TOOLS - 1}") is not None
    for number in range(MAX_TENANTS):
        tools.returned(f"tenant-{number}", "search", 1)
    assert (tools.find("quiet", "search"), len(tools._tenants)) == (None, MAX_TENANTS)
    assert all(len(known) <= MAX_TOOLS for known in tools._tenants.values())
