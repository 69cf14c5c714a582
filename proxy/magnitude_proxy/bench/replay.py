"""Replays steps against one contender that runs, and turns each answer into a sample."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import httpx
import msgspec

from magnitude_engine import api
from magnitude_engine.api.forced import ForcedFigures, ForcedReady, ForcedStep
from magnitude_proxy.bench import calls
from magnitude_proxy.bench.asking import Answer, Asker, Question, Said, question
from magnitude_proxy.bench.contenders import Contender
from magnitude_proxy.bench.receipt import Mode, Sample, SettingsEntry
from magnitude_proxy.bench.recorded import Message, Step
from magnitude_proxy.bench.running import Model, Running, StartFailed, log_end, running, shown, spawned, version_of

Line = TypeVar("Line")

# Asked before anything is measured, so that what a server does once is done.
WARM_UP = "Write one sentence about the sea, and one about the sky above it."
WARM_UP_TOKENS = 16


class Turn(NamedTuple):
    """Whose samples are taken, in which round and mode."""

    mode: Mode
    round: int
    contender: Contender


class Target(Protocol):
    """What answers steps."""

    running: Running

    def sample(self, turn: Turn, step: Step) -> Sample:
        """Returns how a step was answered."""


@contextlib.contextmanager
def target(turn: Turn, model: Model, work: Path, settings: SettingsEntry, key: str | None) -> Iterator[Target]:
    """Starts the contender of `turn` afresh, warms it up, and ends it.

    Raises:
        StartFailed: it did not come to serve.
    """
    if turn.contender.in_process:
        with _forced(turn.contender, model, work) as process:
            yield process
        return
    with running(turn.contender, model, work) as server, contextlib.closing(Asker(server.url, key)) as asker:
        yield _warm(server, asker, settings)


def replay(
    at: Target, turn: Turn, steps: Sequence[Step], told: Callable[[Sample], None] = lambda sample: None
) -> list[Sample]:
    """Returns a sample of each step, one after the other; `told` gets each at once."""
    samples: list[Sample] = []
    for step in steps:
        samples.append(at.sample(turn, step))
        told(samples[-1])
    return samples


def _warm(server: Running, asker: Asker, settings: SettingsEntry) -> Target:
    try:
        model = asker.model()
    except (httpx.HTTPError, msgspec.DecodeError, IndexError) as error:
        raise StartFailed(f"{server.url}/models does not list a model: {error}") from error
    warm = asker.ask(question(model, (Message("user", WARM_UP),), (), WARM_UP_TOKENS, fixed=False))
    if warm.error:
        raise StartFailed(f"{server.url} does not answer: {warm.error}")
    return _Server(server, asker, model, settings)


class _Server:
    """A server under HTTP."""

    def __init__(self, server: Running, asker: Asker, model: str, settings: SettingsEntry) -> None:
        self.running = server
        self._asker = asker
        self._model = model
        self._settings = settings

    def sample(self, turn: Turn, step: Step) -> Sample:
        """Asks for one step."""
        answer = self._asker.ask(self._question(turn, step))
        counted = calls.count(answer.text, answer.calls, step.offered, cut_off=answer.finish == "length")
        counts = answer.counts
        return Sample(
            mode=turn.mode,
            round=turn.round,
            contender=turn.contender.name,
            group=step.group,
            session=step.session,
            step=step.number,
            first_s=answer.first_s,
            wall_s=answer.wall_s,
            prompt=counts.prompt,
            cached=counts.cached,
            output=counts.output,
            drafted=counts.drafted,
            accepted=counts.accepted,
            valid=counted.valid,
            invalid=counted.invalid,
            cut=counted.cut,
            finish=answer.finish,
            answer=fingerprint(answer),
            error=answer.error,
        )

    def _question(self, turn: Turn, step: Step) -> Question:
        settings, fixed = self._settings, turn.mode == "fixed"
        messages = step.messages if not turn.contender.url else salted(step.messages, turn)
        return question(self._model, messages, step.tools, settings.tokens if fixed else settings.limit, fixed)


def salted(messages: Sequence[Message], turn: Turn) -> tuple[Message, ...]:
    """Returns the messages with a first line of their own, since a server that runs already may remember a round."""
    line = f"({turn.mode}, round {turn.round + 1})"
    first = messages[0]
    if first.role != "system":
        return (Message("system", line), *messages)
    return (Message("system", f"{line}\n{first.text}"), *messages[1:])


def fingerprint(answer: Answer) -> str:
    """Returns what an answer says as 16 hex digits."""
    said: tuple[str, tuple[Said, ...]] = (answer.text, answer.calls)
    return hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:16]


@contextlib.contextmanager
def _forced(contender: Contender, model: Model, work: Path) -> Iterator[Target]:
    with tempfile.TemporaryDirectory(dir=work, prefix=f"{contender.name}-forced-") as name:
        values = {"model": str(model.file or model.folder())}
        log = Path(name) / "forced.log"
        began = time.monotonic()
        with spawned(contender, values, log, piped=True) as process:
            pipe = _Pipe(process, log)
            pipe.read(ForcedReady)
            command, environment = shown(contender, values)
            took = time.monotonic() - began
            state = Running("", process.pid, command, environment, version_of(contender), took)
            yield _InProcess(state, pipe)


class _Pipe:
    """Lines of JSON to and from a process."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def write(self, record: msgspec.Struct) -> None:
        """Sends a line."""
        if self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(record) + b"\n")
            self._process.stdin.flush()

    def read(self, kind: type[Line]) -> Line:
        """Returns the next line; raises StartFailed where the process has ended."""
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            raise StartFailed(f"the engine ended with status {self._process.wait()}:\n  {log_end(self._log)}")
        return msgspec.json.decode(line, type=kind)


class _InProcess:
    """The engine in a process of its own, forced."""

    def __init__(self, state: Running, pipe: _Pipe) -> None:
        self.running = state
        self._pipe = pipe

    def sample(self, turn: Turn, step: Step) -> Sample:
        """Runs one step with its recorded answer."""
        self._pipe.write(ForcedStep(session=step.session, step=step.number, chat=chat(step), answer=step.answer))
        figures = self._pipe.read(ForcedFigures)
        usage = figures.usage
        counted = calls.count(step.answer, (), step.offered, cut_off=False)
        return Sample(
            mode=turn.mode,
            round=turn.round,
            contender=turn.contender.name,
            group=step.group,
            session=step.session,
            step=step.number,
            first_s=figures.first_s,
            wall_s=figures.wall_s,
            prompt=usage.prompt_tokens,
            cached=usage.cached_tokens,
            output=usage.completion_tokens,
            drafted=usage.drafted_tokens,
            accepted=usage.accepted_tokens,
            valid=counted.valid,
            invalid=counted.invalid,
            cut=counted.cut,
            finish="length",
            answer=fingerprint(Answer(None, 0.0, step.answer)),
            rows=figures.rows,
            passes=figures.passes,
            error=figures.error,
        )


def chat(step: Step) -> api.ChatInput:
    """Returns the step's conversation in the engine's form; recorded answers owe nothing to a grammar."""
    messages = tuple(
        api.Message(
            role="system" if message.role == "developer" else message.role,
            content=message.text,
            tool_call_id=message.tool_call_id,
            tool_calls=tuple(
                api.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
                for call in message.tool_calls or ()
            ),
        )
        for message in step.messages
    )
    functions = [tool.function for tool in step.tools]
    tools = tuple(api.Tool(name=f.name, description=f.description, parameters=f.parameters) for f in functions)
    return api.ChatInput(messages=messages, tools=tools, tool_choice=api.ToolChoice(mode="none"))
