"""Dictionaries that hold what was used last, and no more than so much of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def keep(known: OrderedDict[Key, Value], key: Key, value: Value, limit: int) -> None:
    """Puts `value` in as the one used last; where there are more than `limit`, the one used longest ago goes."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > limit:
        known.popitem(last=False)
