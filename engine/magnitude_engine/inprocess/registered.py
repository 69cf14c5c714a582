"""Prompt prefixes registered ahead: which ones, and when they are computed."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from magnitude_engine import api
from magnitude_engine.errors import EngineError

if TYPE_CHECKING:
    from magnitude_engine.engine import Engine

CHECK_S = 0.1


class Registrations:
    """What was registered, each prefix once; thread-safe.

    Args:
        stopped: set when no engine works on them any more.
    """

    def __init__(self, stopped: threading.Event) -> None:
        self._stopped = stopped
        self._lock = threading.Lock()
        self._given: dict[bytes, api.Register] = {}
        self._done: dict[bytes, threading.Event] = {}

    def add(self, register: api.Register) -> None:
        """Notes a prefix; `submit` hands it to an engine."""
        with self._lock:
            self._given[msgspec.msgpack.encode(register)] = register

    def submit(self, engine: Engine) -> None:
        """Has the engine compute what it was not asked for yet; does not wait."""
        with self._lock:
            for name, register in self._given.items():
                if name not in self._done:
                    self._done[name] = threading.Event()
                    engine.register(register, self._done[name].set)

    def wait(self) -> None:
        """Returns when everything submitted is computed; on a terminal it shows how far that is.

        Raises:
            EngineError: the engine was closed, or gave up.
        """
        with self._lock:
            events = list(self._done.values())
        waited = False
        for event in events:
            while not event.wait(CHECK_S):
                waited = True
                _show(sum(each.is_set() for each in events), len(events))
                if self._stopped.is_set():
                    raise EngineError("the engine stopped before the registered tools were computed; make another one")
        if waited:
            _show(len(events), len(events), "\n")


def _show(done: int, total: int, end: str = "") -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\rcomputing registered prompts {done}/{total} {end}")
        sys.stderr.flush()
