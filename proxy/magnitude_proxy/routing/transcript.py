"""What the client has of one answer, over all attempts that worked on it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from magnitude_engine import api


@dataclass(slots=True)
class _Choice:
    ids: list[int] = field(default_factory=list)
    chars: int = 0
    finished: bool = False


class Transcript:
    """Decides which events of an attempt go on to the client, and keeps what another attempt needs to continue.

    Until the first content nothing that belongs to one attempt alone is passed on: deltas that release no
    output (token ids of a half character) are held back and dropped with their attempt. `Started` and
    `Progress` pass at once, so a client may see them again after a change of route.

    Attributes:
        committed: content or a finish was passed on; no other route may start over.
        tool_call: a piece of a tool call was passed on; nothing may be replayed.
    """

    def __init__(self, request: api.Generate) -> None:
        self._request = request
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)
        self._held: list[api.AnswerEvent] = []
        self._started: api.Started | None = None
        self.committed = False
        self.tool_call = False

    def begin(self) -> None:
        """A new attempt starts; what was held of the last one is dropped."""
        self._held.clear()

    def take(self, event: api.AnswerEvent) -> list[api.AnswerEvent]:
        """Returns what the client gets for `event`, in order.

        Output of a choice that is already finished is dropped: a resumed worker repeats the finish.
        """
        if isinstance(event, api.Started):
            self._started = event
            return [event]
        if isinstance(event, api.Progress):
            return [event]
        if isinstance(event, api.Completed):
            return [*self._release(), event]
        if isinstance(event, api.Failed) or self._choices[event.choice].finished:
            return []
        if not self.committed and isinstance(event, api.Delta) and not is_content(event):
            self._held.append(event)
            return []
        self.committed = True
        events = [*self._release(), event]
        for passed in events:
            self._note(passed)
        return events

    def complete(self) -> bool:
        """True when every choice that was asked for has been finished; only the end mark is missing."""
        return sum(choice.finished for choice in self._choices.values()) >= self._request.n

    def resumable(self) -> bool:
        """True when a restarted worker can continue without repeating or losing anything.

        Not after a tool call, not with log-probabilities (those of accepted but unreleased tokens cannot be
        sent exactly once), not with echo (prompt characters have no ids), and only when ids came with the text.
        """
        if self.tool_call or self._request.logprobs is not None or self._request.echo:
            return False
        return all(choice.ids or not choice.chars for choice in self._choices.values())

    def resume(self) -> tuple[api.Resume, ...]:
        """Returns what the client has of each choice; finished ones too, so that the worker ends them at once."""
        if not self.committed:
            return ()
        return tuple(
            api.Resume(choice=index, ids=tuple(choice.ids), chars=choice.chars)
            for index, choice in sorted(self._choices.items())
        )

    def counted(self) -> api.Completed:
        """Returns the end mark of a complete answer whose own was lost, with the tokens counted here."""
        usage = api.Usage(
            prompt_tokens=self._started.prompt_tokens if self._started else 0,
            cached_tokens=self._started.cached_tokens if self._started else 0,
            completion_tokens=sum(len(choice.ids) for choice in self._choices.values()),
        )
        return api.Completed(request=self._request.request, epoch=self._request.epoch, usage=usage)

    def _release(self) -> list[api.AnswerEvent]:
        held, self._held = self._held, []
        return held

    def _note(self, event: api.AnswerEvent) -> None:
        if isinstance(event, api.Finished):
            self._choices[event.choice].finished = True
        elif isinstance(event, api.Delta):
            choice = self._choices[event.choice]
            choice.ids.extend(event.ids)
            choice.chars += len(event.text)
            self.tool_call = self.tool_call or bool(event.tool_calls)


def is_content(delta: api.Delta) -> bool:
    """True when `delta` holds something a client can see."""
    return bool(delta.text or delta.logprobs or delta.tool_calls or delta.refusal or delta.extra)
