"""What the worker has sent of one request and its client has not taken yet, in bounded space."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from magnitude_engine import api

MAX_EVENTS = 64


class Inbox:
    """A queue of one request's events: `put` never waits, so that a slow client holds no other request up.

    When more than `limit` events wait they are merged (see `merge`), which keeps a few events per choice; their text
    is bounded by the request's own output limit. Nothing is lost and nothing is put out of order within a choice.
    """

    def __init__(self, limit: int = MAX_EVENTS) -> None:
        self._limit = limit
        self._events: list[api.AnswerEvent] = []
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._events)

    def put(self, event: api.AnswerEvent) -> None:
        """Adds an event."""
        self._events.append(event)
        if len(self._events) > self._limit:
            self._events = merge(self._events)
            # With very many choices the merged events alone may be near the limit: do not merge at every put.
            self._limit = max(self._limit, 2 * len(self._events))
        self._filled.set()

    async def take(self) -> list[api.AnswerEvent]:
        """Waits for events and returns all there are, oldest first."""
        await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        return events


def merge(events: Sequence[api.AnswerEvent]) -> list[api.AnswerEvent]:
    """Returns the same answer in fewer events: one Delta per choice, in place of its first, and the last Progress.

    Deltas with fields of an unknown upstream (`extra`) or a refusal stay as they are and end a run of merged ones.
    """
    merged: list[api.AnswerEvent] = []
    open_delta: dict[int, int] = {}
    last_progress: int | None = None
    for event in events:
        if isinstance(event, api.Delta):
            place = open_delta.get(event.choice)
            earlier = None if place is None else merged[place]
            if not _plain(event):
                open_delta.pop(event.choice, None)
            elif place is not None and isinstance(earlier, api.Delta):
                merged[place] = _joined(earlier, event)
                continue
            else:
                open_delta[event.choice] = len(merged)
        elif isinstance(event, api.Progress):
            if last_progress is not None:
                merged[last_progress] = event
                continue
            last_progress = len(merged)
        merged.append(event)
    return merged


def _plain(delta: api.Delta) -> bool:
    return not delta.extra and delta.refusal is None


def _joined(first: api.Delta, second: api.Delta) -> api.Delta:
    return msgspec.structs.replace(
        first,
        text=first.text + second.text,
        ids=first.ids + second.ids,
        logprobs=first.logprobs + second.logprobs,
        tool_calls=first.tool_calls + second.tool_calls,
    )
