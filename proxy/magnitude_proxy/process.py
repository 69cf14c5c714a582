"""Child processes that never outlive this one, and socket paths that fit into the kernel's limit."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from magnitude_engine.errors import ConfigError

SOCKET_PATH_BYTES = 100
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> Callable[[], None] | None:
    """Returns a `preexec_fn` that has the kernel kill the child when this process ends; None where there is no such.

    The kernel watches the thread that forked, so that children must be spawned from a thread that lasts. SIGKILL,
    because a child that cleans up late would remove the socket of its successor.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent = os.getpid()

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return arm


async def stop(process: asyncio.subprocess.Process, grace_s: float) -> int:
    """Ends `process` with SIGTERM, with SIGKILL after `grace_s`, and returns its exit status once it is reaped."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(grace_s):
            return await process.wait()
    except TimeoutError:
        return await kill(process)


async def kill(process: asyncio.subprocess.Process) -> int:
    """Ends `process` with SIGKILL and returns its exit status once it is reaped."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    return await process.wait()


def private_folder(path: Path) -> Path:
    """Creates `path` for this user alone (0700) and returns it.

    Raises:
        ConfigError: it is a link, not a folder, or belongs to another user.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise ConfigError(f"{path} must be a folder of user id {os.geteuid()}; remove it or choose another data folder")
    path.chmod(0o700)
    return path


def socket_path(folder: Path, name: str) -> Path:
    """Returns the path for the unix socket `name` of `folder`, the same in every process.

    The kernel allows about 100 bytes: a longer path is replaced by a name made from its hash, in this user's private
    folder under the system's temporary one.
    """
    path = folder.absolute() / name
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    short = private_folder(Path(tempfile.gettempdir()) / f"magnitude-{os.geteuid()}") / f"{digest}.sock"
    if len(os.fsencode(short)) > SOCKET_PATH_BYTES:
        raise ConfigError(f"{short} is too long for a unix socket; set TMPDIR or the data folder to a shorter path")
    return short
