"""Routes that play a script, for tests of what stands above them, and steps to send through them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from magnitude_engine import api
from magnitude_proxy.routing.route import Kind, Step


@dataclass(frozen=True)
class Pause:
    """The route is silent for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Down:
    """From here on the route is not available, for `seconds`."""

    seconds: float


Action = api.AnswerEvent | Pause | Down | Exception
FOREVER = Pause(1e6)


def make_step(kind: Kind = "chat", *, stream: bool = True, body: dict[str, Any] | None = None, **request: Any) -> Step:
    """Returns a step of request `r`, epoch 1, whose neutral request has the fields `request`."""
    generate = api.Generate(request="r", epoch=1, tenant="t", session="s", input=api.TextInput(text="hello"), **request)
    default: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
    return Step(kind=kind, request=generate, body=body if body is not None else default, stream=stream)


def started() -> api.Started:
    return api.Started(request="r", epoch=1, prompt_tokens=7, cached_tokens=3)


def progress(done: int, total: int = 100) -> api.Progress:
    return api.Progress(request="r", epoch=1, done=done, total=total)


def delta(text: str = "", *ids: int, choice: int = 0, **fields: Any) -> api.Delta:
    return api.Delta(request="r", epoch=1, choice=choice, text=text, ids=ids, **fields)


def finished(choice: int = 0, reason: str = "stop") -> api.Finished:
    return api.Finished(request="r", epoch=1, choice=choice, reason=reason)


def completed(**usage: int) -> api.Completed:
    return api.Completed(request="r", epoch=1, usage=api.Usage(**usage))


def failed(code: str, *, retryable: bool = True, **fields: Any) -> api.Failed:
    return api.Failed(request="r", epoch=1, code=code, message=f"{code} happened", retryable=retryable, **fields)


def answer(text: str = "hi") -> list[Action]:
    """Returns the events of a complete answer."""
    return [started(), delta(text, 1), finished(), completed()]


@dataclass
class ScriptedRoute:
    """Plays one script per attempt, the last one again when they run out.

    Attributes:
        log: names of `open` and `close` of attempts over all routes that share the list, in order.
        seen: the request of each attempt.
    """

    name: str
    scripts: Sequence[Sequence[Action]]
    ready: bool = True
    expected: bool = True
    log: list[str] = field(default_factory=list)
    seen: list[Step] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    _down_until: float = float("-inf")

    def coming(self) -> bool:
        return self.expected

    def available(self) -> bool:
        return self.ready and asyncio.get_running_loop().time() >= self._down_until

    async def answer(self, step: Step, attempt: int) -> AsyncGenerator[api.AnswerEvent, None]:
        script = self.scripts[min(len(self.seen), len(self.scripts) - 1)]
        self.seen.append(step)
        self.attempts.append(attempt)
        self.log.append(f"open {self.name}")
        try:
            for action in script:
                if isinstance(action, Pause):
                    await asyncio.sleep(action.seconds)
                elif isinstance(action, Down):
                    self._down_until = asyncio.get_running_loop().time() + action.seconds
                elif isinstance(action, Exception):
                    raise action
                else:
                    yield msgspec.structs.replace(action, request=step.request.request, epoch=step.request.epoch)
        finally:
            self.log.append(f"close {self.name}")
