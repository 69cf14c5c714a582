"""Why something cannot be compiled, in words that its author can act on."""

from __future__ import annotations

import json
import re

from magnitude_engine.decode.grammar.jobs import Compiled
from magnitude_engine.decode.grammar.keywords import KEYWORDS, Treatment
from magnitude_engine.decode.grammar.process import Ended
from magnitude_engine.decode.grammar.spec import ToolCalls
from magnitude_engine.errors import FeatureUnsupported, RequestError

_KEYS = re.compile(r"Unimplemented keys: (\[.*\])(?: \(\d+ times\))?")
_WRONG = "is not a valid JSON Schema"
_CHARACTERS = 300


def refusal(answer: Compiled | Ended, param: str) -> RequestError:
    """Returns the error for a specification that the helper did not compile."""
    if isinstance(answer, Ended):
        return RequestError(
            f"{param} was given up by the grammar compiler: {answer.value}; use fewer alternatives, smaller counts "
            "and simpler patterns",
            param=param,
        )
    # The last form allows most: what it lacks is what stands in the way.
    problem = _plain(answer.errors[-1]) if answer.errors else "unknown reason"
    if "NoExtensionBias" in problem or "Too many items" in problem:
        problem = "it refers to itself without an end ($ref)"
    elif "regex parse error" in problem or "Regex" in problem:
        problem = f"pattern: {problem}"
    elif problem.startswith("lexer error"):
        problem = f"its pattern or its counts are too complex to follow ({problem})"
    if problem.startswith("Unsatisfiable"):
        return RequestError(f"{param} allows no answer: {problem}", param=param)
    kind = RequestError if _WRONG in problem else FeatureUnsupported
    return kind(f"{param} cannot be used: {problem}; change or remove it", param=param)


def _plain(error: str) -> str:
    """Returns what the library says, without its notes to itself."""
    return " ".join(error.replace("<non-verbose/>", "").split())[:_CHARACTERS]


def unenforced(warnings: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the keywords of which the grammar library says that it allows more than they do."""
    words: list[str] = []
    for warning in warnings:
        if warning.startswith("oneOf"):
            words.append("oneOf")
    return tuple(words)


def unknown(warnings: tuple[str, ...]) -> str | None:
    """Returns the first warning that no check afterwards makes good."""
    for warning in warnings:
        keys = _KEYS.fullmatch(warning)
        checked = keys is not None and all(KEYWORDS.get(k) is Treatment.CHECKED for k in json.loads(keys[1]))
        if not checked and not warning.startswith("oneOf"):
            return warning
    return None


def check_tools(spec: ToolCalls, most: int) -> None:
    """Checks names and mode.

    Raises:
        RequestError: no tools, too many, two of one name, or a named tool that is not there.
    """
    names = [tool.name for tool in spec.tools]
    if not names:
        raise RequestError(f"{spec.param} is empty; a tool choice other than 'none' needs a tool", param=spec.param)
    if len(names) > most:
        raise RequestError(f"{spec.param} holds {len(names)} tools; {most} are allowed", param=spec.param)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"{spec.param} names {twice!r} twice; give each tool its own name", param=spec.param)
    if spec.mode == "named" and spec.name not in names:
        raise RequestError(
            f"tool_choice names {spec.name!r}, which is not among the tools; use one of {names[:20]}",
            param="tool_choice",
        )


def parameters_field(spec: ToolCalls, index: int) -> str:
    """Returns the request's field of a tool's schema."""
    return f"{spec.param}[{index}].function.parameters"
