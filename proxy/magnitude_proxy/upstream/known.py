"""What is known of an upstream, asked for when a request first needs it and again from time to time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from magnitude_proxy.config import UpstreamConfig
from magnitude_proxy.telemetry import proxy_log
from magnitude_proxy.upstream.adapters.recognise import Ask, recognise
from magnitude_proxy.upstream.adapters.server import Server

# A request waits this long for the answers, at most.
ASK_S = 2.0
FRESH_S = 600.0
SILENT_S = 30.0


class Known:
    """The kind of one upstream and its facts; `clock` gives monotonic seconds, `ask` a reply to a URL."""

    def __init__(self, config: UpstreamConfig, ask: Ask, clock: Callable[[], float]) -> None:
        self._config = config
        self._ask = ask
        self._clock = clock
        self._server = Server("openai" if config.kind == "auto" else config.kind)
        self._until = float("-inf")
        self._lock = asyncio.Lock()

    async def server(self) -> Server:
        """Returns what the upstream is, as far as it has answered; `openai` until it has."""
        if self._clock() < self._until:
            return self._server
        async with self._lock:
            if self._clock() >= self._until:
                await self._look()
        return self._server

    def doubt(self) -> None:
        """Has it asked anew at the next request: another server may stand there."""
        self._until = float("-inf")

    async def _look(self) -> None:
        found: Server | None = None
        try:
            async with asyncio.timeout(ASK_S):
                found = await recognise(self._config, self._ask)
        except TimeoutError:
            pass
        self._until = self._clock() + (SILENT_S if found is None else FRESH_S)
        if found is not None and found != self._server:
            proxy_log.info("upstream %s is %s", self._config.name, found.words())
            self._server = found
