"""What of a JSON Schema the grammar enforces, what is checked afterwards, and what is refused.

`check_size` bounds a schema before anything else reads it. `survey` walks it once and returns what was found and
two forms for the grammar compiler, each allowing at least what the schema allows:

    grammar   the schema without what no grammar expresses (formats that are checked, large `multipleOf`)
    relaxed   without regular expressions that only a backtracking engine has, and without `patternProperties`
              that may overlap
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from magnitude_engine.decode.grammar.keywords import (
    COUNTS,
    FORMATS,
    KEYWORDS,
    LISTS,
    MAPS,
    REFUSED_FORMATS,
    SINGLE,
    Treatment,
)
from magnitude_engine.errors import FeatureUnsupported, RequestError

# A grammar has about so many states as the number itself; beyond, it is checked instead.
LARGEST_MULTIPLE = 1_000
# The grammar library's own keyword; only the engine sets it.
OPTIONS = "x-guidance"
# Up to draft 7 a reference stands for the whole schema that holds it.
_REFERENCE_ALONE = re.compile(r"draft-0[3-7]/schema")
_BESIDE_REFERENCE = frozenset({"$ref", "$schema", "$defs", "definitions"})
_BACKTRACKING = re.compile(r"\(\?[=!<]|\\[1-9]|\\[bB]")


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """Bounds on one schema; `alternatives` are those of all its enum, anyOf and oneOf."""

    depth: int = 64
    characters: int = 512 * 1024
    nodes: int = 100_000
    alternatives: int = 10_000
    optional: int = 1_000


@dataclass(frozen=True, slots=True)
class Survey:
    """What one schema holds.

    Attributes:
        checked: keywords that are not enforced by the grammar, with their place, e.g. `not at #/properties/a`.
        ignored: keywords and formats that assert nothing because nobody defines them, with their place.
        loosened: keywords that `relaxed` lacks besides.
        grammar, relaxed: the schema for the grammar compiler (see above).
    """

    checked: tuple[str, ...]
    ignored: tuple[str, ...]
    loosened: tuple[str, ...]
    grammar: dict[str, Any]
    relaxed: dict[str, Any]


def check_size(schema: Any, limits: SchemaLimits, param: str) -> None:
    """Bounds depth, size, alternatives and optional properties; never recurses.

    Raises:
        RequestError: over a limit; names it and the number.
    """
    characters = nodes = alternatives = 0
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        nodes += 1
        characters += len(value) if isinstance(value, str) else 4
        if depth > limits.depth:
            raise RequestError(f"{param} is nested more than {limits.depth} levels deep; flatten it", param=param)
        if isinstance(value, dict):
            characters += sum(map(len, value))
            alternatives += sum(len(value[k]) for k in ("enum", "anyOf", "oneOf") if isinstance(value.get(k), list))
            _check_optional(value, limits, param)
            stack.extend((item, depth + 1) for item in value.values())
        elif isinstance(value, list | tuple):
            stack.extend((item, depth + 1) for item in value)
        if characters > limits.characters or nodes > limits.nodes or len(stack) > limits.nodes:
            raise RequestError(
                f"{param} is larger than {limits.characters} characters or {limits.nodes} values; make it smaller",
                param=param,
            )
        if alternatives > limits.alternatives:
            raise RequestError(
                f"{param} holds more than {limits.alternatives} alternatives in enum, anyOf and oneOf; use fewer",
                param=param,
            )


def _check_optional(value: dict[str, Any], limits: SchemaLimits, param: str) -> None:
    properties, required = value.get("properties"), value.get("required")
    if not isinstance(properties, dict):
        return
    optional = len(properties) - (len(required) if isinstance(required, list) else 0)
    if optional > limits.optional:
        raise RequestError(
            f"{param} has an object with {optional} optional properties; {limits.optional} are allowed: "
            "mark more of them as required or split the object",
            param=param,
        )


def survey(schema: Any, param: str) -> Survey:
    """Walks a schema that passed `check_size`.

    Raises:
        RequestError: not a schema.
        FeatureUnsupported: a keyword that is neither enforced nor checked; the message names it.
    """
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{param} must be a JSON Schema: an object or a boolean", param=param)
    dialect = schema.get("$schema") if isinstance(schema, dict) else None
    walk = _Walk(param, isinstance(dialect, str) and _REFERENCE_ALONE.search(dialect) is not None)
    grammar = walk.copy(schema, "#", relaxed=False)
    relaxed = walk.copy(schema, "#", relaxed=True)
    return Survey(
        checked=tuple(dict.fromkeys(walk.checked)),
        ignored=tuple(dict.fromkeys(walk.ignored)),
        loosened=tuple(dict.fromkeys(walk.loosened)),
        grammar=grammar if isinstance(grammar, dict) else {"allOf": [grammar]},
        relaxed=relaxed if isinstance(relaxed, dict) else {"allOf": [relaxed]},
    )


@dataclass(slots=True)
class _Walk:
    """One walk over a schema: copies it for the grammar and notes what it meets."""

    param: str
    reference_alone: bool
    checked: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    loosened: list[str] = field(default_factory=list)

    def copy(self, schema: Any, at: str, relaxed: bool) -> Any:
        """Returns the form of `schema` for the grammar; `at` is its JSON pointer."""
        if not isinstance(schema, dict):
            return schema
        if self.reference_alone and isinstance(schema.get("$ref"), str):
            schema = {word: value for word, value in schema.items() if word in _BESIDE_REFERENCE}
        copied: dict[str, Any] = {}
        for word, value in schema.items():
            if word in MAPS and isinstance(value, dict):
                value = {k: self.copy(v, f"{at}/{word}/{_escaped(k)}", relaxed) for k, v in value.items()}
            elif word in LISTS and isinstance(value, list):
                value = [self.copy(v, f"{at}/{word}/{i}", relaxed) for i, v in enumerate(value)]
            elif word in SINGLE:
                value = self.copy(value, f"{at}/{word}", relaxed)
            if self._kept(word, value, at, relaxed):
                copied[word] = int(value) if word in COUNTS and _is_whole(value) else value
        if relaxed and "patternProperties" in copied:
            # What the patterns allowed must stay allowed, so the rest of the properties is left open too.
            self.loosened.append(f"patternProperties at {at}")
            for word in ("patternProperties", "additionalProperties"):
                copied.pop(word, None)
        return copied

    def _kept(self, word: str, value: Any, at: str, relaxed: bool) -> bool:
        """Notes a keyword; False where the grammar compiler must not see it."""
        treatment = KEYWORDS.get(word)
        if treatment is None:
            self.ignored.append(f"{word} at {at}")
            return word != OPTIONS
        if treatment is Treatment.ANNOTATION:
            return word == "$schema"
        if word == "uniqueItems" and value is False:
            return False
        if word == "format":
            return self._format(value, at)
        if treatment is Treatment.CHECKED:
            self.checked.append(f"{word} at {at}")
        elif word == "multipleOf" and isinstance(value, int | float) and abs(value) > LARGEST_MULTIPLE:
            self.checked.append(f"{word} at {at}")
            return False
        elif relaxed and word == "pattern" and isinstance(value, str) and _BACKTRACKING.search(value):
            self.loosened.append(f"{word} at {at}")
            return False
        return True

    def _format(self, value: Any, at: str) -> bool:
        """Notes a format; True where the grammar enforces it, or where it is none at all, which is refused later."""
        if not isinstance(value, str):
            return True
        if value in REFUSED_FORMATS:
            raise FeatureUnsupported(
                f"{self.param}: format {value!r} at {at} is not supported; describe it with a pattern", param=self.param
            )
        treatment = FORMATS.get(value)
        if treatment is Treatment.CHECKED:
            self.checked.append(f"format {value} at {at}")
        elif treatment is None:
            self.ignored.append(f"format {value} at {at}")
        return treatment is Treatment.ENFORCED


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and value.is_integer()
