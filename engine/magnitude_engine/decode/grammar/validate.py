"""Checks finished JSON against what no grammar expresses, in the killable helper process.

The schema is the client's own: its patterns may backtrack forever and its references point anywhere. Patterns are
given a time limit, references are resolved within the schema only.
"""

from __future__ import annotations

from dataclasses import dataclass

from magnitude_engine.api import Frozen
from magnitude_engine.decode.grammar.jobs import Checked, CheckJob
from magnitude_engine.decode.grammar.process import Ended, Helper, HelperLimits


class Rule(Frozen, frozen=True, kw_only=True):
    """What one text must satisfy.

    Attributes:
        tool: whose arguments the text is; None for the whole answer.
        schema: the JSON Schema as JSON.
        keywords: what of it the grammar does not enforce, with its place.
    """

    tool: str | None
    schema: str
    keywords: tuple[str, ...]


class PostCheck(Frozen, frozen=True, kw_only=True):
    """The texts of an answer that must be held back until they are checked; at least one."""

    rules: tuple[Rule, ...]

    def rule(self, tool: str | None = None) -> Rule | None:
        """Returns the rule for a tool's arguments, or for the whole answer; None where nothing is to be checked."""
        return next((rule for rule in self.rules if rule.tool == tool), None)


@dataclass(frozen=True, slots=True)
class Valid:
    """The text satisfies its schema."""


@dataclass(frozen=True, slots=True)
class Invalid:
    """The text does not; `path` is a JSON pointer into it."""

    message: str
    path: str


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The check was given up; `message` says why."""

    message: str


Verdict = Valid | Invalid | TimedOut


class Validator:
    """Thread-safe; checks run one after the other in a process of their own."""

    def __init__(self, limits: HelperLimits | None = None) -> None:
        self._helper = Helper(None, limits or HelperLimits())

    def start(self) -> None:
        """Starts the process ahead of the first check."""
        self._helper.start()

    def check(self, rule: Rule, text: str) -> Verdict:
        """Returns whether `text` is JSON that satisfies the rule; blocks for at most the helper's limits.

        Raises:
            Overloaded: other checks took too long.
            EngineError: the helper cannot be started, or was closed.
        """
        job = CheckJob(schema=rule.schema, text=text, budget=self._helper.limits.job)
        answer = self._helper.ask(job)
        if isinstance(answer, Ended):
            return TimedOut(f"the check was given up: {answer.value}")
        if isinstance(answer, Checked) and not answer.valid:
            return Invalid(answer.message, answer.path)
        return Valid()

    def close(self) -> None:
        """Ends the process."""
        self._helper.close()
