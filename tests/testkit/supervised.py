"""A supervisor over scripted workers, here or as a process of its own.

PYTHONPATH=tests python tests/testkit/supervised.py FOLDER    prints the worker's process id once it is ready
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from magnitude_engine import api
from magnitude_proxy.config import TelemetryConfig, WorkerConfig
from magnitude_proxy.routing.route import Step
from magnitude_proxy.telemetry import Telemetry
from magnitude_proxy.worker.local import LocalRoute
from magnitude_proxy.worker.supervisor import Supervisor
from testkit import scripted_worker


class Supervised:
    """A supervisor, its route, and the means to look at both."""

    def __init__(self, folder: Path, start: str = "normal", hang_s: float = 20.0, start_s: float = 60.0) -> None:
        socket = folder / "w.sock"
        self.telemetry = Telemetry(TelemetryConfig())
        self.route = LocalRoute(socket, self.telemetry, hang_s=hang_s)
        command = (sys.executable, scripted_worker.__file__, "--socket", str(socket), "--start", start)
        config = WorkerConfig(hang_s=hang_s, start_s=start_s)
        self.supervisor = Supervisor(config, command, self.route.pulse, self.telemetry, jitter=lambda: 0.0)

    def counted(self, metric: str) -> float:
        lines = self.telemetry.exposition().decode().splitlines()
        return sum(float(x.split()[-1]) for x in lines if x.startswith(f"magnitude_{metric}_total"))

    async def answer(self, script: str) -> api.AnswerEvent:
        """Returns the last event of an answer."""
        asked = api.Generate(request=script, epoch=1, tenant="t", session="s", input=api.TextInput(text=script))
        step = Step(kind="completions", request=asked, body={}, stream=True)
        async with aclosing(self.route.answer(step, 0)) as events:
            return [event async for event in events][-1]


@asynccontextmanager
async def running(bench: Supervised) -> AsyncIterator[Supervised]:
    await bench.route.start()
    await bench.supervisor.start()
    try:
        yield bench
    finally:
        await bench.supervisor.stop()
        await bench.route.close()


async def main(folder: Path) -> None:
    async with running(Supervised(folder)) as bench:
        while not bench.route.available():
            await asyncio.sleep(0.01)
        print(bench.supervisor.pid, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
