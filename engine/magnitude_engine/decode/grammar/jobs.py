"""What the engine and its helper process say to each other: one answer to each job, one job at a time.

Frames are a 4-byte big-endian length and a msgpack map, over the helper's standard input, which is a socket.
"""

from __future__ import annotations

import socket

import msgspec

from magnitude_engine.api import Frozen
from magnitude_engine.decode.grammar.tokens import Vocabulary

MAX_FRAME_BYTES = 256 * 1024 * 1024


class Begin(Frozen, tag="begin", frozen=True, kw_only=True):
    """The first frame: the vocabulary to compile for (None: only checks are wanted).

    `memory` is how many bytes of address space jobs may take beyond what the helper has once it is ready.
    """

    vocabulary: Vocabulary | None
    memory: int


class Budget(Frozen, frozen=True, kw_only=True):
    """Seconds of processor and of wall time after which the helper is killed by its own timers."""

    cpu_s: float = 1.0
    wall_s: float = 3.0


class CompileJob(Frozen, tag="compile", frozen=True, kw_only=True):
    """Compile the first of `grammars` that can be, and follow it for `steps` tokens.

    Attributes:
        schema: JSON of the schema that they come from, to be checked itself; empty for none.
        exact: how many of `grammars` need no check afterwards; for the others `schema` must be usable for one.
    """

    grammars: tuple[str, ...]
    budget: Budget
    steps: int
    schema: str = ""
    exact: int = 1


class CheckJob(Frozen, tag="check", frozen=True, kw_only=True):
    """Check `text` as JSON against `schema`."""

    schema: str
    text: str
    budget: Budget


class Ready(Frozen, tag="ready", frozen=True, kw_only=True):
    """The helper has begun."""


class Compiled(Frozen, tag="compiled", frozen=True, kw_only=True):
    """Which of the grammars was compiled (-1: none), what each one before it lacked, and warnings about it."""

    index: int
    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


class Checked(Frozen, tag="checked", frozen=True, kw_only=True):
    """Whether the text is valid; where not, why and at which JSON pointer."""

    valid: bool
    message: str = ""
    path: str = ""


Job = Begin | CompileJob | CheckJob
Answer = Ready | Compiled | Checked

_encoder = msgspec.msgpack.Encoder()
_jobs: msgspec.msgpack.Decoder[Job] = msgspec.msgpack.Decoder(Job)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send(channel: socket.socket, frame: Job | Answer) -> None:
    """Writes one frame; raises OSError where the other side is gone or does not read in time."""
    body = _encoder.encode(frame)
    channel.sendall(len(body).to_bytes(4, "big") + body)


def receive_job(channel: socket.socket) -> Job:
    """Returns the next job; raises EOFError at the end, OSError or msgspec.MsgspecError for a broken channel."""
    return _jobs.decode(_frame(channel))


def receive_answer(channel: socket.socket) -> Answer:
    """Returns the next answer; errors as `receive_job`, and TimeoutError after the channel's timeout."""
    return _answers.decode(_frame(channel))


def _frame(channel: socket.socket) -> bytes:
    size = int.from_bytes(_exactly(channel, 4), "big")
    if size > MAX_FRAME_BYTES:
        raise EOFError(f"a frame of {size} bytes is over the limit")
    return _exactly(channel, size)


def _exactly(channel: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = channel.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other side has closed the channel")
        parts += part
    return bytes(parts)
