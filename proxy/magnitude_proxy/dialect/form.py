"""What an answer is made of on its way to a client, and what writing it in some form takes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from magnitude_engine import api
from magnitude_proxy.errors import ProxyError
from magnitude_proxy.routing.route import Taken
from magnitude_proxy.wire.render import Body, Head, is_content

Item = Taken | api.AnswerEvent
Events = AsyncGenerator[Item, None]
# Made once: `A | B` inside of isinstance is made anew for every event.
OUTPUT = (api.Delta, api.Finished)
OUTCOME = (api.Completed, api.Failed)


@dataclass(slots=True)
class Tally:
    """What the events so far say about the whole answer.

    Attributes:
        label: empty before any route was taken.
        read, written: prompt tokens, and tokens (or pieces, where a route tells no tokens) of output.
        miss: why not more of the prompt was cached, where there could have been more.
    """

    label: str = ""
    reason: str | None = None
    usage: api.Usage = field(default_factory=api.Usage)
    finish: str = ""
    tool_call: bool = False
    content: bool = False
    read: int = 0
    written: int = 0
    miss: api.CacheMiss | None = None

    def see(self, item: Item) -> None:
        """Takes the next event."""
        if isinstance(item, api.Delta):
            self.content = self.content or is_content(item)
            self.tool_call = self.tool_call or bool(item.tool_calls)
            self.written += len(item.ids) or is_content(item)
        elif isinstance(item, api.Started):
            self.read = item.prompt_tokens
            # A worker that was restarted meanwhile knows nothing of the session.
            self.miss = self.miss or item.miss
        elif isinstance(item, Taken):
            self.label, self.reason = item
            self.miss = None
        elif isinstance(item, api.Finished):
            self.content = True
            self.finish = item.reason
        elif isinstance(item, api.Completed):
            self.usage = item.usage
            self.miss = self.miss or item.usage.miss


class Script(Protocol):
    """Turns events into the bytes of a stream; model, id and the route in the headers are fixed when it is made."""

    def frames(self, batch: list[Item]) -> bytes:
        """Returns the frames of all output in `batch`, which may be empty; the first call opens the stream."""

    def ending(self, last: api.Completed | api.Failed) -> bytes:
        """Returns the frames that end the stream."""

    def broken(self, error: ProxyError) -> bytes:
        """Returns the frames that end the stream with an error of the proxy itself."""


class Dialect(Protocol):
    """How the events of an answer are written for one kind of client.

    Attributes:
        keepalive: what a stream carries while there is nothing to say.
        dropped: fields of the request that no route gets, for a response header.
    """

    keepalive: bytes
    dropped: tuple[str, ...]

    def body(self) -> Body:
        """Returns what gathers the events into one JSON body."""

    def script(self, head: Head, tally: Tally) -> Script:
        """Returns what writes the events as a stream; `tally` goes on counting meanwhile."""
