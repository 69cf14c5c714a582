"""The engine's side of the helper process: starts it, asks it, kills it when it takes too long, starts the next.

One job at a time; whoever asks while another job runs waits, up to a limit.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from magnitude_engine.decode.grammar.jobs import (
    Answer,
    Begin,
    Budget,
    CheckJob,
    CompileJob,
    Ready,
    receive_answer,
    send,
)
from magnitude_engine.decode.grammar.tokens import Vocabulary
from magnitude_engine.errors import EngineError, Overloaded

_MODULE = "magnitude_engine.decode.grammar.helper"
# Seconds that a helper gets to read the end of its socket, and one that is dying of a signal to be gone.
_IDLE_S = 0.2
_DYING_S = 5.0


@dataclass(frozen=True, slots=True)
class HelperLimits:
    """Time of one job; seconds of waiting for a turn, and of a start; bytes that a job may take."""

    job: Budget = field(default_factory=Budget)
    turn_s: float = 10.0
    start_s: float = 60.0
    memory: int = 1024**3


class Ended(Enum):
    """Why a job brought no answer: the helper was killed, or died, in the midst of it."""

    TIME = "it took too long"
    MEMORY = "it needed too much memory or nesting"


class Helper:
    """Thread-safe. The process starts with the first job or with `start`."""

    def __init__(self, vocabulary: Vocabulary | None, limits: HelperLimits) -> None:
        self._vocabulary = vocabulary
        self.limits = limits
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready = False
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id while there is a process."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Has the process start and get ready where there is none; does not wait for it."""
        threading.Thread(target=self._prepare, name="magnitude-grammar-start", daemon=True).start()

    def ask(self, job: CompileJob | CheckJob) -> Answer | Ended:
        """Returns the helper's answer, or why there is none; it is killed when the job's budget is spent.

        Raises:
            Overloaded: other jobs took too long.
            EngineError: the helper cannot be started, or was closed.
        """
        # A helper that has just been started takes its time.
        patience = self.limits.turn_s + (0.0 if self._ready else self.limits.start_s)
        if not self._turn.acquire(timeout=patience):
            raise Overloaded("too many new grammars are waiting to be compiled or checked; send the request again")
        try:
            channel = self._awaited()
            # Its own timers fire first; this one is for a helper that does not run at all.
            channel.settimeout(job.budget.wall_s + 1.0)
            try:
                send(channel, job)
                return receive_answer(channel)
            except TimeoutError:
                ended = Ended.TIME
                self._stop()
            except (EOFError, OSError, msgspec.MsgspecError):
                ended = _reason(self._stop(_DYING_S))
            self._launch()
            return ended
        finally:
            self._turn.release()

    def close(self) -> None:
        """Ends the process, whatever it is at; later jobs are refused."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._turn:
            self._stop()

    def _prepare(self) -> None:
        """Gets the process ready; where that fails, whoever asks first is told."""
        with self._turn, contextlib.suppress(EngineError):
            self._awaited()

    def _launch(self) -> None:
        if self._closed:
            raise EngineError("the grammar helper was closed; the engine is stopping")
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    (sys.executable, "-m", _MODULE),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                )
            except OSError as error:
                ours.close()
                raise EngineError(f"the grammar helper cannot be started: {error}") from error
        self._channel, self._ready = ours, False

    def _awaited(self) -> socket.socket:
        """Returns the channel to a helper that waits for a job; one that has died meanwhile is replaced once."""
        for _ in range(2):
            self._launch()
            channel = self._channel
            if channel is not None and self._process is not None and self._process.poll() is None:
                with contextlib.suppress(EOFError, OSError, msgspec.MsgspecError):
                    self._greet(channel)
                    return channel
            self._stop()
        raise EngineError("the grammar helper does not start; see whether memory or processes are short")

    def _greet(self, channel: socket.socket) -> None:
        if self._ready:
            return
        channel.settimeout(self.limits.start_s)
        send(channel, Begin(vocabulary=self._vocabulary, memory=self.limits.memory))
        if not isinstance(receive_answer(channel), Ready):
            raise EOFError("the grammar helper began with the wrong frame")
        self._ready = True

    def _stop(self, patience: float = _IDLE_S) -> int:
        """Ends the process, by force after `patience` seconds; returns its exit status (negative: the signal)."""
        process, channel = self._process, self._channel
        self._process = self._channel = None
        self._ready = False
        if channel is not None:
            channel.close()
        if process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(patience)
        process.kill()
        return process.wait()


def _reason(status: int) -> Ended:
    timers = {-signal.SIGALRM, -signal.SIGPROF, -signal.SIGXCPU, -signal.SIGKILL}
    return Ended.TIME if status in timers else Ended.MEMORY
