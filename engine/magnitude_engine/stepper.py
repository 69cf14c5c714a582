"""The step: one forward pass for everything that runs, readable in one file.

    admit     seats are given and taken away (scheduler.plan_seats); a seat means a lease on the cache
    plan      rows per sequence (scheduler.plan_rows), pages for them, one batch (step.build_batch)
    forward   the model computes the batch; keys and values land in the pages
    sample    one token for each sequence whose last known token was computed; choices of one prompt fork here
    commit    tokens become events; what ended is retained for the tenant's later requests

Prefill, decoding, resuming and recomputing after preemption are the same thing: a sequence has known tokens, some
of them are in the cache, the step computes more of them, and when none is missing the next token is drawn. The
noise of sampling is keyed by position, so the order and company in which this happens changes nothing.

Single-threaded: whoever calls `step` calls everything here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Sequences

import torch

from magnitude_engine import api
from magnitude_engine import telemetry as names
from magnitude_engine.config import EngineConfig
from magnitude_engine.decode.sample import Drawn, draw
from magnitude_engine.errors import EngineError, MagnitudeError, NumericFailure
from magnitude_engine.inbox import Job, JobKey
from magnitude_engine.kv.manager import CacheManager, pages_for
from magnitude_engine.kv.pool import IntegrityError
from magnitude_engine.kv.tensors import apply_page_ops
from magnitude_engine.model.loader import LoadedModel
from magnitude_engine.request import Emission, Sequence
from magnitude_engine.scheduler import (
    MIN_PREFILL_ROWS,
    SMOOTHING,
    Measured,
    Order,
    Running,
    Snapshot,
    Waiting,
    plan_rows,
    plan_seats,
    row_budget,
    smooth,
)
from magnitude_engine.step import Work, build_batch, row_spec


class Stepper:
    """The jobs that were entered, their sequences, and the cache that they run in.

    Args:
        pages: size of the cache.
        clock: seconds, monotonic.
        ended: called with each job that has had its last event.

    Attributes:
        steps: how many steps were computed.
        request_seconds: smoothed time from arrival to completion.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        pages: int,
        clock: Callable[[], float],
        ended: Callable[[Job], None],
    ) -> None:
        self.steps = 0
        self.request_seconds = 1.0
        self.telemetry = names.WorkerTelemetry()
        self.manager = CacheManager(pages, reuse=config.optimization_level != "off")
        self._runner = model.runner
        self._cache = model.runner.allocate_cache(pages)
        self._config = config
        self._clock = clock
        self._ended = ended
        self._jobs: dict[int, Job] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._few: Measured | None = None
        self._many: Measured | None = None

    @property
    def running(self) -> int:
        """Sequences that hold pages."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a seat; choices that will be forked from another's prompt do not count."""
        return len(self._waiting)

    def step(self) -> bool:
        """Runs one step; False when there is nothing to compute."""
        began = self._clock()
        self._admit()
        work = self._plan()
        if not work:
            return False
        logits = self._forward(work)
        for sequence, drawn in self._sample(work, logits):
            self._commit(sequence, drawn)
        self._measure(work, self._clock() - began)
        return True

    def enter(self, job: Job) -> None:
        """Takes a job in; its choices wait for a seat."""
        alive = [s for s in job.sequences if s.finish is None]
        self._jobs[job.sequences[0].order.arrival] = job
        if not alive:
            self._begin(job, 0)
            self._complete_if_done(job)
        elif job.prepared.generate.resume:
            self._waiting += alive
        else:
            alive[0].width = len(alive)
            self._waiting.append(alive[0])

    def cancel(self, key: JobKey) -> None:
        """Ends a job without a further event; what it computed is retained."""
        job = next((j for j in self._jobs.values() if j.key == key), None)
        if job is not None:
            self.telemetry.count(names.REQUESTS_CANCELLED)
            self._drop(job)

    def fail_running(self, error: MagnitudeError) -> None:
        """Ends all jobs that hold pages, and forgets the whole cache, since its contents are in doubt."""
        running, self._running = self._running, []
        for sequence in running:
            sequence.lease = None
        self.manager.reset()
        for arrival in {s.order.arrival for s in running}:
            self._fail(self._jobs[arrival], error)

    def fail_all(self, error: MagnitudeError) -> None:
        """Ends all jobs."""
        for job in list(self._jobs.values()):
            self._fail(job, error)

    def check_integrity(self) -> None:
        """To be called when idle: counts all pages, and starts with an empty cache where the accounts are wrong."""
        try:
            self.manager.check_integrity()
        except IntegrityError as error:
            self.telemetry.count(names.INTEGRITY_FAILURES)
            names.worker_log.error("the page accounts were wrong and the cache was emptied: %s", error)
            self.manager.reset()

    def _admit(self) -> None:
        """Gives and takes seats."""
        waiting = tuple(
            Waiting(s.order, len(s.tokens), s.width, s.prepared.generate.preferences.max_batch_size)
            for s in self._waiting
        )
        snapshot = Snapshot(tuple(self._views()), waiting, self.manager.available, self._config.max_batch_size)
        seats = plan_seats(snapshot)
        for sequence in _named(self._running, seats.preempt):
            self.telemetry.count(names.PREEMPTIONS)
            self._retire(sequence)
            self._waiting.append(sequence)
        for sequence in _named(self._waiting, seats.admit):
            self._seat(sequence)

    def _views(self) -> list[Running]:
        """Returns what the scheduler sees of the running sequences."""
        missing = [pages_for(len(s.tokens)) - len(s.lease.pages) for s in self._running if s.lease]
        short = sum(missing) > self.manager.available
        return [
            Running(
                order=s.order,
                tokens=len(s.tokens),
                computed=len(s.tokens) - s.missing,
                held=len(s.lease.pages) if s.lease else 0,
                recoverable=self.manager.recoverable(s.lease) if short and s.lease else 0,
                width=s.width,
                batch_limit=s.prepared.generate.preferences.max_batch_size,
            )
            for s in self._running
        ]

    def _seat(self, sequence: Sequence) -> None:
        """Gives a waiting sequence a lease on what is cached of its tokens."""
        job = self._job(sequence)
        sequence.lease = self.manager.acquire(job.prepared.cache_key(sequence.choice), sequence.tokens)
        self._waiting.remove(sequence)
        self._running.append(sequence)
        if not job.started:
            # Of a resumed answer's tokens, some that were generated may be cached too; they are not the prompt's.
            self._begin(job, min(sequence.lease.reused, len(job.prepared.prompt)))

    def _plan(self) -> list[Work]:
        """Returns what is computed in this step; leases have pages for it."""
        # The reference profile measures nothing, so that its steps are the same in every run.
        budget = row_budget(self._few, self._many, self._config.prefill_chunk)
        self.telemetry.set(names.ROW_BUDGET, budget)
        by_order = {s.order: s for s in self._running}
        work: list[Work] = []
        for order, rows in plan_rows(self._views(), budget):
            sequence = by_order[order]
            lease = sequence.lease
            if lease is not None and self.manager.extend(lease, lease.length + rows):
                work.append(Work(sequence, lease, rows))
        if self._running and not work:
            raise EngineError("no running sequence could get pages, although one alone always fits")
        return work

    def _forward(self, work: Sequences[Work]) -> torch.Tensor:
        """Returns the logits of each sequence that has no token missing afterwards, in the order of `work`."""
        apply_page_ops(self.manager.take_ops(), (*self._cache.keys, *self._cache.values))
        output = self._runner.forward(build_batch(work, self._runner.device), self._cache)
        for sequence, lease, rows in work:
            self.manager.advance(lease, rows)
            prompt = len(sequence.prepared.prompt)
            if rows > 1 or lease.length <= prompt:
                self._job(sequence).answer.progress(min(lease.length, prompt), prompt)
        self.steps += 1
        return output.logits

    def _sample(self, work: Sequences[Work], logits: torch.Tensor) -> Iterator[tuple[Sequence, Drawn]]:
        """Yields each sequence that has no token missing with its next one."""
        drawing = [w.sequence for w in work if not w.sequence.missing]
        rows = [(i, choice) for i, sequence in enumerate(drawing) for choice in self._choices(sequence)]
        with torch.inference_mode():
            if len(rows) > len(drawing):
                logits = logits[[i for i, _ in rows]]
            drawn = draw(logits, [row_spec(choice) for _, choice in rows])
        broken = {i for (i, _), each in zip(rows, drawn, strict=True) if not each.finite}
        for i, sequence in enumerate(drawing):
            if sequence.lease is not None and not sequence.output and i not in broken:
                self.manager.publish(sequence.lease, sequence.tokens)
            if sequence.width > 1:
                self._fork(sequence)
        yield from zip((choice for _, choice in rows), drawn, strict=True)

    def _choices(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Returns the choices whose next token is drawn from this sequence's logits."""
        return (sequence,) if sequence.width == 1 else self._job(sequence).sequences

    def _fork(self, root: Sequence) -> None:
        """Gives the other choices leases on the root's prompt; those without a seat or a page wait."""
        for sequence in self._choices(root)[1:]:
            if root.lease is not None and self._seat_left():
                sequence.lease = self.manager.fork(root.lease, sequence.choice)
            (self._running if sequence.lease else self._waiting).append(sequence)
        root.width = 1

    def _seat_left(self) -> bool:
        wishes = (s.prepared.generate.preferences.max_batch_size for s in self._running)
        return len(self._running) < min([self._config.max_batch_size, *(w for w in wishes if w is not None)])

    def _commit(self, sequence: Sequence, drawn: Drawn) -> None:
        """Appends a drawn token to its sequence and tells the client."""
        job = self._jobs.get(sequence.order.arrival)
        if job is None:
            return
        if not drawn.finite:
            self._fail_numeric(job)
            return
        shown = sequence.accept(drawn)
        self.telemetry.count(names.COMPLETION_TOKENS)
        if shown is not None:
            job.answer.delta(sequence.choice, shown)
        if sequence.finish is not None:
            job.answer.finished(sequence.choice, sequence.finish)
            self._leave(sequence)
            self._complete_if_done(job)
        elif job.answer.broken:
            self.cancel(job.key)

    def _begin(self, job: Job, cached: int) -> None:
        """Tells the client that its request runs, and what it gets before the first new token."""
        prompt = len(job.prepared.prompt)
        job.started, job.cached = True, cached
        self.telemetry.count(names.PROMPT_TOKENS, prompt)
        self.telemetry.count(names.CACHED_TOKENS, cached)
        job.answer.started(prompt, cached)
        for sequence in job.sequences:
            if sequence.opening:
                job.answer.delta(sequence.choice, Emission(text=sequence.opening))
            if sequence.finish is not None:
                job.answer.finished(sequence.choice, sequence.finish)

    def _complete_if_done(self, job: Job) -> None:
        if any(s.finish is None for s in job.sequences):
            return
        usage = api.Usage(
            prompt_tokens=len(job.prepared.prompt),
            completion_tokens=sum(len(s.output) for s in job.sequences),
            cached_tokens=job.cached,
        )
        job.answer.completed(usage)
        self.telemetry.count(names.REQUESTS_COMPLETED)
        self.request_seconds += SMOOTHING * (self._clock() - job.arrived - self.request_seconds)
        self._drop(job)

    def _fail_numeric(self, job: Job) -> None:
        """Ends a job whose logits are not finite; nothing that it computed, or started from, is found again."""
        self.telemetry.count(names.NUMERIC_FAILURES)
        for sequence in job.sequences:
            if sequence.lease is not None:
                self.manager.forget(sequence.lease)
                self._running.remove(sequence)
                sequence.lease = None
        message = "the model produced numbers that are not finite for this request; send it again"
        self._fail(job, NumericFailure(message))

    def _fail(self, job: Job, error: MagnitudeError) -> None:
        self.telemetry.count(names.REQUESTS_FAILED)
        job.answer.failed(error)
        self._drop(job)

    def _drop(self, job: Job) -> None:
        """Forgets a job; what its choices computed is retained."""
        for sequence in job.sequences:
            self._leave(sequence)
        del self._jobs[job.sequences[0].order.arrival]
        self._ended(job)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is."""
        self._retire(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    def _retire(self, sequence: Sequence) -> None:
        """Takes a running sequence's pages and retains them."""
        if sequence.lease is not None:
            self.manager.commit(sequence.lease, sequence.tokens)
            sequence.lease = None
            self._running.remove(sequence)

    def _job(self, sequence: Sequence) -> Job:
        return self._jobs[sequence.order.arrival]

    def _measure(self, work: Sequences[Work], seconds: float) -> None:
        rows = sum(w.rows for w in work)
        chunks = sum(w.rows for w in work if w.rows > 1)
        self.telemetry.count(names.STEP_SECONDS_TOTAL, seconds)
        self.telemetry.count(names.PREFILL_ROWS, chunks)
        self.telemetry.count(names.DECODE_ROWS, rows - chunks)
        self.telemetry.set(names.PAGES_EVICTED, self.manager.evicted_pages)
        self.telemetry.set(names.PAGES_RETAINED, self.manager.retained)
        if chunks and seconds > 0:
            self.telemetry.set(names.PREFILL_RATE, chunks / seconds)
        if self._runner.profile == "reference":
            return
        if rows < MIN_PREFILL_ROWS:
            self._few = smooth(self._few, rows, seconds)
        else:
            self._many = smooth(self._many, rows, seconds)


def _named(sequences: Iterable[Sequence], orders: Iterable[Order]) -> list[Sequence]:
    wanted = set(orders)
    return [s for s in sequences if s.order in wanted]
