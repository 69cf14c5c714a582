"""Replayed agent sessions are served from the cache what unlimited memory would serve."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from magnitude_engine import api
from magnitude_engine.config import PAGE_TOKENS
from magnitude_engine.engine import Engine
from magnitude_engine.model.loader import LoadedModel
from testkit.engine import engine_config
from testkit.ledger import Ledger, fingerprint, ledger_of, smollm2
from testkit.replay import Oracle, Replay, Served, by_trace, interleaved, share, write_back
from testkit.tiny import tiny_model
from testkit.traces import Trace, Turn, own_traces, public_traces_or_skip, request, turns

ACTIVE = 8
CONTEXT = 16_384


def sessions_of(traces: Sequence[Trace], model: LoadedModel) -> list[list[Turn]]:
    found = [turns(trace, model) for trace in traces]
    assert all(found)
    return found


def disk_engine(model: LoadedModel, folder: Path, pages: int) -> Engine:
    return Engine(model, engine_config(prefill_chunk=1024, kv_disk_mb=512, kv_dir=str(folder)), pages=pages)


def shares(steps: Sequence[Served]) -> dict[str, float]:
    """Returns what each trace got, as a share of what unlimited memory would have served."""
    return {n: share(sum(s.cached for s in t), sum(s.oracle for s in t)) for n, t in by_trace(steps).items()}


def checked(replay: Replay, ledger: Ledger, turn: Turn) -> Served:
    """Runs a step and checks that the cache held the right tokens for it."""
    served = replay.step(turn)
    assert ledger.read[-1] == fingerprint(turn.computed)
    return served


def test_the_oracle_finds_the_longest_prefix_of_anything_known() -> None:
    oracle = Oracle()
    known = [(1, 2, 3), (1, 2, 9, 9), (1, 5), (4,), (1, 2, 3, 4, 5, 6)]
    for each in known:
        oracle.add(each)
    assert [oracle.longest(p) for p in ((1, 2, 3, 4, 7), (1, 2, 9), (2,), (1, 6), (1, 2, 4, 9))] == [4, 3, 0, 1, 2]


def test_own_traces_have_the_kinds_and_lengths_that_agents_have() -> None:
    traces = own_traces()
    assert len({trace.group for trace in traces}) >= 10
    for trace in traces:
        asked = [call.id for message in trace.messages for call in message.tool_calls]
        answered = [message.tool_call_id for message in trace.messages if message.role == "tool"]
        assert asked == answered
        assert {c.name for m in trace.messages for c in m.tool_calls} <= {tool.name for tool in trace.tools}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_traces_computed_by_a_tiny_model_get_what_the_oracle_has() -> None:
    model = tiny_model(context=CONTEXT, profile="native")
    engine = Engine(model, engine_config(profile="native", prefill_chunk=1024), pages=8192)
    replay = Replay.on(engine)
    steps = [replay.step(turn) for turn in interleaved(sessions_of(own_traces(), model), ACTIVE)]
    engine.check_integrity()
    assert min(shares(steps).values()) >= 0.97
    assert all(step.cached <= step.oracle for step in steps), "more was served than was ever computed"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_own_traces_resume_from_disk_after_a_restart(tmp_path: Path) -> None:
    model, ledger = ledger_of(tiny_model(context=CONTEXT))
    check_restart(model, ledger, own_traces(), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_public_traces_get_what_the_oracle_has_and_resume_after_a_restart(tmp_path: Path) -> None:
    model, ledger = ledger_of(smollm2())
    check_restart(model, ledger, public_traces_or_skip(), tmp_path)


def check_restart(model: LoadedModel, ledger: Ledger, traces: Sequence[Trace], folder: Path) -> None:
    """Runs half of each session, restarts on the same folder, runs the rest; checks what each step was served."""
    sessions = sessions_of(traces, model)
    before = Replay.on(disk_engine(model, folder, 40_000))
    before.idle = write_back
    first_half = [session[: (len(session) + 1) // 2] for session in sessions]
    steps = [checked(before, ledger, turn) for turn in interleaved(first_half, ACTIVE)]
    assert min(shares(steps).values()) >= 0.97
    before.engine.close()
    after = Replay.on(disk_engine(model, folder, 40_000), before)
    rest = [session[(len(session) + 1) // 2 :] for session in sessions]
    resumed = [checked(after, ledger, turn) for turn in interleaved(rest, ACTIVE)]
    after.engine.close()
    check_resumed(resumed)


def check_resumed(steps: Sequence[Served]) -> None:
    """Checks that after a restart no step misses a full page that was computed before it."""
    first = [each[0] for each in by_trace(steps).values()]
    assert sum(step.disk for step in first) > 0
    assert all(step.cached >= 0.99 * step.full for step in steps), "a session was not found on disk"
    assert all(step.oracle - step.cached < PAGE_TOKENS for step in steps), "more than the last page was computed again"
    assert all(step.cached <= step.oracle for step in steps), "more was served than was ever computed"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_prefill_ahead_serves_what_no_request_has_computed() -> None:
    model, _ = ledger_of(tiny_model(context=CONTEXT))
    sessions = sessions_of(own_traces(), model)

    def served(ahead: bool) -> tuple[int, int]:
        engine = Engine(model, engine_config(prefill_chunk=1024), pages=8192)
        replay = Replay.on(engine)
        replay.ask = lambda turn: request(turn, ahead=ahead)
        replay.idle = settle
        steps = [replay.step(turn) for turn in interleaved(sessions, ACTIVE)]
        engine.close()
        return sum(s.cached for s in steps), sum(s.oracle for s in steps)

    without, with_it = served(False), served(True)
    assert without[0] <= without[1]
    assert with_it[0] > with_it[1]


def settle(engine: Engine) -> None:
    """Lets the engine compute ahead whatever is settled."""
    engine._predictor.wait()
    while engine.step():
        pass


def test_a_forced_answer_is_computed_and_one_token_more_is_drawn() -> None:
    model, ledger = ledger_of(tiny_model(context=CONTEXT))
    engine = Engine(model, engine_config(prefill_chunk=1024), pages=2048)
    (first, second, *_) = turns(own_traces()[-1], model)
    replay = Replay.on(engine)
    assert checked(replay, ledger, first).cached == 0
    served = checked(replay, ledger, second)
    assert served.cached == served.oracle == len(first.computed)
    assert isinstance(request(first).input, api.ChatInput)
