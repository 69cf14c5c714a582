"""Holds back what no grammar could guarantee until it is checked: tool arguments, or a whole formatted answer.

A check may take as long as its limits allow, so it runs on another thread; what follows in the answer waits
behind it, and the engine's steps go on. What fails its check ends the request with an error. An answer cut off by
`max_tokens` or a stop string is no JSON, and passes unchecked: its finish reason says so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_engine.answer import Sink, failed
from magnitude_engine.decode.grammar.validate import PostCheck, Rule
from magnitude_engine.errors import EngineError, MagnitudeError
from magnitude_engine.telemetry import worker_log


class _Item(NamedTuple):
    """An event, and what must hold before it is sent."""

    event: api.AnswerEvent
    checks: tuple[tuple[Rule, str], ...] = ()


@dataclass(slots=True)
class _Held:
    """The text of one choice that waits for its end."""

    text: list[str] = field(default_factory=list)
    logprobs: list[api.TokenLogprob] = field(default_factory=list)


class CheckedSink:
    """A request's sink that passes events on in order; called by one thread at a time.

    Args:
        judge: raises AnswerInvalid where a text breaks its rule; may block.
        pool: where `judge` is called, and then `sink`.
        failed: called when a check has failed, to stop the request.
    """

    def __init__(
        self,
        generate: api.Generate,
        check: PostCheck,
        judge: Callable[[Rule, str], None],
        pool: Executor,
        sink: Sink,
        failed: Callable[[], None],
    ) -> None:
        self._generate = generate
        self._check = check
        self._judge = judge
        self._pool = pool
        self._sink = sink
        self._failed = failed
        self._lock = threading.Lock()
        self._queue: deque[_Item] = deque()
        self._busy = False
        self._ended = False
        self._held: dict[int, _Held] = {}

    def __call__(self, event: api.AnswerEvent) -> None:
        """Takes the next event of the answer."""
        for item in self._items(event):
            self._put(item)

    def stop(self) -> None:
        """Nothing more is sent."""
        with self._lock:
            self._ended = True
            self._queue.clear()

    def _items(self, event: api.AnswerEvent) -> tuple[_Item, ...]:
        """Returns what is to be sent for an event, with its checks."""
        whole = self._check.rule()
        if isinstance(event, api.Delta) and whole is None:
            named = [(self._check.rule(call.name), call.arguments) for call in event.tool_calls if call.name]
            return (_Item(event, tuple((rule, text) for rule, text in named if rule is not None)),)
        if isinstance(event, api.Delta):
            held = self._held.setdefault(event.choice, _Held())
            held.text.append(event.text)
            held.logprobs += event.logprobs
            # Ids alone show nothing, and say that the answer goes on.
            return (_Item(msgspec.structs.replace(event, text="", logprobs=())),) if event.ids else ()
        if isinstance(event, api.Finished) and event.choice in self._held:
            held = self._held.pop(event.choice)
            text = "".join(held.text)
            delta = api.Delta(
                request=event.request,
                epoch=event.epoch,
                choice=event.choice,
                text=text,
                logprobs=tuple(held.logprobs),
            )
            complete = whole is not None and event.reason == "stop" and event.matched_stop is None
            return _Item(delta, ((whole, text),) if whole is not None and complete else ()), _Item(event)
        return (_Item(event),)

    def _put(self, item: _Item) -> None:
        with self._lock:
            if self._ended:
                return
            waits = self._busy or bool(item.checks)
            if waits:
                self._queue.append(item)
            start = waits and not self._busy
            self._busy = self._busy or start
        if start:
            self._pool.submit(self._drain)
        elif not waits:
            self._sink(item.event)

    def _drain(self) -> None:
        """Checks and sends what waits, until nothing does."""
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return
                item = self._queue.popleft()
            error = self._problem(item)
            if error is not None:
                self.stop()
            self._deliver(item.event if error is None else failed(self._generate, error))
            if error is not None:
                self._failed()

    def _problem(self, item: _Item) -> MagnitudeError | None:
        try:
            for rule, text in item.checks:
                self._judge(rule, text)
        except MagnitudeError as error:
            return error
        except Exception:  # noqa: BLE001 - an edge: whatever a check provokes, the request gets its one outcome
            worker_log.exception("the answer of request %s could not be checked", self._generate.request)
            return EngineError("the answer could not be checked; the worker's log says why")
        return None

    def _deliver(self, event: api.AnswerEvent) -> None:
        try:
            self._sink(event)
        except Exception:  # noqa: BLE001 - the sink is the caller's code; its faults end this request only
            worker_log.exception("the receiver of request %s raised an error", self._generate.request)
            self.stop()
            self._failed()
