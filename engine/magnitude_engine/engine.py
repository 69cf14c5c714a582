"""The engine: takes requests from any thread and answers them on its own.

`Engine` is the outside: tokenising and checking on the caller's thread, an inbox, the thread, and what happens
when a step raises. The step itself is in `stepper.py`; what is computed ahead of requests comes from `predict.py`.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from magnitude_engine import api
from magnitude_engine import telemetry as names
from magnitude_engine.answer import Answer, Sink, failed, registered
from magnitude_engine.build import open_cache, open_speculation
from magnitude_engine.checked import Aside, CheckedSink
from magnitude_engine.config import PAGE_TOKENS, EngineConfig
from magnitude_engine.errors import EngineError, MagnitudeError, Overloaded, WorkerLost
from magnitude_engine.explain.explainer import Explainer
from magnitude_engine.inbox import Ahead, Hooks, Inbox, Job, JobKey, Question
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.predict import Predictor, Settled
from magnitude_engine.prepared import PreparedRequest, RequestLimits, prepare
from magnitude_engine.request import Sequence
from magnitude_engine.scheduler import retry_after
from magnitude_engine.stepper import Stepper

MAX_STEP_FAILURES = 3
IDLE_CHECK_S = 1.0
READING_CHECK_S = 0.1
# A disk that takes no more is asked again.
SAVING_CHECK_S = 0.25
# Longer prompts are refused by their length alone; see `PromptEncoder.encode`.
COUNTED_CONTEXTS = 32
# Checks of finished answers, and grammars compiled ahead.
ASIDE_THREADS = 2


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
        tensors, cache = open_cache(model, config, pages, clock)
        context = min(model.card.context_length, cache.manager.total * PAGE_TOKENS)
        self.card = model.card
        self.incarnation = incarnation
        self._model = model
        self._config = config
        self._clock = clock
        self._inbox = Inbox()
        self._explainer = Explainer(model.tokenizer, config.optimization_level != "off")
        hooks = Hooks(clock, self._ended, self._answered, self._inbox.wake, self._explainer)
        speculation = open_speculation(model, config, tensors, cache, clock)
        self._stepper = Stepper(model.runner, tensors, cache, config, hooks, speculation)
        self._predictor = Predictor(model.prompts, context, self._settled)
        self._limits = RequestLimits(context, config.max_n)
        self._checks: weakref.WeakValueDictionary[JobKey, CheckedSink] = weakref.WeakValueDictionary()
        self._pool = ThreadPoolExecutor(ASIDE_THREADS, thread_name_prefix="magnitude-aside")
        self._arrivals = itertools.count()
        self._failures = 0
        self._thread: threading.Thread | None = None
        self._on_fatal: Callable[[], None] = lambda: None

    def submit(self, generate: api.Generate, sink: Sink) -> None:
        """Takes a request in. Its events, refusals included, go to `sink`; nothing is raised."""
        self._enter(generate, sink, again=False)

    def _enter(self, generate: api.Generate, sink: Sink, again: bool) -> None:
        """Takes a request in; one that is `again` has its room, and whoever sends it checks its answer."""
        answer = Answer(generate, sink)
        try:
            if not again:
                self._check_room()
            prepared = prepare(generate, self._model, self._limits)
            if not again:
                answer = Answer(generate, self._checked(prepared, sink))
            arrival = next(self._arrivals)
            sequences = tuple(Sequence(prepared, choice, arrival, self._model) for choice in range(generate.n))
            self._inbox.put(Job(prepared, answer, sequences, self._clock(), self._explainer.prompt(prepared)))
        except MagnitudeError as error:
            self._refuse(answer, error)
        except Exception:  # noqa: BLE001 - an edge: whatever a request provokes, it gets its one outcome
            names.worker_log.exception("request %s could not be prepared", generate.request)
            self._refuse(answer, EngineError("the request could not be prepared; the worker's log says why"))

    def count(self, count: api.Count, sink: Sink) -> None:
        """Tells `sink`, on the caller's thread, how many tokens a prompt has; nothing is raised.

        Prompts far beyond the context are counted too, up to `COUNTED_CONTEXTS` of it.
        """
        try:
            prompt = self._model.prompts.encode(count.input, self._limits.context * COUNTED_CONTEXTS)
        except MagnitudeError as error:
            sink(failed(count, error))
        except Exception:  # noqa: BLE001 - an edge: whatever a prompt provokes, it gets its one outcome
            names.worker_log.exception("prompt %s could not be counted", count.request)
            sink(failed(count, EngineError("the prompt could not be counted; the worker's log says why")))
        else:
            sink(api.Completed(request=count.request, epoch=count.epoch, usage=api.Usage(prompt_tokens=len(prompt))))

    def cancel(self, request: str, epoch: int) -> None:
        """Stops a request within one step; nothing more is sent for it. Unknown requests are ignored."""
        checked = self._checks.get(JobKey(request, epoch))
        if checked is not None:
            checked.stop()
        self._inbox.cancel(JobKey(request, epoch))

    def tool_event(self, event: api.ToolEvent) -> None:
        """Takes in what a tool of a session does; its output is computed ahead as it comes."""
        self._predictor.tool_event(event)

    def expect(self, expect: api.Expect) -> None:
        """Takes in that a session comes back with other messages; they are computed ahead."""
        self._predictor.expect(expect)

    def register(
        self,
        register: api.Register,
        done: Callable[[], None] = lambda: None,
        told: Callable[[api.Registered | api.Failed], None] = lambda event: None,
    ) -> None:
        """Has what every prompt with these tools begins with computed ahead; `done` is called when that has ended.

        Where nothing is kept between requests that is at once. The grammar of their calls is compiled meanwhile;
        `told` is called, on another thread, with how that went.
        """
        self._pool.submit(self._compile_ahead, register, told)
        if self._config.optimization_level == "off":
            done()
        else:
            self._predictor.register(register, done)

    def end_session(self, end: api.EndSession) -> None:
        """Takes in that nothing more comes of a session or a branch."""
        self._predictor.forget(end.tenant, end.session, end.branch)
        self._inbox.post(end)

    def inspect(self, answer: Callable[[api.CacheReport], None]) -> None:
        """Calls `answer`, on the engine's thread, with what the cache holds between two steps."""
        self._inbox.post(Question(answer))

    def misses(self, asked: api.AskMisses) -> api.SessionMisses:
        """Returns why prompts of a session were not found in the cache; any thread may ask, also during a step."""
        return self._explainer.report(asked)

    def status(self) -> api.Status:
        """Returns the present state.

        `pages_free` counts what is given up on demand, too: retained pages and those held for prefill ahead.
        """
        stepper = self._stepper
        ahead = stepper.manager.held_by(stepper.ahead.queue.leases())
        return api.Status(
            incarnation=self.incarnation,
            steps=stepper.steps,
            running=stepper.running,
            waiting=stepper.waiting + self._inbox.waiting,
            pages_free=stepper.manager.available + ahead,
            pages_total=stepper.manager.total,
            counters=stepper.telemetry.values("counter"),
            gauges=stepper.telemetry.values("gauge"),
        )

    def start(self, on_fatal: Callable[[], None] = lambda: None) -> None:
        """Begins to run steps; `on_fatal` is called (on the engine's thread) when steps keep failing."""
        self._on_fatal = on_fatal
        # Not only when the first request waits for it.
        self._model.constraints.start()
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
        self._predictor.close()
        self._take_mail()
        self._stepper.fail_all(WorkerLost("the worker stopped before the answer was complete; send the request again"))
        self._stepper.close()
        self._pool.shutdown(wait=True)
        self._model.close()

    def step(self) -> bool:
        """Takes in what was asked and runs one step; False when there was nothing to compute."""
        self._take_mail()
        return self._stepper.step()

    @property
    def reading(self) -> bool:
        """Whether `step` has nothing to do until blocks were read from disk."""
        return self._stepper.reading

    def tidy(self) -> bool:
        """To be called when `step` has nothing to do: writes pages back to disk; False when that is done."""
        return self._stepper.tidy()

    def check_integrity(self) -> None:
        """Checks the page accounts; to be called on the thread that steps, between steps.

        Raises:
            IntegrityError: they are wrong.
        """
        self._stepper.manager.check_integrity()

    def _checked(self, prepared: PreparedRequest, sink: Sink) -> Sink:
        """Returns the sink, behind the checks that the request's grammar leaves open."""
        check = prepared.grammar.check if prepared.grammar is not None else None
        if check is None:
            return sink
        generate = prepared.generate

        def submit(again: api.Generate, events: Sink) -> None:
            self._enter(again, events, again=True)

        def cancel(request: str) -> None:
            self._inbox.cancel(JobKey(request, generate.epoch))

        aside = Aside(self._model.constraints.check, self._pool, submit, cancel)
        checked = CheckedSink(generate, check, aside, sink)
        self._checks[JobKey(generate.request, generate.epoch)] = checked
        return checked

    def _compile_ahead(self, register: api.Register, told: Callable[[api.Registered | api.Failed], None]) -> None:
        try:
            grammar = self._model.constraints.prepare(register.tools, register.tenant)
            ahead = self._config.optimization_level != "off"
            outcome: api.Registered | api.Failed = registered(register, grammar, ahead)
        except MagnitudeError as error:
            # Whoever sends a request with these tools is told as well.
            names.worker_log.info("registered tools have no grammar: %s", error)
            outcome = failed(register, error)
        except Exception:  # noqa: BLE001 - an edge: whatever a schema provokes, who registers it is told
            names.worker_log.exception("registered tools could not be compiled")
            outcome = failed(register, EngineError("the tools could not be compiled; the worker's log says why"))
        told(outcome)

    def _take_mail(self) -> None:
        for item in self._inbox.take():
            match item:
                case Job():
                    self._stepper.enter(item)
                case Ahead():
                    self._stepper.ahead.ask(item, self._clock())
                case api.EndSession():
                    self._stepper.end_session(item)
                case Question():
                    item.answer(self._stepper.report())
                case JobKey():
                    self._stepper.cancel(item)

    def _ended(self, job: Job) -> None:
        self._inbox.ended(job.key)

    def _answered(self, sequence: Sequence) -> None:
        """A step has ended: what its session sends next may be computed ahead."""
        prepared = sequence.prepared
        wanted = self._config.optimization_level != "off" and prepared.generate.preferences.predictive_caching
        if wanted and prepared.chat is not None:
            self._predictor.answered(sequence.owner, prepared.chat, sequence.answer)

    def _settled(self, settled: Settled, done: Callable[[], None]) -> None:
        self._inbox.post(Ahead(settled, done))

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
        fresh = self._config.drafts
        while not self._inbox.closed:
            try:
                if fresh:
                    fresh = False
                    self._stepper.calibrate()
                if self.step():
                    self._failures = 0
                elif self.reading:
                    self._inbox.wait(READING_CHECK_S)
                elif self.tidy():
                    continue
                elif self._stepper.cache.unsaved:
                    self._inbox.wait(SAVING_CHECK_S)
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
