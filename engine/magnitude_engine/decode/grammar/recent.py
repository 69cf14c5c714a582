"""A bounded memory of what was used last."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by key, least recently used dropped first; thread-safe."""

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._held: OrderedDict[str, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Value | None:
        """Returns the value kept for `key`, or None."""
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: str, value: Value) -> Value:
        """Keeps `value` and returns it."""
        with self._lock:
            self._held[key] = value
            self._held.move_to_end(key)
            if len(self._held) > self._entries:
                self._held.popitem(last=False)
            return value
