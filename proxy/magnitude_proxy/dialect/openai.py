"""Answers in the form of Chat Completions and Completions."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from magnitude_engine import api
from magnitude_proxy import sse
from magnitude_proxy.dialect.form import Item, Script, Tally
from magnitude_proxy.errors import ProxyError, from_failed
from magnitude_proxy.routing.route import Kind
from magnitude_proxy.wire.render import Body, ChatBody, ChatChunks, Chunks, Head, TextBody, TextChunks
from magnitude_proxy.wire.replies import RouteNote


class OpenAI:
    """Chat Completions and Completions."""

    keepalive = sse.KEEPALIVE
    dropped: tuple[str, ...] = ()

    def __init__(self, kind: Kind) -> None:
        self._kind = kind

    def body(self) -> Body:
        """See `Dialect.body`."""
        return ChatBody() if self._kind == "chat" else TextBody()

    def script(self, head: Head, tally: Tally) -> Script:
        """See `Dialect.script`."""
        return OpenAIScript(head, self._kind, tally)


class OpenAIScript:
    """Chunks, one `data:` line each, and `[DONE]`."""

    def __init__(self, head: Head, kind: Kind, tally: Tally) -> None:
        self._chunks: Chunks = ChatChunks(head) if kind == "chat" else TextChunks(head)
        self._tally = tally
        self._told = tally.label

    def frames(self, batch: list[Item]) -> bytes:
        """See `Script.frames`."""
        return b"".join(map(sse.format_event, self._payloads(batch)))

    def ending(self, last: api.Completed | api.Failed) -> bytes:
        """See `Script.ending`."""
        if isinstance(last, api.Failed):
            return self.broken(from_failed(last))
        usage = self._chunks.usage(last.usage, self._note())
        return (b"" if usage is None else sse.format_event(usage)) + sse.DONE

    def broken(self, error: ProxyError) -> bytes:
        """See `Script.broken`."""
        return sse.format_event(msgspec.json.encode(error.body()))

    def _payloads(self, batch: list[Item]) -> Iterator[bytes]:
        for item in batch:
            if isinstance(item, api.Delta):
                yield from self._chunks.delta(item)
            elif isinstance(item, api.Finished):
                yield from self._chunks.finished(item, self._note())

    def _note(self) -> RouteNote | None:
        """Returns the present route when the headers named another."""
        if self._tally.label == self._told:
            return None
        return RouteNote(route=self._tally.label, fallback_reason=self._tally.reason)
