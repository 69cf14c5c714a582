"""Frames on the unix socket: a 4-byte big-endian length and a msgpack map."""

from __future__ import annotations

import asyncio

import msgspec

from magnitude_engine.api.commands import Command
from magnitude_engine.api.events import Event

MAX_FRAME_BYTES = 64 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_command_decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_event_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def encode_frame(frame: Command | Event) -> bytes:
    """Returns the length prefix and the msgpack body of `frame`.

    Raises:
        ValueError: the body is larger than `MAX_FRAME_BYTES`, or a JSON Schema in it holds a whole number that
            msgpack cannot say.
    """
    try:
        body = _encoder.encode(frame)
    except OverflowError as error:
        raise ValueError("a whole number in a JSON Schema is beyond 64 bits; write it smaller") from error
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"frame of {len(body)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return len(body).to_bytes(4, "big") + body


class FrameReader:
    """Reads frames from a stream; one reader per connection."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream

    async def command(self) -> Command:
        """Returns the next command (see `_body` for errors)."""
        return _command_decoder.decode(await self._body())

    async def event(self) -> Event:
        """Returns the next event (see `_body` for errors)."""
        return _event_decoder.decode(await self._body())

    async def _body(self) -> bytes:
        """Raises asyncio.IncompleteReadError at the end of the stream, ValueError for an oversized frame."""
        size = int.from_bytes(await self._stream.readexactly(4), "big")
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
        return await self._stream.readexactly(size)
