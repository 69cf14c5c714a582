"""The tools of a Responses request as those of a chat.

Functions of a `namespace` become functions named `NAMESPACE__NAME`, since a chat knows no namespaces; calls of them get
both names back. A web search is left out and named in a header: no model behind this server can search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from magnitude_proxy.dialect.responses_wire import FlatTool
from magnitude_proxy.dialect.translate import refuse
from magnitude_proxy.errors import BadRequest

_WEB_SEARCH = "web_search"
_JOIN = "__"


class Called(NamedTuple):
    """How a client knows a function: its own name, and its namespace, if it has one."""

    name: str
    namespace: str | None = None

    @property
    def joined(self) -> str:
        """Its name in a chat."""
        return self.name if self.namespace is None else f"{self.namespace}{_JOIN}{self.name}"


class Tools:
    """The tools of one request.

    Attributes:
        chat: their definitions in a chat.
        places: where each of these stands in the request.
        dropped: the place of the first tool that was left out.
    """

    def __init__(self, given: Sequence[FlatTool]) -> None:
        """Raises BadRequest with the place of a tool that cannot be served."""
        self.chat: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.dropped: list[str] = []
        self._called: dict[str, Called] = {}
        for index, tool in enumerate(given):
            self._take(tool, f"tools[{index}]")

    def called(self, name: str) -> Called:
        """Returns how the client knows the function that a chat calls `name`."""
        return self._called.get(name, Called(name))

    def choice(self, given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Returns a chat's choice of tools; raises BadRequest."""
        if not isinstance(given, dict):
            return given
        if given.get("type") != "function":
            refuse("tool_choice.type", "must be function; use auto, none, required or one function's name")
        name = given.get("name")
        joined = [chat for chat, called in self._called.items() if called.name == name]
        return {"type": "function", "function": {"name": joined[0] if len(joined) == 1 else name}}

    def _take(self, tool: FlatTool, place: str) -> None:
        if tool.type.startswith(_WEB_SEARCH):
            self.dropped = self.dropped or [place]
        elif tool.type != "namespace":
            self._function(tool, place, None)
        elif not tool.name:
            raise BadRequest(f"{place}.name is missing", param=f"{place}.name")
        else:
            for index, inner in enumerate(tool.tools or ()):
                self._function(inner, f"{place}.tools[{index}]", tool.name)

    def _function(self, tool: FlatTool, place: str, namespace: str | None) -> None:
        if tool.type != "function":
            refuse(f"{place}.type", f"{tool.type[:64]!r} is not served here; only function tools are")
        if not tool.name:
            raise BadRequest(f"{place}.name is missing", param=f"{place}.name")
        called = Called(tool.name, namespace)
        function = {name: getattr(tool, name) for name in ("description", "parameters", "strict")}
        given = {name: value for name, value in function.items() if value is not None}
        self.chat.append({"type": "function", "function": {"name": called.joined, **given}})
        self.places.append(place)
        self._called[called.joined] = called
