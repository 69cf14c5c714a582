"""The engine that says recorded answers: what it says, what it reuses, and what it counts."""

from __future__ import annotations

import io
import sys

import msgspec
import pytest

from magnitude_engine import api, forced
from magnitude_engine.api.forced import ForcedFigures, ForcedStep
from magnitude_engine.forced import ForcedEngine
from testkit.engine import engine_config
from testkit.tiny import tiny_model

pytestmark = pytest.mark.thorough

ANSWERS = ("the tool is in the house, and then the tool is in the house again", "on the table")


def steps() -> list[ForcedStep]:
    """Returns a session of two steps, whose second prompt holds the first answer."""
    first = (api.Message(role="user", content="Where is the tool? Look in the house."),)
    second = (
        *first,
        api.Message(role="assistant", content=ANSWERS[0]),
        api.Message(role="user", content="And where there?"),
    )
    return [
        ForcedStep(session="s", step=number, chat=api.ChatInput(messages=messages), answer=answer)
        for number, (messages, answer) in enumerate(zip((first, second), ANSWERS, strict=True))
    ]


def run(level: str, threaded: bool) -> list[ForcedFigures]:
    engine = ForcedEngine(tiny_model(), engine_config(optimization_level=level), threaded)
    try:
        return [engine.step(step) for step in steps()]
    finally:
        engine.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_what_was_said_is_what_was_recorded(threaded: bool) -> None:
    model = tiny_model()
    prompts = [len(model.prompts.encode(step.chat)) for step in steps()]
    answers = [len(model.tokenizer.encode(answer)) for answer in ANSWERS]
    first, second = run("balanced", threaded)
    assert [f.usage.prompt_tokens for f in (first, second)] == prompts
    assert [f.usage.completion_tokens for f in (first, second)] == answers
    # The second prompt goes on from the recorded answer, so its pages were computed from just that. The last token
    # that was said is not computed any more.
    assert second.usage.cached_tokens >= prompts[0] + answers[0] - 1
    assert second.rows < prompts[1]
    assert all(0 < f.first_s <= f.wall_s for f in (first, second))


def test_static_mode_computes_everything() -> None:
    for figures in run("off", threaded=False):
        usage = figures.usage
        assert (usage.cached_tokens, usage.drafted_tokens) == (0, 0)
        assert figures.rows == usage.prompt_tokens + usage.completion_tokens - 1


def test_right_drafts_save_passes() -> None:
    (drafted, _), (plain, _) = run("balanced", threaded=False), run("off", threaded=False)
    assert drafted.usage.accepted_tokens > 0
    assert drafted.passes == plain.passes - drafted.usage.accepted_tokens


def test_lines_in_and_lines_out(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", output)
    engine = ForcedEngine(tiny_model(context=64), engine_config(), threaded=False)
    try:
        forced.serve(engine, [msgspec.json.encode(step) for step in steps()])
    finally:
        engine.close()
    figures = [msgspec.json.decode(line, type=ForcedFigures) for line in output.buffer.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert len(figures) == 2
    assert "64" in figures[1].error
