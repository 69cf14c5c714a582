"""Holds back what no grammar could guarantee until it is checked: tool arguments, or a whole formatted answer.

A check may take as long as its limits allow, so it runs on another thread; what follows in the answer waits
behind it, and the engine's steps go on. An answer cut off by `max_tokens` or a stop string is no JSON, and passes
unchecked: its finish reason says so.

What fails its check is written once more, before anything of it was shown: a second request goes on behind the last
thing that the client has of this choice, so that text and calls before it stay. It is drawn with a seed derived from
the first and no colder than `RETRY_TEMPERATURE`, since a greedy draw would only repeat itself. What fails again ends
the request with an error. `completion_tokens` counts the answer that is sent, not what was thrown away.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from magnitude_engine import api
from magnitude_engine.answer import Sink, failed
from magnitude_engine.decode.grammar.validate import PostCheck, Rule
from magnitude_engine.errors import AnswerInvalid, EngineError, MagnitudeError
from magnitude_engine.telemetry import worker_log

RETRY_TEMPERATURE = 0.7
RETRY_TOP_P = 0.9


class _Item(NamedTuple):
    """An event on its way to the client.

    Attributes:
        checks: what must hold before it is sent.
        before: what the client has of its choice when it comes; None without checks.
        again: whether it is of a second try.
    """

    event: api.AnswerEvent
    checks: tuple[tuple[Rule, str], ...] = ()
    before: api.Resume | None = None
    again: bool = False


@dataclass(slots=True)
class _Held:
    """One choice: what the client was given (`shown`, `chars`), and what waits for something that it can see."""

    shown: list[int] = field(default_factory=list)
    chars: int = 0
    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[api.TokenLogprob] = field(default_factory=list)

    def release(self, event: api.Delta | api.Finished, checks: tuple[tuple[Rule, str], ...] = ()) -> _Item:
        """Returns what waits as one delta, with the calls of `event`."""
        before = api.Resume(choice=event.choice, ids=tuple(self.shown), chars=self.chars) if checks else None
        delta = api.Delta(
            request=event.request,
            epoch=event.epoch,
            choice=event.choice,
            text="".join(self.text),
            ids=tuple(self.ids),
            logprobs=tuple(self.logprobs),
            tool_calls=event.tool_calls if isinstance(event, api.Delta) else (),
        )
        self.shown += self.ids
        self.chars += len(delta.text)
        self.ids, self.text, self.logprobs = [], [], []
        return _Item(delta, checks, before)


class _Reader:
    """Turns the events of one request into items; tokens and log-probabilities go with what they show."""

    def __init__(self, generate: api.Generate, check: PostCheck) -> None:
        self._echo = generate.echo
        self._check = check
        self._held = {known.choice: _Held(shown=list(known.ids), chars=known.chars) for known in generate.resume}

    def items(self, event: api.AnswerEvent) -> tuple[_Item, ...]:
        """Returns what is to be sent for an event."""
        if not isinstance(event, api.Delta | api.Finished):
            return (_Item(event),)
        held = self._held.setdefault(event.choice, _Held())
        if isinstance(event, api.Finished):
            rest = (held.release(event, self._complete(held, event)),) if held.ids or held.text else ()
            return (*rest, _Item(event))
        held.ids += event.ids
        held.text.append(event.text)
        held.logprobs += event.logprobs
        echoed = self._echo and not event.ids
        if echoed or (self._check.rule() is None and (event.text or event.tool_calls)):
            named = [(self._check.rule(call.name), call.arguments) for call in event.tool_calls if call.name]
            return (held.release(event, tuple((rule, text) for rule, text in named if rule is not None)),)
        # It shows nothing, and says that the answer goes on.
        return (_Item(api.Delta(request=event.request, epoch=event.epoch, choice=event.choice)),)

    def _complete(self, held: _Held, event: api.Finished) -> tuple[tuple[Rule, str], ...]:
        """Returns what a whole answer must satisfy."""
        rule = self._check.rule()
        if rule is None or event.reason != "stop" or event.matched_stop is not None:
            return ()
        return ((rule, "".join(held.text)),)


@dataclass(frozen=True, slots=True)
class Aside:
    """What of the engine a checked answer needs.

    Attributes:
        judge: raises AnswerInvalid where a text breaks its rule; may block.
        pool: where `judge` and `submit` are called, and then the client's sink.
        submit: takes in a second request, with the sink of its events.
        cancel: stops a request by its id; unknown ones are ignored.
    """

    judge: Callable[[Rule, str], None]
    pool: Executor
    submit: Callable[[api.Generate, Sink], None]
    cancel: Callable[[str], None]


class CheckedSink:
    """A request's sink that passes events on in order; called by one thread at a time."""

    def __init__(self, generate: api.Generate, check: PostCheck, aside: Aside, sink: Sink) -> None:
        self._generate = generate
        self._check = check
        self._aside = aside
        self._sink = sink
        self._reader = _Reader(generate, check)
        self._lock = threading.Lock()
        self._queue: deque[_Item] = deque()
        self._busy = False
        self._ended = False
        self._running = [generate.request]
        self._retried: set[int] = set()
        self._cached = 0
        self._tokens = Counter({known.choice: len(known.ids) for known in generate.resume})
        self._usages: list[api.Usage] = []

    def __call__(self, event: api.AnswerEvent) -> None:
        """Takes the next event of the answer."""
        for item in self._reader.items(event):
            self._put(item)

    def stop(self) -> None:
        """Nothing more is sent, and nothing more is computed for it."""
        with self._lock:
            self._ended = True
            self._queue.clear()
            running = tuple(self._running)
        for request in running:
            self._aside.cancel(request)

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
            self._aside.pool.submit(self._drain)
        elif not waits:
            self._pass(item)

    def _drain(self) -> None:
        """Checks and sends what waits, until nothing does."""
        while True:
            with self._lock:
                if not self._queue:
                    self._busy = False
                    return
                item = self._queue.popleft()
            error = None if self._stale(item) else self._problem(item)
            if error is None:
                self._pass(item)
            elif isinstance(error, AnswerInvalid) and item.before is not None and not item.again:
                self._retry(item.before, error)
            else:
                self._pass(_Item(failed(self._generate, error), again=item.again))

    def _problem(self, item: _Item) -> MagnitudeError | None:
        try:
            for rule, text in item.checks:
                self._aside.judge(rule, text)
        except MagnitudeError as error:
            return error
        except Exception:  # noqa: BLE001 - an edge: whatever a check provokes, the request gets its one outcome
            worker_log.exception("the answer of request %s could not be checked", self._generate.request)
            return EngineError("the answer could not be checked; the worker's log says why")
        return None

    def _retry(self, before: api.Resume, error: AnswerInvalid) -> None:
        """Has a choice written once more, from what the client has of it."""
        choice, request = before.choice, second_try(self._generate, before)
        worker_log.info("request %s writes choice %d once more: %s", self._generate.request, choice, error)
        self._retried.add(choice)
        self._tokens[choice] = len(before.ids)
        with self._lock:
            self._running.append(request.request)
        if self._generate.n == 1:
            self._aside.cancel(self._generate.request)
        reader = _Reader(request, self._check)

        def sink(event: api.AnswerEvent) -> None:
            for item in reader.items(event):
                self._put(_Item(self._renamed(item.event, choice), item.checks, item.before, again=True))

        self._aside.submit(request, sink)
        if self._ended:
            self._aside.cancel(request.request)

    def _renamed(self, event: api.AnswerEvent, choice: int) -> api.AnswerEvent:
        """Returns an event of a second try as one of this request."""
        if isinstance(event, api.Delta | api.Finished):
            return msgspec.structs.replace(event, request=self._generate.request, choice=choice)
        return msgspec.structs.replace(event, request=self._generate.request)

    def _stale(self, item: _Item) -> bool:
        """Whether an event tells of what was given up, or what the client knows."""
        if item.again:
            return isinstance(item.event, api.Started)
        if isinstance(item.event, api.Delta | api.Finished):
            return item.event.choice in self._retried
        return bool(self._retried) and self._generate.n == 1

    def _pass(self, item: _Item) -> None:
        """Sends an event, unless it is stale; the end only when nothing else is to come."""
        event: api.AnswerEvent | None = None if self._stale(item) else item.event
        if isinstance(event, api.Started):
            self._cached = event.cached_tokens
        elif isinstance(event, api.Delta):
            self._tokens[event.choice] += len(event.ids)
        elif isinstance(event, api.Completed):
            event = self._end(event)
        if event is None:
            return
        if isinstance(event, api.Failed):
            self.stop()
        try:
            self._sink(event)
        except Exception:  # noqa: BLE001 - the sink is the caller's code; its faults end this request only
            worker_log.exception("the receiver of request %s raised an error", self._generate.request)
            self.stop()

    def _end(self, event: api.Completed) -> api.Completed | None:
        """Returns the end of the whole answer; None while another request still writes a part of it."""
        self._usages.append(event.usage)
        if not self._retried:
            return event
        if len(self._usages) < len(self._retried) + (self._generate.n > 1):
            return None
        usage = msgspec.structs.replace(
            self._usages[0],
            completion_tokens=self._tokens.total(),
            cached_tokens=self._cached,
            drafted_tokens=sum(usage.drafted_tokens for usage in self._usages),
            accepted_tokens=sum(usage.accepted_tokens for usage in self._usages),
            forced_tokens=sum(usage.forced_tokens for usage in self._usages),
        )
        return msgspec.structs.replace(event, usage=usage)


def second_try(generate: api.Generate, known: api.Resume) -> api.Generate:
    """Returns the request that writes one choice anew behind `known`, with another draw."""
    sampling = generate.sampling
    seed = hashlib.sha256(f"{sampling.seed}/{known.choice}/again".encode()).digest()
    return msgspec.structs.replace(
        generate,
        request=f"{generate.request}/again/{known.choice}",
        n=1,
        resume=(msgspec.structs.replace(known, choice=0),) if known.ids else (),
        echo=False,
        sampling=msgspec.structs.replace(
            sampling,
            seed=int.from_bytes(seed[:8], "big") >> 1,
            temperature=max(sampling.temperature, RETRY_TEMPERATURE),
            top_p=max(sampling.top_p, RETRY_TOP_P),
            top_k=0 if sampling.top_k == 1 else sampling.top_k,
        ),
        # What a session sends next is said by its first choice.
        preferences=msgspec.structs.replace(
            generate.preferences, predictive_caching=generate.preferences.predictive_caching and known.choice == 0
        ),
    )
