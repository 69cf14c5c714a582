"""What a forced replay (`magnitude_engine.forced`) is asked, and what it answers: one JSON object a line each way."""

from __future__ import annotations

from magnitude_engine.api.conversation import ChatInput, Frozen
from magnitude_engine.api.events import Usage


class ForcedStep(Frozen, frozen=True, kw_only=True):
    """A step of a recorded session; `answer` is what the model is made to say, as text."""

    session: str
    step: int
    chat: ChatInput
    answer: str


class ForcedFigures(Frozen, frozen=True, kw_only=True):
    """What a step took.

    Attributes:
        first_s, wall_s: until the first token, and the whole answer, was there; in seconds from its submission.
        passes, rows: forward passes, and rows of all of them, drafts and prefill ahead included.
        error: why there is no answer.
    """

    first_s: float = 0.0
    wall_s: float = 0.0
    usage: Usage = Usage()
    passes: int = 0
    rows: int = 0
    error: str = ""


class ForcedReady(Frozen, frozen=True, kw_only=True):
    """The first line of output: the model is loaded."""

    profile: str
    context_length: int
