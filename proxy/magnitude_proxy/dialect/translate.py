"""What both dialects share on the way in: reading a request as a chat, and the names of its fields.

A request of either dialect becomes a body of Chat Completions, which is what the worker's side is read from and what
an upstream gets. Errors then name fields of that body; `Names` turns them back into those that the client knows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec

from magnitude_engine import api
from magnitude_proxy.errors import BadRequest
from magnitude_proxy.wire.intake import Asked, chat_asked

_FIELD = re.compile(r"[A-Za-z_]+(?:\[\d+\])?(?:\.[A-Za-z_]+(?:\[\d+\])?)+|[a-z]+(?:_[a-z]+)+(?:\[\d+\])?")

_TOOL = re.compile(r"^tools\[(\d+)\]")


class Names:
    """Chat Completions' names of fields and the dialect's own: (pattern of the whole beginning, replacement)."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self._pairs = [(re.compile(f"{pattern}(?![A-Za-z_])"), own) for pattern, own in pairs]
        self._places: tuple[str, ...] = ()

    def of_tools(self, places: Sequence[str]) -> Names:
        """Returns the names for a request whose tools stand at `places`, in the chat's order."""
        made = Names()
        made._pairs, made._places = self._pairs, tuple(places)
        return made

    def own(self, param: str) -> str:
        """Returns the dialect's name of a field."""
        for pattern, own in self._pairs:
            found = pattern.match(param)
            if found:
                param = found.expand(own) + param[found.end() :]
                break
        return _TOOL.sub(self._place, param)

    def _place(self, tool: re.Match[str]) -> str:
        index = int(tool[1])
        return self._places[index] if index < len(self._places) else tool[0]

    def words(self, message: str) -> str:
        """Returns a message in which fields have the dialect's names; plain words stay, but for one that begins it."""
        message = _FIELD.sub(lambda found: self.own(found[0]), message)
        first, space, rest = message.partition(" ")
        return self.own(first) + space + rest

    def failed(self, event: api.Failed) -> api.Failed:
        """Returns a failure in the dialect's names."""
        param = None if event.param is None else self.own(event.param)
        return msgspec.structs.replace(event, message=self.words(event.message), param=param)


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A request read as a chat.

    Attributes:
        body: Chat Completions' body.
        dropped: what of the request no route gets.
        refusal: what only an upstream may serve, as (field, why); it goes before the chat's own.
    """

    body: dict[str, Any]
    dropped: tuple[str, ...] = ()
    refusal: tuple[str, str] | None = None


def read_as_chat(chat: Chat, names: Names, seed: int) -> Asked:
    """Returns the checked request; raises BadRequest in the dialect's names."""
    try:
        asked = chat_asked(chat.body, seed)
    except BadRequest as error:
        param = None if error.param is None else names.own(error.param)
        raise BadRequest(names.words(error.message), param=param, code=error.code) from error
    refusal = None if asked.refusal is None else names.failed(asked.refusal)
    if chat.refusal is not None:
        field, why = chat.refusal
        message = f"{field}: {why}; leave it out, or configure an upstream that serves it"
        refusal = api.Failed(request="", epoch=0, code="unsupported_feature", message=message, param=field)
    return dataclasses.replace(asked, refusal=refusal)


def refuse(field: str, why: str) -> NoReturn:
    """Raises the BadRequest for a field that no route of this dialect serves."""
    raise BadRequest(f"{field} {why}", param=field, code="unsupported_feature")
