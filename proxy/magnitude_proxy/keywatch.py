"""A key file's changes taken up while the proxy runs: at SIGHUP, and once a changed file has come to rest.

A file that cannot be used changes nothing: the keys that were last good stay in force, and the log says what is wrong.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from magnitude_engine.errors import ConfigError
from magnitude_proxy.access import KeyRing
from magnitude_proxy.config import ProxyConfig
from magnitude_proxy.keyfile import configured_keys
from magnitude_proxy.telemetry import proxy_log

LOOK_S = 2.0


class _Mark(NamedTuple):
    """What changes when a file does."""

    inode: int
    changed_ns: int
    size: int


class KeyWatch:
    """Keeps a ring's keys those of the configuration and its key file."""

    def __init__(self, config: ProxyConfig, ring: KeyRing) -> None:
        """The ring holds the present keys already."""
        self._config = config
        self._ring = ring

    async def reload(self) -> bool:
        """Reads the key file again; False where it cannot be used and the present keys stay."""
        config = self._config
        try:
            keys = await asyncio.to_thread(configured_keys, config.keys, config.key_file, config.upstreams)
        except ConfigError as problem:
            proxy_log.error("the key file was not taken up, the keys before it stay: %s", problem.message)
            return False
        self._ring.replace(keys)
        proxy_log.info("%d API keys of %d tenants are in force", len(keys), self._ring.tenants)
        return True

    async def follow(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Reloads whenever the key file has changed and is the same in two looks; ends by cancellation only."""
        if self._config.key_file is None:
            return
        path = self._config.key_file
        taken = seen = await asyncio.to_thread(_mark, path)
        while True:
            await sleep(LOOK_S)
            before, seen = seen, await asyncio.to_thread(_mark, path)
            # A file that is being written, or is away between two versions, is looked at again.
            if seen is not None and seen == before and seen != taken:
                taken = seen
                await self.reload()


def _mark(path: str) -> _Mark | None:
    """Returns what identifies the file's present content; None where there is none."""
    try:
        found = os.stat(os.path.expanduser(path))
    except OSError:
        return None
    return _Mark(found.st_ino, found.st_mtime_ns, found.st_size)
