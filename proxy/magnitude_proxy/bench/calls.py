"""Whether the tool calls in an answer could be carried out: well-formed, of a known tool, as its schema says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jsonschema
import msgspec
from jsonschema.exceptions import UnknownType
from referencing import Registry
from referencing.exceptions import Unresolvable

from magnitude_proxy.bench.asking import Said
from magnitude_proxy.bench.recorded import CALL_BEGIN, CALL_END, Tool

_WRITTEN = re.compile(re.escape(CALL_BEGIN) + r"(.*?)(" + re.escape(CALL_END) + r"|\Z)", re.DOTALL)


class CallCount(NamedTuple):
    """Tool calls of an answer; those that its length limit cut off count in `cut` alone."""

    valid: int = 0
    invalid: int = 0
    cut: int = 0

    def __add__(self, other: object) -> CallCount:
        """Returns the sums."""
        if not isinstance(other, CallCount):
            return NotImplemented
        return CallCount(self.valid + other.valid, self.invalid + other.invalid, self.cut + other.cut)


class _Written(msgspec.Struct):
    name: str
    arguments: dict[str, Any] = {}


def count(text: str, said: Sequence[Said], offered: Sequence[Tool], cut_off: bool) -> CallCount:
    """Counts the calls in an answer.

    Args:
        text: its text; calls may be written into it in the Hermes form.
        said: those that came as tool calls.
        offered: the tools that may be called.
        cut_off: the answer was ended by its length limit, so its last call may be incomplete.
    """
    total = CallCount()
    for call, ended in _written(text):
        total += CallCount(cut=1) if not ended and cut_off else _judged(call, offered)
    for number, each in enumerate(said, 1):
        call = _called(each)
        total += CallCount(cut=1) if call is None and cut_off and number == len(said) else _judged(call, offered)
    return total


def _written(text: str) -> Iterator[tuple[_Written | None, bool]]:
    """Yields each call written into text, None where it is not JSON, and whether it has an end."""
    for found in _WRITTEN.finditer(text):
        try:
            call = msgspec.json.decode(found[1], type=_Written)
        except msgspec.DecodeError:
            yield None, bool(found[2])
        else:
            yield call, True


def _called(said: Said) -> _Written | None:
    try:
        return _Written(said.name, msgspec.json.decode(said.arguments or "{}", type=dict[str, Any]))
    except msgspec.DecodeError:
        return None


def _judged(call: _Written | None, offered: Sequence[Tool]) -> CallCount:
    tool = next((t.function for t in offered if call is not None and t.function.name == call.name), None)
    if call is None or tool is None:
        return CallCount(invalid=1)
    try:
        # With a registry of its own nothing is fetched for a reference.
        valid = jsonschema.Draft202012Validator(tool.parameters, registry=Registry()).is_valid(call.arguments)
    except (jsonschema.SchemaError, UnknownType, Unresolvable, re.error):
        # A schema that Python cannot check refuses nothing.
        valid = True
    return CallCount(valid=1) if valid else CallCount(invalid=1)
