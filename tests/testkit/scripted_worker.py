"""A worker that does what its prompt says, for tests of the proxy's side of the socket.

python scripted_worker.py --socket PATH [--start normal|refuse|mute|crash]

A conversation counts one token per message. A text prompt is a script: words separated by blanks, carried out in order.

    N          N deltas `w0 `, `w1 `, … with one token id each
    foreign    a delta with another epoch
    pause      wait until the request is cancelled
    die        exit with status 3 at once
    hang       block the whole process
    stick      status goes on, with work running and a step counter that stands still
    garbage    bytes that are no frame
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from pathlib import Path

from magnitude_engine import api

CARD = api.ModelCard(
    name="scripted",
    architecture="none",
    context_length=100,
    vocab_size=10,
    profile="reference",
    tokenizer_hash="t",
    weights_hash="w",
)
REPORT = api.CacheReport(
    page_tokens=16,
    pages_total=1000,
    pages_free=400,
    pages_idle=500,
    learned_hit_rate=0.5,
    tiers=(api.TierUse(name="device", blocks=600, bytes=6 << 20, limit_bytes=10 << 20, tokens_served=1234),),
    runs=(api.CacheRun(parent=-1, tenant="a" * 64, tokens=64, pages=4, sessions=1),),
    sessions=(api.SessionUse(tenant="a" * 64, session="b" * 32, branch="main", state="thinking", tokens=64),),
)


class ScriptedWorker:
    """Serves connections on a unix socket; `cancelled`, `generated`, `registered` and `news` keep what was asked.

    It reads nothing while `reading` is not set.

    A registration with a tool named `bad` is refused; one of a tool named `slow` waits for `go_on`.

    Attributes:
        report: the answer to `Inspect`; None says nothing.
        inspected: how often a report was asked for.
    """

    def __init__(self, socket: Path, protocol: int = api.PROTOCOL_VERSION) -> None:
        self.socket = socket
        self.cancelled: list[api.Cancel] = []
        self.generated: list[api.Generate] = []
        self.registered: list[api.Register] = []
        self.news: list[api.ToolEvent | api.EndSession | api.Expect] = []
        self.go_on = asyncio.Event()
        self.reading = asyncio.Event()
        self.reading.set()
        self.connections = 0
        self.report: api.CacheReport | None = REPORT
        self.inspected = 0
        self._protocol = protocol
        self._server: asyncio.AbstractServer | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._stuck = False
        self._steps = 0

    async def start(self) -> None:
        """Listens."""
        self._server = await asyncio.start_unix_server(self._serve, self.socket)

    async def close(self) -> None:
        """Stops listening and drops every connection."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()
        self.socket.unlink(missing_ok=True)

    def fail(self, asked: api.Generate, code: str) -> None:
        """Ends a request that is under way."""
        failed = api.Failed(request=asked.request, epoch=asked.epoch, code=code, message=code)
        for writer in self._writers:
            writer.write(api.encode_frame(failed))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        frames = api.FrameReader(reader)
        tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        with contextlib.suppress(EOFError, OSError):
            while True:
                command = await frames.command()
                await self.reading.wait()
                if isinstance(command, api.Hello):
                    welcome = api.Welcome(protocol=self._protocol, incarnation="i", pid=os.getpid(), model=CARD)
                    writer.write(api.encode_frame(welcome))
                    tasks["", 0] = asyncio.create_task(self._push(writer))
                elif isinstance(command, api.Probe):
                    writer.write(api.encode_frame(self._status()))
                elif isinstance(command, api.Generate):
                    self.generated.append(command)
                    key = (command.request, command.epoch)
                    tasks[key] = asyncio.create_task(self._play(command, writer))
                elif isinstance(command, api.Register):
                    self.registered.append(command)
                    tasks[command.request, 0] = asyncio.create_task(self._compile(command, writer))
                elif isinstance(command, api.ToolEvent | api.EndSession | api.Expect):
                    self.news.append(command)
                elif isinstance(command, api.Count):
                    counted = len(command.input.messages) if isinstance(command.input, api.ChatInput) else 0
                    told = api.Completed(
                        request=command.request, epoch=command.epoch, usage=api.Usage(prompt_tokens=counted)
                    )
                    writer.write(api.encode_frame(told))
                elif isinstance(command, api.Inspect):
                    self.inspected += 1
                    if self.report is not None:
                        writer.write(api.encode_frame(self.report))
                elif isinstance(command, api.Cancel):
                    self.cancelled.append(command)
                    tasks.pop((command.request, command.epoch)).cancel()
        for task in tasks.values():
            task.cancel()
        self._writers.discard(writer)
        writer.close()

    async def _compile(self, asked: api.Register, writer: asyncio.StreamWriter) -> None:
        ids = {"request": asked.request, "epoch": asked.epoch}
        names = [tool.name for tool in asked.tools]
        if "slow" in names:
            await self.go_on.wait()
        if "bad" in names:
            param = f"tools[{names.index('bad')}].function.parameters"
            message = f"{param} cannot be used: not is unknown"
            writer.write(api.encode_frame(api.Failed(**ids, code="invalid_value", message=message, param=param)))
            return
        tools = tuple(api.RegisteredTool(name=n, checked=("not at #",) if n == "odd" else ()) for n in names)
        writer.write(api.encode_frame(api.Registered(**ids, tools=tools)))

    async def _push(self, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            self._steps += not self._stuck
            writer.write(api.encode_frame(self._status()))
            await asyncio.sleep(0.02)

    def _status(self) -> api.Status:
        return api.Status(
            incarnation="i",
            steps=self._steps,
            running=int(self._stuck),
            waiting=0,
            pages_free=1,
            pages_total=2,
            counters={"tokens": 5.0},
            gauges={"pages_on_disk": 7.0},
        )

    async def _play(self, asked: api.Generate, writer: asyncio.StreamWriter) -> None:
        ids = {"request": asked.request, "epoch": asked.epoch}
        script = asked.input.text.split() if isinstance(asked.input, api.TextInput) else []
        writer.write(api.encode_frame(api.Started(**ids, prompt_tokens=3)))
        sent = 0
        for word in script:
            if word.isdigit():
                for number in range(int(word)):
                    writer.write(api.encode_frame(api.Delta(**ids, text=f"w{number} ", ids=(number,))))
                    sent += 1
                    await asyncio.sleep(0)
            elif word == "foreign":
                writer.write(api.encode_frame(api.Delta(request=asked.request, epoch=asked.epoch + 1, text="foreign")))
            elif word == "pause":
                await asyncio.Event().wait()
            elif word == "garbage":
                writer.write(b"\x00\x00\x00\x03abc")
            elif word == "stick":
                self._stuck = True
                await asyncio.Event().wait()
            elif word == "hang":
                time.sleep(1000)
            elif word == "die":
                os._exit(3)
        writer.write(api.encode_frame(api.Finished(**ids, choice=0, reason="stop")))
        usage = api.Usage(prompt_tokens=3, completion_tokens=sent)
        writer.write(api.encode_frame(api.Completed(**ids, usage=usage)))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--start", default="normal")
    options = parser.parse_args()
    if options.start == "refuse":
        print("model x.gguf has no tokenizer", file=sys.stderr)
        sys.exit(2)
    if options.start == "crash":
        sys.exit(1)
    if options.start == "normal":
        options.socket.unlink(missing_ok=True)
        await ScriptedWorker(options.socket).start()
        print("listening", file=sys.stderr, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
