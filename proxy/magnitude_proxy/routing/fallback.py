"""Runs one step on the best route and on another when that one fails, so that a client sees one outcome.

What is decided stands in `policy.py`, what the client already has in `transcript.py`; here it is carried out:
attempts one after the other, each cancelled before the next begins, the worker's deadlines, breakers, the
retry budget and the wait for a restarted worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

import msgspec

from magnitude_engine import api
from magnitude_proxy.config import DeadlineConfig, RetryConfig
from magnitude_proxy.routing import policy
from magnitude_proxy.routing.breaker import Breaker, RetryBudget, Ticket
from magnitude_proxy.routing.policy import LOCAL, CallState, Fail, RouteView, Snapshot, Take, Tried, Wait
from magnitude_proxy.routing.route import Route, Step, Taken
from magnitude_proxy.routing.transcript import Transcript
from magnitude_proxy.telemetry import (
    BREAKER_OPENED,
    FALLBACKS,
    RESUMES,
    RETRIES_DENIED,
    STREAMS_BROKEN,
    Telemetry,
    proxy_log,
)

RESTART_POLL_S = 0.05
_NOT_TAKEN = Taken("")


@dataclasses.dataclass(slots=True)
class _Call:
    """One request on its way: what was tried and what the client has; `first` labels the route it begins with."""

    step: Step
    ticket: Ticket
    transcript: Transcript
    tried: list[Tried] = dataclasses.field(default_factory=list)
    attempts: int = 0
    restarts: int = 0
    route: str | None = None
    first: Taken = _NOT_TAKEN

    def failed(self, code: str, message: str) -> api.Failed:
        """Returns a retryable failure of this request."""
        request = self.step.request
        return api.Failed(request=request.request, epoch=request.epoch, code=code, message=message, retryable=True)


class Dispatcher:
    """Answers steps from `routes` (the worker, then upstreams in order of preference); one per process.

    `clock` gives monotonic seconds.
    """

    def __init__(
        self,
        routes: Sequence[Route],
        deadlines: DeadlineConfig,
        retry: RetryConfig,
        telemetry: Telemetry,
        clock: Callable[[], float],
    ) -> None:
        self._routes = {route.name: route for route in routes}
        self._deadlines = deadlines
        self._telemetry = telemetry
        self._clock = clock
        self._budget = RetryBudget(retry.budget_ratio, retry.budget_min)
        self._breakers = {name: Breaker(retry.breaker_failures, retry.breaker_open_s, clock) for name in self._routes}

    def snapshot(self, step: Step | None = None) -> Snapshot:
        """Returns the routes as they are now: all, or those that take the model that `step` asks for."""
        takers = step.upstreams if step else None
        return tuple(
            RouteView(
                name=name,
                available=route.available(),
                coming=route.coming(),
                admitted=self._breakers[name].allows(),
                held_s=self._breakers[name].held_s(),
                failing=self._breakers[name].failing,
            )
            for name, route in self._routes.items()
            if takers is None or name == LOCAL or name in takers
        )

    def ready(self) -> bool:
        """True when some route may answer a request now."""
        return any(view.usable or (view.name == LOCAL and view.available) for view in self.snapshot())

    async def run(self, step: Step) -> AsyncGenerator[Taken | api.AnswerEvent, None]:
        """Yields `Taken` whenever the route changes, the events of the answer, and last one Completed or Failed.

        `Started` and `Progress` come again when another route takes over; nothing else is repeated. Without any
        route to try the only event is a Failed. Closing the generator cancels the attempt behind it before it
        returns.
        """
        with self._budget.ticket() as ticket:
            call = _Call(step, ticket, Transcript(step.request))
            action = await self._first(call)
            while isinstance(action, Take):
                failure: api.Failed | None = None
                async with aclosing(self._attempt(call, action)) as events:
                    async for event in events:
                        if isinstance(event, api.Failed):
                            failure = event
                        else:
                            yield event
                if failure is None:
                    return
                action = await self._after(call, failure)
            if action.denied:
                self._telemetry.count(RETRIES_DENIED)
            if call.transcript.committed:
                self._telemetry.count(STREAMS_BROKEN, route=call.route or "none", reason=action.failed.code)
            yield action.failed

    async def _attempt(self, call: _Call, action: Take) -> AsyncGenerator[Taken | api.AnswerEvent, None]:
        """Yields what the client gets of one attempt; ends with Completed or Failed."""
        breaker = self._breakers[action.route]
        taken = self._taken(call, action)
        call.route = action.route
        call.attempts += 1
        call.transcript.begin()
        if action.retry:
            call.ticket.spend()
        breaker.begin()
        settle: Callable[[], None] = breaker.abandon
        try:
            if taken is not None:
                yield taken
            failure = call.failed("internal_error", f"route {action.route} ended without an outcome")
            try:
                async with aclosing(self._answer(call, action.route)) as events:
                    async for event in events:
                        if isinstance(event, api.Failed):
                            failure = event
                            break
                        complete = isinstance(event, api.Completed)
                        if complete:
                            settle = breaker.succeed
                        for passed in call.transcript.take(event):
                            yield passed
                        if complete:
                            return
                        if call.transcript.committed:
                            breaker.alive()
            except Exception as error:  # noqa: BLE001 - the edge to the routes: a client gets an outcome whatever they do
                proxy_log.error("route %s raised %s", action.route, type(error).__name__, exc_info=error)
                failure = call.failed("internal_error", f"route {action.route} failed inside the proxy; see its log")
            settle = self._verdict(action.route, failure)
            yield call.transcript.counted() if call.transcript.complete() else failure
        finally:
            settle()

    def _answer(self, call: _Call, name: str) -> AsyncGenerator[api.AnswerEvent, None]:
        """Returns the route's own events; the worker's within its deadlines."""
        step = call.step
        resume = call.transcript.resume()
        if resume:
            step = dataclasses.replace(step, request=msgspec.structs.replace(step.request, resume=resume))
        answer = self._routes[name].answer(step, call.attempts)
        return self._paced(answer, call) if name == LOCAL else answer

    async def _paced(
        self, answer: AsyncGenerator[api.AnswerEvent, None], call: _Call
    ) -> AsyncGenerator[api.AnswerEvent, None]:
        """Yields the worker's events within its deadlines, or Failed when one has passed; closes `answer`."""
        began, idle_s = self._clock(), self._deadlines.idle_s
        async with aclosing(answer):
            while True:
                if not call.transcript.committed:
                    event = await self._before_content(answer, call, began)
                else:
                    try:
                        async with asyncio.timeout(idle_s):
                            event = await anext(answer, None)
                    except TimeoutError:
                        event = call.failed("deadline_exceeded", f"the local worker gave no output for {idle_s:g} s")
                if event is None:
                    return
                yield event

    async def _before_content(
        self, answer: AsyncGenerator[api.AnswerEvent, None], call: _Call, began: float
    ) -> api.AnswerEvent | None:
        """Returns the worker's next event, None at its end, or Failed when it is late and another route could answer.

        While no other route could, the wait goes on and looks again every `progress_s`.
        """
        limits = self._deadlines
        pending = asyncio.ensure_future(_next(answer))
        try:
            while not pending.done():
                left = began + limits.first_token_s - self._clock()
                if left <= 0 and self._can_leave(call):
                    return call.failed(
                        "deadline_exceeded", f"the local worker gave no content within {limits.first_token_s:g} s"
                    )
                await asyncio.wait({pending}, timeout=min(limits.progress_s, left) if left > 0 else limits.progress_s)
                if not pending.done() and left > limits.progress_s and self._can_leave(call):
                    return call.failed(
                        "deadline_exceeded", f"the local worker made no progress for {limits.progress_s:g} s"
                    )
            return pending.result()
        finally:
            await _stop(pending)

    def _can_leave(self, call: _Call) -> bool:
        """True when a request could go on elsewhere if it left the worker now."""
        state = self._state(call, [*call.tried, Tried(LOCAL, "deadline_exceeded")])
        target = policy.next_route(call.step, self.snapshot(call.step), state)
        return target is not None and (state.budget or not target.retry)

    async def _first(self, call: _Call) -> Take | Fail:
        """Returns how the request begins; where only the worker could answer and it is starting, after a wait."""
        snapshot = self.snapshot(call.step)
        action = policy.first_action(call.step, snapshot)
        if isinstance(action, Wait):
            action = await self._restarted(call, policy.nothing_left(call.step, snapshot))
            snapshot = self.snapshot(call.step)
        if isinstance(action, Take):
            call.first = policy.first_taken(call.step, snapshot, action.route)
        return action

    async def _after(self, call: _Call, failure: api.Failed) -> Take | Fail:
        """Returns how the request goes on after `failure` of its present route."""
        call.tried.append(Tried(call.route or LOCAL, failure.code))
        state = self._state(call, call.tried)
        action = policy.next_action(call.step, self.snapshot(call.step), state, failure)
        return await self._restarted(call, failure) if isinstance(action, Wait) else action

    async def _restarted(self, call: _Call, failure: api.Failed) -> Take | Fail:
        """Waits until the worker answers again, or before content until any other route can; else the failure."""
        call.restarts += 1
        until = self._clock() + self._deadlines.worker_start_s
        while self._clock() < until and policy.worker_coming(self.snapshot(call.step)):
            if self._routes[LOCAL].available():
                if call.transcript.committed:
                    self._telemetry.count(RESUMES)
                return Take(LOCAL)
            state = self._state(call, call.tried)
            other = None if state.committed else policy.next_route(call.step, self.snapshot(call.step), state)
            if other is not None and (state.budget or not other.retry):
                return other
            await asyncio.sleep(RESTART_POLL_S)
        return Fail(policy.client_failure(self._state(call, call.tried), self.snapshot(call.step), failure))

    def _state(self, call: _Call, tried: Sequence[Tried]) -> CallState:
        return CallState(
            tried=tuple(tried),
            committed=call.transcript.committed,
            resumable=call.transcript.resumable(),
            restarts=call.restarts,
            budget=self._budget.available(),
        )

    def _taken(self, call: _Call, action: Take) -> Taken | None:
        """Returns the label of a new route and counts fallbacks; None when the route stays."""
        if call.route == action.route:
            return None
        if call.route is None:
            taken, source = call.first, "preferred"
        else:
            label = LOCAL if action.route == LOCAL else f"fallback:{action.route}"
            taken = Taken(label, call.tried[-1].code)
            source = call.route
        if call.route is not None or taken.label.startswith("fallback:"):
            self._telemetry.count(FALLBACKS, source=source, target=action.route, reason=taken.reason or "none")
        return taken

    def _verdict(self, name: str, failure: api.Failed) -> Callable[[], None]:
        """Returns what the route's breaker learns from `failure`; a Retry-After of an upstream holds it at once."""
        breaker = self._breakers[name]
        if name != LOCAL and failure.retry_after_s is not None:
            breaker.hold(failure.retry_after_s)
        if not policy.blames_route(failure):
            unasked = name != LOCAL and failure.code in policy.REFUSALS
            return breaker.abandon if unasked or failure.code == "overloaded" else breaker.succeed

        def fail() -> None:
            if breaker.fail():
                proxy_log.warning("route %s: breaker opened after %s", name, failure.code)
                self._telemetry.count(BREAKER_OPENED, route=name)

        return fail


async def _next(answer: AsyncGenerator[api.AnswerEvent, None]) -> api.AnswerEvent | None:
    return await anext(answer, None)


async def _stop(task: asyncio.Task[api.AnswerEvent | None]) -> None:
    """Cancels `task` and waits for its end, so that nothing runs behind a generator that is closed."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
