"""The step: one forward pass for everything that runs, readable in one file; single-threaded.

    admit     seats are given and taken away (seats.py, scheduler.py); a seat means a lease on the cache
    plan      rows per sequence, pages for them, one batch (step.build_batch)
    forward   the model computes the batch; keys and values land in the pages
    sample    one token for each sequence whose last known token was computed; choices of one prompt fork here
    commit    tokens become events; what ended is retained for the tenant's later requests
    ahead     where nobody runs or waits, prompts that sessions will probably send are computed (warm.py)

Prefill, decoding, resuming and recomputing after preemption are the same thing: a sequence has known tokens, some
of them are in the cache, the step computes more of them, and when none is missing the next token is drawn. The
noise of sampling is keyed by position, so the order and company in which this happens changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences

import torch

from magnitude_engine import api
from magnitude_engine import telemetry as names
from magnitude_engine.ahead import PrefillAhead
from magnitude_engine.calibrate import rule
from magnitude_engine.config import EngineConfig
from magnitude_engine.decode.sample import Drawn, drawn_in_parts
from magnitude_engine.drafters.chain import Pass
from magnitude_engine.errors import BranchEnded, EngineError, MagnitudeError, NumericFailure
from magnitude_engine.gauges import record
from magnitude_engine.inbox import Hooks, Job, JobKey
from magnitude_engine.kv.cache import PagedCache
from magnitude_engine.kv.lease import Lease, cached_prompt
from magnitude_engine.kv.pool import IntegrityError
from magnitude_engine.kv.tensors import SlotMove
from magnitude_engine.model.batch import KeyValueCache
from magnitude_engine.model.runner import Runner
from magnitude_engine.request import Emission, Sequence
from magnitude_engine.scheduler import MIN_PREFILL_ROWS, SMOOTHING, Measured, decode_cost, row_budget, smooth
from magnitude_engine.seats import Seats
from magnitude_engine.session_log import SessionLog
from magnitude_engine.speculation import Speculation
from magnitude_engine.step import NO_DRAFT, Verified, Work, build_batch, child, rows_to_draw, slot

# Saving a page costs a fraction of a millisecond; a busy engine saves few per step, an idle one as many as it can.
SAVES_PER_STEP = 2
SAVES_IDLE = 16


class Stepper:
    """The jobs that were entered, their sequences, and the cache that they run in.

    Attributes:
        steps: how many steps were computed.
        request_seconds: smoothed time from arrival to completion.
    """

    def __init__(
        self,
        runner: Runner,
        tensors: KeyValueCache,
        cache: PagedCache,
        config: EngineConfig,
        hooks: Hooks,
        speculation: Speculation,
    ) -> None:
        self.steps = 0
        self.request_seconds = 1.0
        self.telemetry = names.WorkerTelemetry()
        self.cache = cache
        self.manager = cache.manager
        self._runner = runner
        self._tensors = tensors
        self._config = config
        self._hooks = hooks
        self._sessions = SessionLog(cache, hooks.clock, hooks.explainer)
        self._seats = Seats(cache, config, self.telemetry, hooks.clock, hooks.wake)
        self.ahead = PrefillAhead(runner, tensors, cache, self._seats)
        self.speculation = speculation
        self._jobs: dict[int, Job] = {}
        self._few: Measured | None = None
        self._many: Measured | None = None

    @property
    def running(self) -> int:
        """Sequences that hold pages."""
        return len(self._seats.running)

    @property
    def waiting(self) -> int:
        """Sequences that wait for a seat; choices that will be forked from another's prompt do not count."""
        return len(self._seats.waiting)

    @property
    def reading(self) -> bool:
        """Whether blocks are being read for a sequence that waits."""
        return self._seats.reading or self.ahead.queue.reading

    def step(self) -> bool:
        """Runs one step; False when there is nothing to compute."""
        began = self._hooks.clock()
        self.ahead.read(began)
        self._admit()
        work = self._plan()
        self.cache.tiers.yield_to(bool(work))
        if not work:
            return not self.waiting and self._compute_ahead(began)
        logits = self._forward(work)
        moves: list[list[SlotMove]] = []
        accepted = sum(self._commit_all(verified, moves) for verified in self._sample(work, logits))
        # Pages may have changed hands meanwhile, but only admission, saving and the model read them.
        self.cache.move([own for own in moves if own])
        self._measure(work, accepted, self._hooks.clock() - began)
        self.cache.save(SAVES_PER_STEP)
        return True

    def tidy(self) -> bool:
        """To be called when idle: writes pages back to disk and prepares the model for such steps; False when done."""
        more = self.cache.save(SAVES_IDLE)
        record(self.telemetry, self.cache, self.ahead.queue)
        return more or self._runner.recapture()

    def enter(self, job: Job) -> None:
        """Takes a job in; its choices wait for a seat."""
        alive = [s for s in job.sequences if s.finish is None]
        self._jobs[job.sequences[0].order.arrival] = job
        prepared = job.prepared
        fetch = self.ahead.queue.take(job.sequences[0].owner, prepared.prompt)
        if not alive:
            self._begin(job, None)
            self._complete_if_done(job)
        elif prepared.generate.resume:
            self._seats.enter(alive, fetch)
        else:
            alive[0].width = len(alive)
            self._seats.enter(alive[:1], fetch)

    def cancel(self, key: JobKey) -> None:
        """Ends a job without a further event; what it computed is retained."""
        job = next((j for j in self._jobs.values() if j.key == key), None)
        if job is not None:
            self.telemetry.count(names.REQUESTS_CANCELLED)
            self._drop(job)

    def end_session(self, end: api.EndSession) -> None:
        """Nothing more comes of a session, or of one branch: its pages are the first to go."""
        self.ahead.queue.forget(end.tenant, end.session, end.branch)
        if end.pruned:
            self.fail_all(BranchEnded("the branch was pruned: fork another one"), (end.tenant, end.session, end.branch))
        self._sessions.ended(end)

    def report(self) -> api.CacheReport:
        """Returns what the cache holds."""
        cached = self.telemetry.value(names.CACHED_TOKENS)
        lower = self.telemetry.value(names.CACHED_HOST_TOKENS) + self.telemetry.value(names.CACHED_DISK_TOKENS)
        return self.cache.report(round(cached - lower), self._hooks.clock())

    def fail_running(self, error: MagnitudeError) -> None:
        """Ends all jobs that hold pages, and forgets the whole cache, since its contents are in doubt."""
        running = self._seats.clear()
        self.ahead.queue.clear()
        self.manager.reset()
        for arrival in {s.order.arrival for s in running}:
            self._fail(self._jobs[arrival], error)

    def fail_all(self, error: MagnitudeError, owner: tuple[str | None, ...] | None = None) -> None:
        """Ends all jobs, or those of one branch."""
        for job in [job for job in self._jobs.values() if owner in (None, job.sequences[0].owner)]:
            self._fail(job, error)

    def calibrate(self) -> None:
        """Measures what steps cost here; to be called before the first job."""
        model = Pass(self._runner, self._tensors, self.manager.total)
        self.speculation.rule = rule(model, self.speculation.drafters, self._hooks.clock)

    def close(self) -> None:
        """Gives up what is computed ahead, and closes the cache."""
        self.ahead.queue.clear()
        self.speculation.close()
        self.cache.close()

    def check_integrity(self) -> None:
        """To be called when idle: counts all pages, and starts with an empty cache where the accounts are wrong."""
        try:
            self.manager.check_integrity()
        except IntegrityError as error:
            self.telemetry.count(names.INTEGRITY_FAILURES)
            names.worker_log.error("the page accounts were wrong and the cache was emptied: %s", error)
            self.ahead.queue.clear()
            self.manager.reset()

    def _admit(self) -> None:
        """Gives and takes seats; prefill ahead makes way where pages are short."""
        if self.ahead.queue.holding and self._seats.short:
            self.ahead.queue.yield_pages()
        admitted = self._seats.admit()
        if self.waiting and not admitted and self.ahead.queue.holding:
            self.ahead.queue.yield_pages()
            admitted = self._seats.admit()
        for sequence in admitted:
            job = self._job(sequence)
            if not job.started:
                prepared = job.prepared
                self._sessions.resumed(sequence.owner, prepared.prompt, prepared.generate.tool_seconds)
                self._begin(job, sequence.lease)

    def _plan(self) -> list[Work]:
        """Returns what is computed in this step; leases have pages for it."""
        # The reference profile measures nothing, so that its steps are the same in every run.
        running = self._seats.running
        alone = running[0].missing if len(running) == 1 and not self.waiting else 0
        budget = row_budget(self._few, self._many, self._config.prefill_chunk, alone)
        self.telemetry.set(names.ROW_BUDGET, budget)
        by_order = {s.order: s for s in running}
        work: list[Work] = []
        for order, rows in self._seats.plan(budget):
            sequence = by_order[order]
            lease = sequence.lease
            if lease is not None and self._extended(lease, lease.length + rows):
                work.append(Work(sequence, lease, rows))
        if self.running and not work:
            raise EngineError("no running sequence could get pages, although one alone always fits")
        return self._with_drafts(work)

    def _with_drafts(self, work: list[Work]) -> list[Work]:
        """Returns the work with what may follow, as far as there are pages for it."""
        if not self._config.drafts:
            return work
        drafted = self.speculation.draft(work)
        fits = [self.manager.extend(w.lease, w.lease.length + w.rows + len(w.draft)) for w in drafted]
        return [w if fit else w._replace(draft=NO_DRAFT) for w, fit in zip(drafted, fits, strict=True)]

    def _compute_ahead(self, now: float) -> bool:
        computed = self.ahead.step(now)
        record(self.telemetry, self.cache, self.ahead.queue)
        return computed

    def _extended(self, lease: Lease, tokens: int) -> bool:
        """Gives a lease pages, at the cost of prefill ahead where there are too few."""
        if not self.manager.extend(lease, tokens) and self.ahead.queue.holding:
            self.ahead.queue.yield_pages()
        return self.manager.extend(lease, tokens)

    def _forward(self, work: Sequences[Work]) -> torch.Tensor:
        """Returns the logits of each sequence that has no token missing afterwards, in the order of `work`."""
        self.cache.apply()
        output = self._runner.forward(build_batch([w.share() for w in work], self._runner.device), self._tensors)
        for sequence, lease, rows, _ in work:
            prompt = len(sequence.prepared.prompt)
            in_prompt = lease.length < prompt
            self.manager.advance(lease, rows)
            self._seats.computed(sequence, rows, in_prompt)
            if in_prompt:
                self.manager.publish(lease, sequence.tokens)
                self._job(sequence).answer.progress(min(lease.length, prompt), prompt)
        self.steps += 1
        return output.logits

    def _sample(self, work: Sequences[Work], logits: torch.Tensor) -> list[Verified]:
        """Returns what comes next for each sequence that has no token missing, and what would behind its draft."""
        groups = [(self._choices(w.sequence), w.draft) for w in work if not w.sequence.missing]
        drawing = [(choice, draft) for choices, draft in groups for choice in choices]
        rows, specs = rows_to_draw(groups)
        if len(rows) > logits.shape[0]:
            logits = logits[rows]
        parts = drawn_in_parts(logits, specs, [1 + len(draft) for _, draft in drawing])
        for sequence in {choice.order.arrival: choice for choice, _ in drawing if choice.width > 1}.values():
            self._seats.fork(sequence, self._choices(sequence)[1:])
            sequence.width = 1
        return [Verified(choice, draft, drawn) for (choice, draft), drawn in zip(drawing, parts, strict=True)]

    def _choices(self, sequence: Sequence) -> tuple[Sequence, ...]:
        """Returns the choices whose next token is drawn from this sequence's logits."""
        return (sequence,) if sequence.width == 1 else self._job(sequence).sequences

    def _commit_all(self, verified: Verified, moves: list[list[SlotMove]]) -> int:
        """Follows a draft as far as the model says the same; returns how many of its tokens were right.

        Behind it come the tokens about which the grammar leaves no choice: they are known without being drawn.
        `moves` gets what brings the keys and values of the path to where its tokens stand.
        """
        sequence, draft, drawn = verified
        sequence.drafted += len(draft)
        accepted, node = 0, -1
        moves.append([])
        while True:
            if not self._commit(sequence, drawn[node + 1]):
                return accepted
            node, lease = child(draft, node, sequence.tokens[-1]), sequence.lease
            if node < 0 or lease is None:
                break
            if node > accepted:
                moves[-1].append(SlotMove(slot(lease, lease.length + node - accepted), slot(lease, lease.length)))
            self.manager.advance(lease, 1)
            accepted += 1
            sequence.accepted += 1
        for token in sequence.settled():
            sequence.forced += 1
            if not self._commit(sequence, Drawn(token, True, None)):
                break
        return accepted

    def _commit(self, sequence: Sequence, drawn: Drawn) -> bool:
        """Appends a token to its sequence and tells the client; False where the sequence has ended."""
        job = self._jobs.get(sequence.order.arrival)
        if job is None:
            return False
        if not drawn.finite:
            self._fail_numeric(job)
            return False
        shown = sequence.accept(drawn)
        self.telemetry.count(names.COMPLETION_TOKENS)
        if shown is not None:
            job.answer.delta(sequence.choice, shown)
        if sequence.finish is not None:
            job.answer.finished(sequence.choice, sequence.finish)
            self._leave(sequence)
            self._complete_if_done(job)
            return False
        if job.answer.broken:
            self.cancel(job.key)
        return not job.answer.broken

    def _begin(self, job: Job, lease: Lease | None) -> None:
        """Tells the client that its request runs, and what it gets before the first new token."""
        prompt = len(job.prepared.prompt)
        job.started = True
        if lease is not None:
            job.cached = cached_prompt(lease, prompt)
            job.miss = self._sessions.began(job.sequences[0], job.told, job.cached)
        self.telemetry.count(names.PROMPT_TOKENS, prompt)
        self.telemetry.count(names.CACHED_TOKENS, job.cached.tokens)
        self.telemetry.count(names.CACHED_HOST_TOKENS, job.cached.host)
        self.telemetry.count(names.CACHED_DISK_TOKENS, job.cached.disk)
        job.answer.started(prompt, job.cached.tokens, job.miss)
        for sequence in job.sequences:
            if sequence.opening:
                job.answer.delta(sequence.choice, Emission(text=sequence.opening))
            if sequence.finish is not None:
                job.answer.finished(sequence.choice, sequence.finish)

    def _complete_if_done(self, job: Job) -> None:
        if any(s.finish is None for s in job.sequences):
            return
        self._hooks.answered(job.sequences[0])
        job.answer.completed(job.usage)
        self.telemetry.count(names.REQUESTS_COMPLETED)
        self.request_seconds += SMOOTHING * (self._hooks.clock() - job.arrived - self.request_seconds)
        self._drop(job)

    def _fail_numeric(self, job: Job) -> None:
        """Ends a job whose logits are not finite; nothing that it computed, or started from, is found again."""
        self.telemetry.count(names.NUMERIC_FAILURES)
        for sequence in job.sequences:
            self._seats.leave(sequence, broken=True)
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
        self._hooks.ended(job)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is; what it computed is retained."""
        self._sessions.left(sequence)
        self.speculation.leave(sequence)
        self._seats.leave(sequence)

    def _job(self, sequence: Sequence) -> Job:
        return self._jobs[sequence.order.arrival]

    def _measure(self, work: Sequences[Work], accepted: int, seconds: float) -> None:
        rows = sum(w.rows for w in work)
        chunks = sum(w.rows for w in work if w.rows > 1)
        self.telemetry.count(names.STEP_SECONDS_TOTAL, seconds)
        self.telemetry.count(names.PREFILL_ROWS, chunks)
        self.telemetry.count(names.DECODE_ROWS, rows - chunks)
        if chunks and seconds > 0:
            self.telemetry.set(names.PREFILL_RATE, chunks / seconds)
        self.telemetry.count(names.DRAFTED_TOKENS, sum(len(w.draft) for w in work))
        self.telemetry.count(names.ACCEPTED_TOKENS, accepted)
        record(self.telemetry, self.cache, self.ahead.queue)
        self.speculation.observe(work, seconds)
        if self._runner.profile == "reference":
            return
        if rows < MIN_PREFILL_ROWS:
            self._few = smooth(self._few, rows, seconds)
        else:
            self._many = smooth(self._many, rows, seconds)
            self._seats.service.decode_cost = decode_cost(self._few, self._many)
            self._seats.prefill_rate = self._many.rows / self._many.seconds
