"""What other threads ask of the engine's thread, in the order in which it came."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from magnitude_engine import api
from magnitude_engine.answer import Answer
from magnitude_engine.draft.record import Use, decided, total
from magnitude_engine.errors import RequestError, WorkerLost
from magnitude_engine.explain.cause import Told
from magnitude_engine.explain.explainer import Explainer
from magnitude_engine.kv.lease import NOT_CACHED, Cached
from magnitude_engine.predict import Settled
from magnitude_engine.prepared import PreparedRequest
from magnitude_engine.request import Sequence


class JobKey(NamedTuple):
    """A request and the epoch of the attempt at it."""

    request: str
    epoch: int


@dataclass(slots=True, eq=False)
class Job:
    """One request inside the engine.

    Attributes:
        sequences: its choices.
        arrived: when, in seconds of the engine's clock.
        told: its prompt for the explainer; None where that is off.
        started: whether its first choice has run.
        cached: prompt tokens that were found in the cache then; `miss` says why not more, where there could have been.
    """

    prepared: PreparedRequest
    answer: Answer
    sequences: tuple[Sequence, ...]
    arrived: float
    told: Told | None = None
    started: bool = False
    cached: Cached = NOT_CACHED
    miss: api.CacheMiss | None = None

    @property
    def key(self) -> JobKey:
        """How cancellations name it."""
        return JobKey(self.prepared.generate.request, self.prepared.generate.epoch)

    @property
    def usage(self) -> api.Usage:
        """What it took so far."""
        uses = total(s.drafting for s in self.sequences)
        predicted = uses.get("prediction", Use()) if self.prepared.prediction is not None else None
        return api.Usage(
            prompt_tokens=len(self.prepared.prompt),
            completion_tokens=sum(len(s.output) for s in self.sequences),
            cached_tokens=self.cached.tokens,
            cached_host_tokens=self.cached.host,
            cached_disk_tokens=self.cached.disk,
            miss=self.miss,
            drafted_tokens=sum(s.drafted for s in self.sequences),
            accepted_tokens=sum(s.accepted for s in self.sequences),
            forced_tokens=sum(s.forced for s in self.sequences),
            accepted_prediction_tokens=None if predicted is None else predicted.accepted,
            rejected_prediction_tokens=None if predicted is None else predicted.drafted - predicted.accepted,
            speculation=tuple(
                api.ProposerUse(name=name, drafted=use.drafted, accepted=use.accepted) for name, use in uses.items()
            ),
            draft_decisions=decided(s.drafting for s in self.sequences),
        )


@dataclass(frozen=True, slots=True)
class Hooks:
    """Whom the stepper tells what happens.

    Attributes:
        clock: seconds, monotonic.
        ended: called with each job that has had its last event.
        answered: called with each first choice that ended in full, for what follows it; before the end is told, since
            whoever hears of it may say at once what the session comes back with.
        wake: called on another thread when `step` should be called again.
        explainer: says why a prompt was not cached.
    """

    clock: Callable[[], float]
    ended: Callable[[Job], None]
    answered: Callable[[Sequence], None]
    wake: Callable[[], None]
    explainer: Explainer


@dataclass(frozen=True, slots=True)
class Question:
    """Somebody wants to know what is in the cache; `answer` is called on the engine's thread."""

    answer: Callable[[api.CacheReport], None]


@dataclass(frozen=True, slots=True)
class Ahead:
    """A prompt's beginning to compute ahead; `done` is called when it is computed, or will not be."""

    settled: Settled
    done: Callable[[], None]


Mail = Job | JobKey | Question | Ahead | api.EndSession


class Inbox:
    """Thread-safe; one reader, any number of writers.

    A job is open from `put` until the engine calls `ended` for it, so that a second request of the same key is
    refused and `wait_until_empty` knows when all work is done.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mail: deque[Mail] = deque()
        self._open: set[JobKey] = set()
        self._jobs_waiting = 0
        self._woken = False
        self._refusal: WorkerLost | None = None
        self.closed = False

    @property
    def waiting(self) -> int:
        """Jobs that the engine has not taken yet."""
        return self._jobs_waiting

    def put(self, job: Job) -> None:
        """Hands a job over.

        Raises:
            RequestError: a request with the same id and epoch is running.
            WorkerLost: the engine is stopping.
        """
        with self._changed:
            if self._refusal is not None:
                raise self._refusal
            if job.key in self._open:
                raise RequestError(f"request {job.key.request!r} is running already; use another id", param="request")
            self._open.add(job.key)
            self._mail.append(job)
            self._jobs_waiting += 1
            self._changed.notify_all()

    def cancel(self, key: JobKey) -> None:
        """Asks to stop a job; unknown ones are ignored."""
        with self._changed:
            if key in self._open:
                self._mail.append(key)
                self._changed.notify_all()

    def post(self, mail: Question | Ahead | api.EndSession) -> None:
        """Hands over what has no answer to wait for."""
        with self._changed:
            self._mail.append(mail)
            self._changed.notify_all()

    def wake(self) -> None:
        """Ends the reader's wait: something else than mail has changed."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take(self) -> list[Mail]:
        """Returns all mail, in the order in which it came."""
        with self._changed:
            mail = list(self._mail)
            self._mail.clear()
            self._jobs_waiting = 0
            self._woken = False
            return mail

    def wait(self, timeout_s: float | None) -> bool:
        """Waits until there is mail, somebody wakes the reader, or the inbox is closed; False when the time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._mail) or self._woken or self.closed, timeout_s)

    def ended(self, key: JobKey) -> None:
        """Notes that a job has had its last event."""
        with self._changed:
            self._open.discard(key)
            self._changed.notify_all()

    def refuse(self, reason: WorkerLost) -> None:
        """Refuses new jobs from now on."""
        with self._changed:
            self._refusal = reason

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Waits until no job is open; False when the time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._open, timeout_s)

    def close(self) -> None:
        """Wakes the reader for the last time."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
