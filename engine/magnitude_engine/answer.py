"""The outgoing side of one request: builds its events and hands them to the request's sink, in order."""

from __future__ import annotations

from collections.abc import Callable

from magnitude_engine import api
from magnitude_engine.decode.grammar.compiler import CompiledGrammar
from magnitude_engine.errors import EngineError, MagnitudeError, Overloaded
from magnitude_engine.request import Emission, Finish
from magnitude_engine.telemetry import worker_log

Sink = Callable[[api.AnswerEvent], None]


def failed(asked: api.Generate | api.Count | api.Register, error: MagnitudeError) -> api.Failed:
    """Returns the event that ends what was asked with `error`; failures of the engine itself are retryable."""
    return api.Failed(
        request=asked.request,
        epoch=asked.epoch,
        code=error.code,
        message=error.message,
        param=error.param,
        retryable=isinstance(error, EngineError),
        retry_after_s=error.retry_after_s if isinstance(error, Overloaded) else None,
    )


def registered(register: api.Register, grammar: CompiledGrammar | None, ahead: bool) -> api.Registered:
    """Returns the event that tells what of a registration is compiled, and whether its prompt is computed ahead."""
    rules = {} if grammar is None or grammar.check is None else {r.tool: r.keywords for r in grammar.check.rules}
    return api.Registered(
        request=register.request,
        epoch=register.epoch,
        tools=tuple(api.RegisteredTool(name=tool.name, checked=rules.get(tool.name, ())) for tool in register.tools),
        ignored=() if grammar is None else grammar.ignored,
        ahead=ahead,
    )


class Answer:
    """The events of one request.

    Attributes:
        broken: the sink raised an error, or a choice has failed; nothing more is sent, and the request should be
            cancelled.
    """

    def __init__(self, generate: api.Generate, sink: Sink) -> None:
        self._generate = generate
        self._sink = sink
        self.broken = False

    def started(self, prompt_tokens: int, cached_tokens: int, miss: api.CacheMiss | None = None) -> None:
        """The request was admitted."""
        self._send(
            api.Started(
                request=self._generate.request,
                epoch=self._generate.epoch,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                miss=miss,
            )
        )

    def progress(self, done: int, total: int) -> None:
        """A chunk of the prompt was computed."""
        request, epoch = self._generate.request, self._generate.epoch
        self._send(api.Progress(request=request, epoch=epoch, done=done, total=total))

    def delta(self, choice: int, shown: Emission) -> None:
        """A choice has new output."""
        self._send(
            api.Delta(
                request=self._generate.request,
                epoch=self._generate.epoch,
                choice=choice,
                text=shown.text,
                ids=shown.ids,
                logprobs=shown.logprobs,
                tool_calls=shown.tool_calls,
            )
        )

    def finished(self, choice: int, finish: Finish) -> None:
        """A choice ended; one that has failed ends the request, and nothing follows."""
        if finish.error is not None:
            self.failed(finish.error)
            self.broken = True
            return
        self._send(
            api.Finished(
                request=self._generate.request,
                epoch=self._generate.epoch,
                choice=choice,
                reason=finish.reason,
                matched_stop=finish.matched_stop,
            )
        )

    def completed(self, usage: api.Usage) -> None:
        """All choices ended."""
        self._send(api.Completed(request=self._generate.request, epoch=self._generate.epoch, usage=usage))

    def failed(self, error: MagnitudeError) -> None:
        """The request ended without an answer."""
        self._send(failed(self._generate, error))

    def _send(self, event: api.AnswerEvent) -> None:
        if self.broken:
            return
        try:
            self._sink(event)
        except Exception:  # noqa: BLE001 - the sink is the caller's code; its faults end this request only
            worker_log.exception("the receiver of request %s raised an error", self._generate.request)
            self.broken = True
