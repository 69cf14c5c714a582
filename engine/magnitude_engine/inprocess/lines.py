"""The lines of sessions in this process: the main one and its branches, and what the engine is told of them."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from magnitude_engine import api
from magnitude_engine.errors import RequestError
from magnitude_engine.inprocess.asked import MAIN
from magnitude_engine.inprocess.local import TENANT

if TYPE_CHECKING:
    from magnitude_engine.engine import Engine

# As many as the engine itself remembers sessions; one that is forgotten goes on as `main`, which costs nothing said.
MAX_SELECTED = 4096


class Lines:
    """Thread-safe; loads no engine, since one that is not loaded knows no session.

    Attributes:
        engine: returns the engine, None where it is not loaded, or closed.
    """

    def __init__(self, engine: Callable[[], Engine | None]) -> None:
        self.engine = engine
        self._names = itertools.count(1)
        self._lock = threading.Lock()
        self._selected: OrderedDict[str, str] = OrderedDict()

    def new(self) -> str:
        """Returns a name that no other line has."""
        return f"b{next(self._names)}"

    def main(self, session: str | None) -> str:
        """Returns the line that a session is on."""
        return MAIN if session is None else self._selected.get(session, MAIN)

    def go_on(self, session: str, line: str) -> None:
        """A session goes on from `line`; the one that it was on ends."""
        with self._lock:
            before = self._selected.pop(session, MAIN)
            self._selected[session] = line
            if len(self._selected) > MAX_SELECTED:
                self._selected.popitem(last=False)
        self.end(session, before)

    def end(self, session: str, line: str | None, pruned: bool = False) -> None:
        """Nothing more comes of a line, or of a whole session where it is None; see `api.EndSession`."""
        if line is None:
            with self._lock:
                self._selected.pop(session, None)
        engine = self.engine()
        if engine is not None:
            engine.end_session(api.EndSession(tenant=TENANT, session=session, branch=line, pruned=pruned))

    def tool_output(self, event: api.ToolEvent) -> None:
        """A tool that a line called has printed more, or has finished."""
        engine = self.engine()
        if engine is not None:
            engine.tool_event(event)


def tool_event(session: str, line: str, call: str, text: str, finished: bool) -> api.ToolEvent:
    """Returns the event that a tool printed `text`.

    Raises:
        RequestError: an argument is no text, or no bool; `param` names it.
    """
    for name, value in (("call_id", call), ("text", text)):
        if not isinstance(value, str):
            raise RequestError(f"{name} must be text, not {type(value).__name__}", param=name)
    if not isinstance(finished, bool):
        raise RequestError(f"finished must be True or False, not {type(finished).__name__}", param="finished")
    if not call:
        raise RequestError("call_id is empty: give the id of the tool call that the text answers", param="call_id")
    return api.ToolEvent(
        tenant=TENANT,
        session=session,
        branch=line,
        kind="finished" if finished else "output",
        call=call,
        text=text,
    )


def check_session(session: str) -> None:
    """Raises RequestError where `session` is no id."""
    if not isinstance(session, str) or not session:
        raise RequestError(f"session_id must be a non-empty text, not {session!r}", param="session_id")
