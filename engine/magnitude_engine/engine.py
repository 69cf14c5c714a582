"""The engine: takes requests from any thread and answers them on its own.

`Engine` is the outside: tokenising and checking on the caller's thread, an inbox, the thread, and what happens
when a step raises. The step itself is in `stepper.py`.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable

from magnitude_engine import api
from magnitude_engine import telemetry as names
from magnitude_engine.answer import Answer, Sink
from magnitude_engine.config import PAGE_TOKENS, EngineConfig
from magnitude_engine.errors import EngineError, MagnitudeError, Overloaded, WorkerLost
from magnitude_engine.inbox import Inbox, Job, JobKey
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.request import RequestLimits, Sequence, prepare
from magnitude_engine.scheduler import retry_after
from magnitude_engine.stepper import Stepper

MAX_STEP_FAILURES = 3
IDLE_CHECK_S = 1.0
# A million tokens; more would only slow the page accounts down.
MAX_PAGES = 1 << 16


class Engine:
    """One model, one cache, one thread.

    `start` runs steps in a thread of its own; without it the caller runs `step` itself. `submit`, `cancel` and
    `status` may be called from any thread. Sinks are called on the thread that steps, or on the caller's where a
    request is refused at once; they must return quickly.

    Args:
        clock: seconds, monotonic.
        pages: size of the cache; default: what `config.kv_memory_mb` holds.
        incarnation: identifies this process in `Status`.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        pages: int | None = None,
        incarnation: str = "",
    ) -> None:
        pages = pages or pages_in(config.kv_memory_mb, model)
        self.card = model.card
        self.incarnation = incarnation
        self._model = model
        self._config = config
        self._clock = clock
        self._inbox = Inbox()
        self._stepper = Stepper(model, config, pages, clock, lambda job: self._inbox.ended(job.key))
        self._limits = RequestLimits(min(model.card.context_length, pages * PAGE_TOKENS), config.max_n)
        self._arrivals = itertools.count()
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._on_fatal: Callable[[], None] = lambda: None

    def submit(self, generate: api.Generate, sink: Sink) -> None:
        """Takes a request in. Its events, refusals included, go to `sink`; nothing is raised."""
        answer = Answer(generate, sink)
        try:
            self._check_room()
            prepared = prepare(generate, self._model, self._limits)
            arrival = next(self._arrivals)
            sequences = tuple(Sequence(prepared, choice, arrival, self._model) for choice in range(generate.n))
            self._inbox.put(Job(prepared, answer, sequences, self._clock()))
        except MagnitudeError as error:
            self._refuse(answer, error)
        except Exception:  # noqa: BLE001 - an edge: whatever a request provokes, it gets its one outcome
            names.worker_log.exception("request %s could not be prepared", generate.request)
            self._refuse(answer, EngineError("the request could not be prepared; the worker's log says why"))

    def cancel(self, request: str, epoch: int) -> None:
        """Stops a request within one step; nothing more is sent for it. Unknown requests are ignored."""
        self._inbox.cancel(JobKey(request, epoch))

    def status(self) -> api.Status:
        """Returns the present state; `pages_free` counts retained pages too, since they are given up on demand."""
        stepper = self._stepper
        return api.Status(
            incarnation=self.incarnation,
            steps=stepper.steps,
            running=stepper.running,
            waiting=stepper.waiting + self._inbox.waiting,
            pages_free=stepper.manager.available,
            pages_total=stepper.manager.total,
            counters=stepper.telemetry.values("counter"),
            gauges=stepper.telemetry.values("gauge"),
        )

    def start(self, on_fatal: Callable[[], None] = lambda: None) -> None:
        """Begins to run steps; `on_fatal` is called (on the engine's thread) when steps keep failing."""
        self._on_fatal = on_fatal
        self._thread = threading.Thread(target=self._run, name="magnitude-engine", daemon=True)
        self._thread.start()

    def close(self, grace_s: float = 0.0) -> None:
        """Refuses new requests, lets open ones end for `grace_s` seconds, fails the rest and stops the thread."""
        self._inbox.refuse(WorkerLost("the worker is stopping; send the request again"))
        if self._thread is not None:
            self._inbox.wait_until_empty(grace_s)
        self._inbox.close()
        if self._thread is not None:
            self._thread.join()
        self._take_mail()
        self._stepper.fail_all(WorkerLost("the worker stopped before the answer was complete; send the request again"))

    def step(self) -> bool:
        """Takes in what was asked and runs one step; False when there was nothing to compute."""
        self._take_mail()
        return self._stepper.step()

    def check_integrity(self) -> None:
        """Checks the page accounts; to be called on the thread that steps, between steps.

        Raises:
            IntegrityError: they are wrong.
        """
        self._stepper.manager.check_integrity()

    def _take_mail(self) -> None:
        for item in self._inbox.take():
            if isinstance(item, Job):
                self._stepper.enter(item)
            else:
                self._stepper.cancel(item)

    def _check_room(self) -> None:
        waiting = self._stepper.waiting + self._inbox.waiting
        seat = not waiting and self._stepper.running < self._config.max_batch_size
        if waiting >= self._config.max_waiting and not seat:
            delay = retry_after(waiting, self._config.max_batch_size, self._stepper.request_seconds)
            raise Overloaded(
                f"{waiting} requests are waiting, the limit is {self._config.max_waiting}; "
                f"try again in {delay:.0f} s or raise max_waiting",
                retry_after_s=delay,
            )

    def _refuse(self, answer: Answer, error: MagnitudeError) -> None:
        self._stepper.telemetry.count(names.REQUESTS_FAILED)
        answer.failed(error)

    def _run(self) -> None:
        """The engine's thread."""
        while not self._inbox.closed:
            try:
                if self.step():
                    self._failures = 0
                elif not self._inbox.wait(IDLE_CHECK_S):
                    self._stepper.check_integrity()
                    self._inbox.wait(None)
            except Exception:  # noqa: BLE001 - an edge: a step that fails ends its requests, not the process
                if not self._survive():
                    return

    def _survive(self) -> bool:
        """Fails what took part in a failed step; False when steps fail again and again and the engine gives up."""
        self._failures += 1
        names.worker_log.exception("step %d failed", self._stepper.steps)
        self._stepper.telemetry.count(names.STEP_FAILURES)
        self._stepper.fail_running(EngineError("a step of the model failed; send the request again"))
        if self._failures < MAX_STEP_FAILURES:
            return True
        self._inbox.refuse(WorkerLost("the worker gave up after repeated failures; send the request again"))
        self._take_mail()
        self._stepper.fail_all(WorkerLost("the worker gave up after repeated failures; send the request again"))
        self._on_fatal()
        return False


def pages_in(megabytes: int, model: LoadedModel) -> int:
    """Returns how many cache pages fit into `megabytes` MiB, at least one and at most `MAX_PAGES`."""
    shape, dtype = model.runner.shape, model.runner.cache_dtype
    page_bytes = 2 * shape.layers * PAGE_TOKENS * shape.kv_heads * shape.head_dim * dtype.itemsize
    return min(MAX_PAGES, max(1, megabytes * 1024 * 1024 // page_bytes))
