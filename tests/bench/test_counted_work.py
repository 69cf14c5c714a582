"""What recorded sessions may cost at most, in forward rows and passes: counted, so that no clock decides.

The model is made to say the recorded answers (`magnitude_engine.forced`), by the exact profile's rules, where nothing
depends on measured time. So what is computed does not depend on the weights either, and sessions are counted with
SmolLM2's tokenizer and template but without its arithmetic; a short one, computed, shows that it is so.

Counted on 2026-12-01: 5,222 rows and 559 passes, where static mode computes 19,071 rows. A bound that is passed means
that something is computed which was not before: find it, or raise the bound with a line in log.md that says why.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from magnitude_engine.api.forced import ForcedFigures, ForcedStep
from magnitude_engine.config import EngineConfig
from magnitude_engine.forced import ForcedEngine
from magnitude_engine.model.loader import LoadedModel, load_model
from magnitude_proxy.bench import recorded
from magnitude_proxy.bench.recorded import Trace
from magnitude_proxy.bench.replay import chat
from testkit.ledger import ledger_of
from testkit.model import smollm2_path

SESSIONS = ("browsing-room", "coding-leap", "subagent-lead", "branch-a")
SHORT = "branch-a"
TRACES = [
    trace for path in recorded.trace_files([]) for trace in recorded.read_traces(path) if trace.trace_id in SESSIONS
]
MOST_ROWS = 5500
MOST_PASSES = 600


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """SmolLM2 in the exact profile."""
    return load_model(EngineConfig(model_path=str(smollm2_path()), profile="reference", threads=1))


def replayed(model: LoadedModel, traces: Sequence[Trace], level: str = "balanced") -> list[ForcedFigures]:
    """Runs all steps of `traces` on an engine that begins empty."""
    config = msgspec.convert({"model_path": "", "profile": "reference", "optimization_level": level}, EngineConfig)
    engine = ForcedEngine(model, config, threaded=False)
    try:
        return [
            engine.step(ForcedStep(session=step.session, step=step.number, chat=chat(step), answer=step.answer))
            for trace in traces
            for step in recorded.steps(trace, as_text=True)
        ]
    finally:
        engine.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_work_for_recorded_sessions_stays_bounded(model: LoadedModel) -> None:
    figures = replayed(ledger_of(model)[0], TRACES)
    assert not any(each.error for each in figures)
    rows, passes = sum(each.rows for each in figures), sum(each.passes for each in figures)
    static = sum(each.usage.prompt_tokens + each.usage.completion_tokens - 1 for each in figures)
    print(f"{rows} rows, {passes} passes; static mode: {static} rows")
    assert rows <= MOST_ROWS
    assert passes <= MOST_PASSES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_weights_do_not_decide_what_is_computed(model: LoadedModel) -> None:
    traces = [trace for trace in TRACES if trace.trace_id == SHORT]

    def counts(figures: Sequence[ForcedFigures]) -> list[tuple[int, int, int]]:
        return [(each.rows, each.passes, each.usage.accepted_tokens) for each in figures]

    assert counts(replayed(model, traces)) == counts(replayed(ledger_of(model)[0], traces))
